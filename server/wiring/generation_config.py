"""The sampling defaults of a model, from its generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from server.config import SamplingDefaults

log = logging.getLogger("tailor.server")

_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys that vLLM and SGLang take from the file, too."""


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The sampling keys of a model's generation_config.json; nothing where there is no such file.

    A file that cannot be used is logged and left out: the model can be served without it.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        found = {key: raw[key] for key in _KEYS if raw.get(key) is not None}
        for key in found:
            found[key] = int(found[key]) if key == "top_k" else float(found[key])
        defaults = SamplingDefaults(**found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is not used: %s", file, str(error).splitlines()[0][:200])
        return SamplingDefaults()
    if found:
        told = ", ".join(f"{key} {value:g}" for key, value in found.items())
        log.info("%s: where tasks are silent, %s (--generation-config none: not)", file, told)
    return defaults
