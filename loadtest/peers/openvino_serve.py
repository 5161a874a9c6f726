"""OpenVINO GenAI's continuous batching pipeline with prompt lookup, behind http.server.

OpenVINO GenAI is a library; this is the thinnest OpenAI-shaped server around it: one request at a
time, greedy, streamed /v1/completions, no prefix cache; f32 compute and KV memory, or with
--own-precision what OpenVINO itself takes for the CPU and the model (bfloat16 where the CPU has it,
inputs of 8-bit weights as integers, a KV memory of integers): faster, and other texts. A chunk
carries what one step of the pipeline accepted, and the running usage. Run by openvino.sh. Standard
library and openvino_genai only.
"""

from __future__ import annotations

import argparse
from typing import Any

import openvino_genai
from one_stream import OneStream, serve


class ChunkStreamer(openvino_genai.StreamerBase):
    """Sends what each step brought as one server-sent event, its text detokenized incrementally."""

    def __init__(self, tokenizer: Any, handler: Handler, num_prompt: int) -> None:
        super().__init__()
        self._num_prompt = num_prompt
        self._tokenizer = tokenizer
        self._handler = handler
        self._ids: list[int] = []
        self._sent = ""

    def write(self, token: int | list[int]) -> Any:
        self._ids += token if isinstance(token, list) else [token]
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):  # the first bytes of a character wait for its last
            usage = self._num_prompt, len(self._ids)
            self._handler.send_chunk(text[len(self._sent) :], usage)
            self._sent = text
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Handler(OneStream):
    """One pipeline's greedy generation."""

    name = "openvino"
    version = openvino_genai.get_version()
    pipeline: Any
    num_drafted: int
    max_ngram: int

    def complete(self, body: dict[str, Any]) -> None:
        tokenizer = self.pipeline.get_tokenizer()
        inputs = tokenizer.encode(body["prompt"])
        num_prompt = inputs.input_ids.shape[1]
        config = self.pipeline.get_generation_config()
        config.do_sample = False
        config.max_new_tokens = limit = body.get("max_tokens", 16)
        config.apply_chat_template = False
        if self.num_drafted:
            config.num_assistant_tokens = self.num_drafted
            config.max_ngram_size = self.max_ngram
        result = self.pipeline.generate(inputs, config, ChunkStreamer(tokenizer, self, num_prompt))
        num_tokens = len(result.tokens[0])
        self.send_chunk("", (num_prompt, num_tokens), "length" if num_tokens >= limit else "stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder of OpenVINO's form, or a GGUF")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="0: OpenVINO's choice")
    parser.add_argument("--drafted", type=int, default=5, help="tokens looked up; 0 is off")
    parser.add_argument("--max-ngram", type=int, default=4)
    parser.add_argument(
        "--own-precision", action="store_true", help="OpenVINO's choice of precisions, not f32"
    )
    options = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    properties: dict[str, Any] = {"scheduler_config": scheduler}
    if not options.own_precision:
        properties["INFERENCE_PRECISION_HINT"] = "f32"
        properties["KV_CACHE_PRECISION"] = "f32"
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    if options.threads:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    if options.drafted:
        properties["prompt_lookup"] = True
    Handler.pipeline = openvino_genai.LLMPipeline(options.model, "CPU", **properties)
    Handler.num_drafted, Handler.max_ngram = options.drafted, options.max_ngram
    serve(Handler, options.port)


if __name__ == "__main__":
    main()
