"""LlamaIndex's OpenAILike: chat, stream, two turns with a tool."""

from __future__ import annotations

from checks import BASE_URL, MODEL, check, finish
from conversation import QUESTION, weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

LLM = OpenAILike(
    model=MODEL, api_base=BASE_URL, api_key="none", is_chat_model=True,
    is_function_calling_model=True, max_tokens=40, temperature=0, max_retries=0,
    context_window=2048,
)  # fmt: skip


@check("llama-index two turns")
def _() -> None:
    messages = [ChatMessage(role="user", content="Say hello.")]
    first = LLM.chat(messages)
    assert first.message.content
    messages += [first.message, ChatMessage(role="user", content="And again.")]
    assert LLM.chat(messages).message.content


@check("llama-index stream")
def _() -> None:
    assert (
        list(LLM.stream_chat([ChatMessage(role="user", content="Say hello.")]))[-1].delta
        is not None
    )


@check("llama-index tool, then its result")
def _() -> None:
    tool = FunctionTool.from_defaults(weather)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = LLM.chat_with_tools([tool], chat_history=messages, tool_required=True)
    [call] = LLM.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    result = ChatMessage(
        role="tool", content=str(tool(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )  # fmt: skip
    assert LLM.chat([*messages, answer.message, result]).message is not None


finish()
