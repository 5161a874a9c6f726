"""The sampling defaults of a model, from its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path

from drafters.json_text import parsed
from server.config import SamplingDefaults
from server.types import PARAMETERS

log = logging.getLogger("tailor.server")

_KINDS = {one.name: one.kind for one in PARAMETERS if one.in_models}
"""Keys that vLLM and SGLang take from the file, too."""


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The sampling keys of a model's generation_config.json; nothing where there is no such file.

    A file that cannot be used is logged and left out: the model can be served without it.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        raw = parsed(file.read_text(encoding="utf-8"))
        found = {key: kind(raw[key]) for key, kind in _KINDS.items() if raw.get(key) is not None}
        defaults = SamplingDefaults(**found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is not used: %s", file, str(error).splitlines()[0][:200])
        return SamplingDefaults()
    if found:
        told = ", ".join(f"{key} {value:g}" for key, value in found.items())
        log.info("%s: where tasks are silent, %s (--generation-config none: not)", file, told)
    return defaults
