"""What a start in a process of its own computes; imports neither pytest nor transformers."""

from __future__ import annotations

from server.model.build import RunnerSpec, build_runner
from server.model.scoring import Text, score
from server.types import EngineSizes


def digest(folder: str) -> str:
    """The logprobs of a text, in hex. folder: a model's."""
    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=64, kv_bytes=1 << 21)
    runner = build_runner(RunnerSpec(name="m", folder=folder, sizes=sizes, threads=1))
    logprobs = score(runner, [Text(tuple(range(3, 40)), 1)]).logprobs
    runner.close()
    return logprobs.tobytes().hex()
