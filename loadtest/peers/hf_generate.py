"""transformers' own `generate`, greedy, fp32, one request at a time, behind http.server.

What a user gets who writes the loop by hand; the floor that every server is compared with. Each
token is sent when `generate` hands it to the streamer; the HTTP part costs well under 1 % of a
step. Run by hf_generate.sh. Standard library, torch and transformers only.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from one_stream import OneStream, serve
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


class Handler(OneStream):
    """Greedy `generate`."""

    name = "hf-generate"
    model: Any
    tokenizer: Any

    def complete(self, body: dict[str, Any]) -> None:
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
        self.send_chunk("", (num_prompt, num_tokens), "length" if num_tokens >= limit else "stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Handler.tokenizer = AutoTokenizer.from_pretrained(options.model)
    Handler.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    serve(Handler, options.port)


if __name__ == "__main__":
    main()
