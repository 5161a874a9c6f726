"""transformers' own `generate`, greedy, fp32, one request at a time, behind http.server.

What a user gets who writes the loop by hand; the floor that every server is compared with. Each
token is sent when `generate` hands it to the streamer; the HTTP part costs well under 1 % of a
step. Run by hf_generate.sh. Standard library, torch and transformers only.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class ChunkStreamer(BaseStreamer):
    """Sends each generated token as one server-sent event, its text detokenized incrementally."""

    def __init__(self, tokenizer: Any, handler: Handler) -> None:
        self._tokenizer = tokenizer
        self._handler = handler
        self._ids: list[int] = []
        self._sent = ""
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:  # generate puts the prompt first
            self._prompt_seen = True
            return
        self._ids += value.flatten().tolist()
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the first bytes of a character wait for its last
            self._handler.send_chunk(text[len(self._sent) :])
            self._sent = text

    def end(self) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    """GET /health, GET /v1/models and a streamed, greedy POST /v1/completions."""

    model: Any
    tokenizer: Any

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json({"status": "ok"})
        elif self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": "hf-generate", "object": "model"}]})
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
        inputs = self.tokenizer(body["prompt"], return_tensors="pt")
        num_prompt = inputs.input_ids.shape[1]
        limit = body.get("max_tokens", 16)
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=limit,
                do_sample=False,
                streamer=ChunkStreamer(self.tokenizer, self),
            )
        num_tokens = output.shape[1] - num_prompt
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }
        reason = "length" if num_tokens >= limit else "stop"
        self.send_chunk("", finish_reason=reason, usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def send_chunk(self, text: str, **rest: Any) -> None:
        usage = rest.pop("usage", None)
        chunk = {
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": None, **rest}],
            "usage": usage,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Handler.tokenizer = AutoTokenizer.from_pretrained(options.model)
    Handler.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
