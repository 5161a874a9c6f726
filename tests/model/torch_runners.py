"""TorchRunners over small modules, by keywords: TorchRunner's own, and fields of ModelInfo and
TorchModel; what tests read of
their parts, each in one place, and the ids that their draws are held to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch
from server.model.gpu.runner import TorchModel, TorchRunner
from server.model.gpu.sampler import NAN_LOGITS, NOTHING_LEFT
from server.types import ModelInfo
from tests.fakes import reference_sampler as sampling
from tests.model.batches import BLOCK_SIZE
from tests.model.families import MAX_LEN

SIZES: dict[str, Any] = {
    "name": "tiny", "max_model_len": MAX_LEN, "eos_token_ids": (), "num_blocks": 64,
    "block_size": BLOCK_SIZE, "device": "cpu", "fingerprint": "", "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}  # fmt: skip


def runner_over(module: Any, **options: Any) -> TorchRunner:
    """Its device and ids are the module's, unless they are given. On a CPU there is nothing to
    close."""
    own = {"vocab_size": module.config.vocab_size, "dtype": str(module.dtype)}
    model, sizes = (
        {name: options.pop(name) for name in names if name in options}
        for names in (TorchModel._fields, ModelInfo.__dataclass_fields__)
    )
    info = ModelInfo(**(SIZES | own | sizes))
    return TorchRunner(TorchModel(module, **model), info, **options)


def body_of(runner: TorchRunner) -> Any:
    """What computes a step's hidden rows."""
    return runner._body


def head_of(runner: TorchRunner) -> Any:
    """The LM head and the draws."""
    return runner._head


def cache_of(runner: TorchRunner) -> Any:
    """K and V by block."""
    return runner._cache


def reference(batch: Batch, logits: npt.NDArray[np.float32]) -> list[int]:
    """Ids of all draws, one by one, by the reference; NAN_LOGITS or NOTHING_LEFT where there is
    none."""
    ids = []
    for d in range(batch.num_draws):
        mask_id = int(batch.draw_mask[d])
        try:
            ids.append(
                sampling.draw(
                    logits[batch.draw_rows[d]],
                    batch.params[batch.draw_params[d]],
                    int(batch.draw_positions[d]),
                    batch.path_tokens(d),
                    batch.masks[mask_id] if mask_id >= 0 else None,
                )
            )
        except FloatingPointError:
            ids.append(NAN_LOGITS)
        except ValueError:
            ids.append(NOTHING_LEFT)
    return ids
