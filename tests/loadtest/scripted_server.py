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
                if self.path == "/health":
                    self.reply({"status": "ok"})
                elif self.path == "/version":
                    self.reply({"version": "1.2.3"})
                elif self.path == "/v1/models":
                    self.reply({"data": [{"id": "scripted-model"}]})
                else:
                    self.reply({"error": {"message": "not found"}}, 404)

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
                sent = num_steps = 0
                off = (body.get("speculation") or {}).get("drafter") == "off"
                width = 1 if off else script.tokens_per_chunk
                while sent < len(tokens):
                    time.sleep(script.pace_s)
                    part = tokens[sent : sent + width]
                    sent += len(part)
                    num_steps += 1
                    chunk: dict[str, Any] = {
                        "choices": [{"index": 0, "text": "".join(part), "finish_reason": None}]
                    }
                    if body.get("return_token_ids"):
                        chunk["choices"][0]["token_ids"] = [len(word) for word in part]
                        if num_steps == 1:
                            chunk["choices"][0]["prompt_token_ids"] = [1] * 7
                    if script.running_usage:
                        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": sent}
                    self.event(chunk)
                reason = "length" if sent >= body["max_tokens"] else "stop"
                self.event({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
                last: dict[str, Any] = {
                    "choices": [],
                    "usage": {"prompt_tokens": 7, "completion_tokens": sent},
                }
                if body.get("include_speculation"):
                    last["speculation"] = {
                        "steps": num_steps,
                        "drafted_tokens": num_steps * (width - 1),
                        "accepted_tokens": sent - num_steps,
                    }
                self.event(last)
                self.done()
                self.wfile.write(b"data: [DONE]\n\n")

            def whole(self, body: dict[str, Any]) -> None:
                time.sleep(script.pace_s)
                tokens = script.answer(body)
                on = (body.get("speculation") or {}).get("drafter", "off") != "off"
                on = on or "prediction" in body
                number = body.get("n", 1)
                self.done()
                self.reply(
                    {
                        "choices": [
                            {
                                "index": index,
                                "text": "".join(tokens),
                                "token_ids": [len(token) for token in tokens],
                                "finish_reason": "length",
                                "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
                            }
                            for index in range(number)
                        ],
                        "usage": {"prompt_tokens": 7, "completion_tokens": number * len(tokens)},
                        "speculation": {
                            "drafted_tokens": 5 if on else 0,
                            "accepted_tokens": script.accepted if on else 0,
                            "steps": len(tokens),
                        },
                    }
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
