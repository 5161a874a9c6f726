"""`tailor adapters ...`: the adapters of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from server.commands.options import CallOptions

_CALL = CallOptions()


def list_adapters(*, call: CallOptions = _CALL) -> int:
    from server.client.http import call as ask

    models = ask(call.endpoint(), "GET", "/models", timeout_s=call.timeout)["data"]
    found = [m for m in models if m["parent"] is not None and m["root"] != m["parent"]]
    for model in found:
        print(f"{model['id']}\tof {model['parent']}\t{model['root']}")
    if not found:
        print("the server has no adapters")
    return 0


def add(
    name: Annotated[str, Parameter(help="what the `model` field of a request will call it")],
    folder: Annotated[Path, Parameter(help="folder that PEFT saved, on the server's machine")],
    /,
    *,
    model: Annotated[
        str | None, Parameter(metavar="NAME", help="the model it is beside (the server's first)")
    ] = None,
    pinned: Annotated[bool, Parameter(help="it stays in memory")] = False,
    force: Annotated[bool, Parameter(help="replace one of the same name")] = False,
    call: CallOptions = _CALL,
) -> int:
    from server.client.http import tell

    body = {
        "lora_name": name,
        "lora_path": str(folder.expanduser().absolute()),
        "load_inplace": force,
        "base_model_name": model,
        "pinned": pinned,
    }
    print(tell(call.endpoint(), "/load_lora_adapter", body, call.timeout))
    return 0


def remove(
    name: Annotated[str, Parameter(help="of an adapter that the server has")],
    /,
    *,
    call: CallOptions = _CALL,
) -> int:
    from server.client.http import tell

    body = {"lora_name": name}
    print(tell(call.endpoint(), "/unload_lora_adapter", body, call.timeout))
    return 0
