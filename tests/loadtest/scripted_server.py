"""A completions server that says what it was told to, at a set pace.

Speaks both shapes: SSE streams (with running usage, or one token a chunk and a final usage only)
and whole JSON answers with token ids, logprobs and a speculation report. Requests are kept, so that
tests see what the load tests sent.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.small_server import Handler, serving

WORDS = ["one", " two", " three", " four", " five", " six", " seven", " eight"]


def usage_of(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": num_tokens}


def speculation_of(num_steps: int, drafted: int, accepted: int) -> dict[str, int]:
    return {"steps": num_steps, "drafted_tokens": drafted, "accepted_tokens": accepted}


class ScriptedServer:
    """Listens on 127.0.0.1 while used as a context manager; `url` says where.

    pace_s: seconds before each chunk. tokens_per_chunk: tokens a stream chunk carries, where the
    body does not turn drafts off. Streams tell token ids (a word's length) and speculation where
    the body asks for them: a chunk is a step, all but one of its tokens were drafted and as many.
    running_usage: whether chunks carry continuous usage. answer: the tokens' texts for a body.
    status: what every completion answers with.
    """

    def __init__(
        self,
        *,
        pace_s: float = 0.001,
        tokens_per_chunk: int = 1,
        running_usage: bool = True,
        answer: Callable[[dict[str, Any]], list[str]] | None = None,
        accepted: int = 3,
        status: int = 200,
    ) -> None:
        self.pace_s = pace_s
        self.tokens_per_chunk = tokens_per_chunk
        self.running_usage = running_usage
        self.answer = answer or (lambda body: (WORDS * 64)[: body["max_tokens"]])
        self.accepted = accepted
        self.status = status
        self.bodies: list[dict[str, Any]] = []
        self.num_open = 0
        self.most_open = 0
        self.lock = threading.Lock()
        script = self

        class Scripted(Handler):
            protocol_version = "HTTP/1.0"  # a stream ends with its connection

            def do_GET(self) -> None:
                answer: Any = {
                    "/health": {"status": "ok"},
                    "/version": {"version": "1.2.3"},
                    "/v1/models": {"data": [{"id": "scripted-model"}]},
                }.get(self.path)
                self.reply(answer or {"error": {"message": "not found"}}, 200 if answer else 404)

            def do_POST(self) -> None:
                body = json.loads(self.body())
                with script.lock:
                    script.bodies.append(body)
                    script.num_open += 1
                    script.most_open = max(script.most_open, script.num_open)
                try:
                    if script.status != 200:
                        self.done()
                        self.reply({"error": {"message": "scripted refusal"}}, script.status)
                    elif body.get("stream"):
                        self.stream(body)
                    else:
                        self.whole(body)
                except BaseException:
                    self.done()
                    raise

            def done(self) -> None:
                """The answer is whole but for its last bytes: who has those may ask again."""
                with script.lock:
                    script.num_open -= 1

            def stream(self, body: dict[str, Any]) -> None:
                tokens = script.answer(body)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                off = (body.get("speculation") or {}).get("drafter") == "off"
                width = 1 if off else script.tokens_per_chunk
                starts = range(0, len(tokens), width)
                for at in starts:
                    time.sleep(script.pace_s)
                    part = tokens[at : at + width]
                    choice: dict[str, Any] = {
                        "index": 0, "text": "".join(part), "finish_reason": None
                    }  # fmt: skip
                    if body.get("return_token_ids"):
                        choice["token_ids"] = [len(word) for word in part]
                        if at == 0:
                            choice["prompt_token_ids"] = [1] * 7
                    usage = {"usage": usage_of(at + len(part))} if script.running_usage else {}
                    self.event({"choices": [choice], **usage})
                sent = len(tokens)
                reason = "length" if sent >= body["max_tokens"] else "stop"
                self.event({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
                last: dict[str, Any] = {"choices": [], "usage": usage_of(sent)}
                if body.get("include_speculation"):
                    drafted, accepted = len(starts) * (width - 1), sent - len(starts)
                    last["speculation"] = speculation_of(len(starts), drafted, accepted)
                self.event(last)
                self.done()
                self.wfile.write(b"data: [DONE]\n\n")

            def whole(self, body: dict[str, Any]) -> None:
                time.sleep(script.pace_s)
                tokens = script.answer(body)
                on = (body.get("speculation") or {}).get("drafter", "off") != "off"
                on = on or "prediction" in body
                choice = {
                    "text": "".join(tokens), "token_ids": [len(token) for token in tokens],
                    "finish_reason": "length", "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
                }  # fmt: skip
                choices = [choice | {"index": index} for index in range(body.get("n", 1))]
                told = (len(tokens), 5, script.accepted) if on else (len(tokens), 0, 0)
                usage = usage_of(len(choices) * len(tokens))
                self.done()
                self.reply(
                    {"choices": choices, "usage": usage, "speculation": speculation_of(*told)}
                )

            def event(self, value: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
                self.wfile.flush()

        self._serving = serving(Scripted)

    def __enter__(self) -> ScriptedServer:
        self.url = self._serving.__enter__()
        return self

    def __exit__(self, *told: Any) -> None:
        self._serving.__exit__(*told)
