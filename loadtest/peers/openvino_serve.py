"""OpenVINO GenAI's continuous batching pipeline with prompt lookup, behind http.server.

OpenVINO GenAI is a library; this is the thinnest OpenAI-shaped server around it: one request at a
time, greedy, streamed /v1/completions, f32 compute and KV memory, no prefix cache. A chunk carries
what one step of the pipeline accepted, and the running usage. Run by openvino.sh. Standard library
and openvino_genai only.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import openvino_genai


class ChunkStreamer(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Sends what each step brought as one server-sent event, its text detokenized incrementally."""

    def __init__(self, tokenizer: Any, handler: Handler) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._handler = handler
        self._ids: list[int] = []
        self._sent = ""

    def write(self, token: int | list[int]) -> Any:
        self._ids += token if isinstance(token, list) else [token]
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):  # the first bytes of a character wait for its last
            self._handler.send_chunk(text[len(self._sent) :], len(self._ids))
            self._sent = text
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    """GET /health, GET /v1/models and a streamed, greedy POST /v1/completions."""

    pipeline: Any
    num_drafted: int
    max_ngram: int

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json({"status": "ok"})
        elif self.path == "/version":
            self._json({"version": openvino_genai.get_version()})
        elif self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": "openvino", "object": "model"}]})
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
        tokenizer = self.pipeline.get_tokenizer()
        inputs = tokenizer.encode(body["prompt"])
        self.num_prompt = inputs.input_ids.shape[1]
        config = self.pipeline.get_generation_config()
        config.do_sample = False
        config.max_new_tokens = limit = body.get("max_tokens", 16)
        config.apply_chat_template = False
        if self.num_drafted:
            config.num_assistant_tokens = self.num_drafted
            config.max_ngram_size = self.max_ngram
        result = self.pipeline.generate(inputs, config, ChunkStreamer(tokenizer, self))
        num_tokens = len(result.tokens[0])
        reason = "length" if num_tokens >= limit else "stop"
        self.send_chunk("", num_tokens, finish_reason=reason)
        self.wfile.write(b"data: [DONE]\n\n")

    def send_chunk(self, text: str, num_tokens: int, **rest: Any) -> None:
        chunk = {
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": None, **rest}],
            "usage": {
                "prompt_tokens": self.num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": self.num_prompt + num_tokens,
            },
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder of OpenVINO's form, or a GGUF")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0: OpenVINO's choice")
    parser.add_argument("--drafted", type=int, default=5, help="tokens looked up; 0 is off")
    parser.add_argument("--max-ngram", type=int, default=4)
    options = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    properties: dict[str, Any] = {
        "scheduler_config": scheduler,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    if options.threads:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    if options.drafted:
        properties["prompt_lookup"] = True
    Handler.pipeline = openvino_genai.LLMPipeline(options.model, "CPU", **properties)
    Handler.num_drafted, Handler.max_ngram = options.drafted, options.max_ngram
    HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
