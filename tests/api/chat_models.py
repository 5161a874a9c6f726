"""Models for chat tests: one tokenizer, a template of each family, written for these tests, and an
engine for them."""

from __future__ import annotations

from functools import cache
from typing import Any

from server import token_bytes
from server.api.chat_template import ChatTemplate
from server.api.engines.client import EngineSpec
from server.api.served_model import ServedModel
from server.types import Delta, Request
from tests.api.real_engine import spec, task_drafters
from tests.api.tiny_tokenizers import chat_tokenizer
from tests.fakes.scripted_engine import Script, ScriptedEngine, steps_of, together

TOKENIZER = chat_tokenizer()
TABLE = token_bytes.build(TOKENIZER)
CONTEXT = 1024
EOS = 0

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

HERMES = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{% endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
{{- '\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif not (loop.first and tools and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{% endif %}
{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('an id has nine characters') }}{% endif %}
{{- call.function | tojson }}
{%- if not loop.last %}{{- ', ' }}{% endif %}
{%- endfor %}
{{- ']<|end|>' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('no role ' + message.role) }}
{%- endif %}
{%- endfor %}
"""

LLAMA = """\
{%- for message in messages %}
{%- if loop.last and tools %}{{- 'Answer as {"name": ..., "parameters": ...}: ' }}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}
{%- endif %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|im_start|>' + role + '\n\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{- message.content | trim }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{% endif %}
"""

CODER = "{% if tools %}{{ '<tool_call><function=' }}{% endif %}" + CHATML

TEMPLATES = {
    "chatml": CHATML, "hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "coder": CODER,
}  # fmt: skip
CONSTANTS = {"bos_token": "<|user|>", "eos_token": "<|end|>"}


@cache
def template(name: str) -> ChatTemplate:
    """One of TEMPLATES, compiled."""
    return ChatTemplate(TEMPLATES[name], TOKENIZER, constants=CONSTANTS)


def served(name: str) -> ServedModel:
    """A model called like its template; any other name is a base model."""
    return ServedModel(
        name,
        chat_tokenizer(),
        TABLE,
        TABLE.vocab_size,
        CONTEXT,
        1_700_000_000,
        "fp",
        template(name) if name in TEMPLATES else None,
    )


def says(text: str, *, per_step: int = 1) -> Script:
    """A script: every choice is this text, then the EOS."""

    def script(request: Request) -> list[list[Delta]]:
        ids = [*encode(text), EOS]
        return together(
            [
                steps_of(request, ids, per_step=per_step, finish_reason="stop", choice_id=k)
                for k in range(request.num_choices)
            ]
        )

    return script


def scripted(name: str, script: Script | None = None) -> ScriptedEngine:
    """The engine of a model; without a script it says " dog"."""
    return ScriptedEngine(
        script or says(" dog"), name=f"engine-{name}", model=name,
        vocab_size=TABLE.vocab_size, max_model_len=CONTEXT,
    )  # fmt: skip


def chat_spec(name: str, i: int = 0, **options: Any) -> EngineSpec:
    """The real engine of a model on the FakeRunner, with grammars, for a LiveServer. options:
    make_engine's."""
    return spec(
        i=i, of=name, table=TABLE, tokenizer=TOKENIZER, max_model_len=CONTEXT,
        drafters=task_drafters(None, "suffix", "auto"), model={"context": 2, "boost": 6.0},
        **options,
    )  # fmt: skip


def encode(text: str) -> list[int]:
    """Ids of a text, control tokens read as such."""
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: Any) -> str:
    """The text of ids, control tokens included."""
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=False)
    return text


def weather(name: str = "get_weather", **extra: Any) -> dict[str, Any]:
    """A tool."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
            **extra,
        },
    }
