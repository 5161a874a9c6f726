"""Describes tools in the system's message, for a model whose template does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HOW_TO_CALL = """\
You can call functions. Their signatures, one a line:
{signatures}
To call one, answer with its name and its arguments as JSON, like this:
<tool_call>
{{"name": "<function>", "arguments": {{...}}}}
</tool_call>
The result comes back inside <tool_response></tool_response>."""


def tell_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages with tools, calls and results as text, for a template that knows none of them.

    The tools stand at the end of the system's message, which is made if there is none; results are
    the user's, those that follow each other in one message.
    """
    told: list[dict[str, Any]] = []
    in_results = False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            block = f"<tool_response>\n{content}\n</tool_response>"
            if in_results:
                told[-1]["content"] += f"\n{block}"
            else:
                told.append({"role": "user", "content": block})
            in_results = True
            continue
        in_results = False
        blocks = [content] if content else []
        for call in message.get("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            blocks.append(f"<tool_call>\n{written}\n</tool_call>")
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        told.append({**others, "content": "\n".join(blocks)})
    if tools:
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        how = _HOW_TO_CALL.format(signatures=signatures)
        if told and told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{how}"
        else:
            told.insert(0, {"role": "system", "content": how})
    return told
