"""The default model as a tiny one, in both forms: as its file is, and in floats."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from server.model.catalog import CONVERTER_VERSION, Form, model_folder
from tests.model.gguf_models import LLAMA, write

NAME = "smollm2-135m-instruct"
_CHANGES = {"num_hidden_layers": 1, "max_position_embeddings": 2048}


def save_default_model(cache: Path, template: str | None = None) -> None:
    """Have it in a cache folder: what is served, and what is trained. template: for chats."""
    cache.mkdir(parents=True)
    source, model = cache / "source.gguf", replace(LLAMA, changes=LLAMA.changes | _CHANGES)
    write(model, model.build(), source, "Q8_0")
    forms: dict[Form, str] = {"file": f"{NAME}-file", "float32": NAME}
    for form, name in forms.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TAILOR_CACHE_DIR", str(cache))
            made = model_folder(str(source), form, report=lambda _: None)
        folder = shutil.copytree(made, made.parent / f"{name}-v{CONVERTER_VERSION}")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
