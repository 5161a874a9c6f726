"""What tests of the GPU path need of the machine, as marks."""

from __future__ import annotations

import pytest

from tests.installed import needs

interpreted = pytest.mark.usefixtures("interpreter")
needs_triton, needs_peft = needs("triton"), needs("peft")
# A bucket's padded rows hold what the memory held, and nobody reads them.
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
