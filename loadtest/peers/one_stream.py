"""What the thin servers around a library share: an OpenAI-shaped, streamed, greedy /v1/completions.

One request at a time. Imported by scripts of this folder, which run in the peers' environments:
standard library only.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class OneStream(BaseHTTPRequestHandler):
    """GET /health, GET /version, GET /v1/models and a streamed, greedy POST /v1/completions.

    A server names itself and implements `complete`.
    """

    name: str
    version = ""

    def complete(self, body: dict[str, Any]) -> None:
        """Answer a request's body with `send_chunk`s, the last of them with a finish_reason."""
        raise NotImplementedError

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json({"status": "ok"})
        elif self.path == "/version" and self.version:
            self._json({"version": self.version})
        elif self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": self.name, "object": "model"}]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or not body.get("stream") or body.get("temperature") != 0:
            self.send_error(400, "streamed greedy completions only")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.complete(body)
        self.wfile.write(b"data: [DONE]\n\n")

    def send_chunk(
        self, text: str, usage: tuple[int, int] | None = None, finish_reason: str | None = None
    ) -> None:
        """usage: prompt tokens and completion tokens so far."""
        told = None
        if usage is not None:
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            told = dict(zip(names, (*usage, sum(usage)), strict=True))
        chunk = {
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}],
            "usage": told,
        }
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(handler: type[OneStream], port: int) -> None:
    """Until the process ends."""
    HTTPServer(("127.0.0.1", port), handler).serve_forever()
