"""What tests of the GPU path need of the machine, as marks.

Triton's interpreter is chosen before triton is first imported, so what runs in it runs in a process
of its own, which tests/model/gpu/test_attention.py starts.
"""

from __future__ import annotations

import os

import pytest

from tests.installed import needs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
needs_triton, needs_peft = needs("triton"), needs("peft")
# A bucket's padded rows hold what the memory held, and nobody reads them.
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
