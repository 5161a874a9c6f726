"""What tests have other people's compilers make, which takes seconds: kept between runs beside our
own machine code, by all that it is made of."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

from drafters.library import code_folder


def kept_folder(kind: str, *sources: object) -> Path:
    """The folder for what is made of these sources; those that nobody asked for in a month go."""
    digest = hashlib.sha256(repr(sources).encode()).hexdigest()
    folder = code_folder() / kind / digest[:24]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in folder.parent.iterdir():
        if time.time() - other.stat().st_mtime > 30 * 86_400:
            shutil.rmtree(other, ignore_errors=True)
    return folder
