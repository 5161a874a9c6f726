"""ModelConfig: a model of server.yaml, its devices and the adapters that stand beside it."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from server.config.section import Section
from server.config.values import check_device

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._:-]{0,95})?")


def _check_model_name(value: str) -> str:
    if not _MODEL_NAME.fullmatch(value):  # "org/name", as Hugging Face writes it, is allowed
        raise ValueError("a model's name has letters, digits and . _ : - and at most one /")
    return value


WeightsForm = Literal["auto", "float32", "bfloat16", "int8", "int8-blocks", "int4", "file", "fp8"]


class AdapterConfig(Section):
    """A PEFT LoRA that is served beside its base, in the same batches."""

    name: str = Field(description="what the `model` field of a request or a task calls it")
    path: str = Field(min_length=1, max_length=4096, description="folder that PEFT saved")
    pinned: bool = Field(False, description="whether it is read at start and stays in memory")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return _check_model_name(value)


class ModelConfig(Section):
    """One model, with the devices it runs on: one engine process a device."""

    name: str = Field(description="what the `model` field of a request calls it")
    aliases: tuple[str, ...] = Field(
        (), max_length=100, description="further names that the `model` field may call it by"
    )
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="a built-in name, a folder, a GGUF file or a Hugging Face id",
    )
    adapter: str | None = Field(
        None, max_length=4096, description="folder of a PEFT LoRA that is merged at load"
    )
    adapters: tuple[AdapterConfig, ...] = Field(
        (), max_length=10_000, description="PEFT LoRAs that are served beside it"
    )
    devices: tuple[str, ...] = Field(
        ("cpu",),
        min_length=1,
        max_length=64,
        description="cpu, cuda or cuda:N, repeats allowed",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        None, description="overrides engine.dtype"
    )
    weights: WeightsForm | None = Field(None, description="overrides engine.weights")
    max_model_len: int | None = Field(
        None, ge=16, le=1 << 24, description="overrides engine.max_model_len"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: the model's generation_config.json says how to sample where a task is "
        "silent",
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return _check_model_name(value)

    @field_validator("aliases")
    @classmethod
    def _aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_check_model_name, value))

    @model_validator(mode="after")
    def _one_kind(self) -> ModelConfig:
        if self.adapter is not None and self.adapters:
            raise ValueError("adapter is merged, adapters stand beside the base: give one of them")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it and its adapters."""
        return (self.name, *self.aliases, *(one.name for one in self.adapters))

    @field_validator("devices")
    @classmethod
    def _devices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_device(device) for device in value)
