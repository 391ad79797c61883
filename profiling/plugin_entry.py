"""Runs an unmodified ``pretrain_gpt.py`` for bench_plugin.py, and writes each rank's peak memory.

Variables: ``BENCH_SCRIPT``, its path; ``BENCH_RECORD``, a file to write (``.RANK`` is added);
``BENCH_LENGTHS``, sequence lengths separated by commas, which microbatches take in turn.
Megatron-LM has no flag for unlike lengths, so these cut its batches and set
``variable_seq_lengths``.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

script = os.environ["BENCH_SCRIPT"]
sys.path.insert(0, str(Path(script).parent))

import torch  # noqa: E402


def cut_batches(lengths: Sequence[int]) -> None:
    """Cut the batches that the script reads to these lengths, and let stages exchange shapes."""
    from megatron.core import utils
    from megatron.core.transformer import TransformerConfig
    from megatron.training import utils as training_utils  # type: ignore[import-not-found]

    left, original = itertools.cycle(lengths), utils.get_batch_on_this_cp_rank
    checked = TransformerConfig.__post_init__

    def cut(batch: dict[str, Any], *args: Any, **options: Any) -> Any:
        batch, length = original(batch, *args, **options), next(left)
        for key, tensor in batch.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                square = key == "attention_mask"
                batch[key] = (
                    tensor[..., :length, :length] if square else tensor[:, :length]
                ).contiguous()
        return batch

    def with_shapes(config: Any) -> None:
        checked(config)
        config.variable_seq_lengths = True

    utils.get_batch_on_this_cp_rank = training_utils.get_batch_on_this_cp_rank = cut
    TransformerConfig.__post_init__ = with_shapes  # type: ignore[method-assign]


def write_peak() -> None:
    """Write the most memory that PyTorch has had in use and reserved, in bytes."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    used = torch.cuda.max_memory_allocated() if on_gpu else 0
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    path = Path(f"{os.environ['BENCH_RECORD']}.{os.environ['RANK']}")
    path.write_text(json.dumps({"allocated": used, "reserved": reserved}), encoding="utf-8")


if __name__ == "__main__":
    atexit.register(write_peak)
    if os.environ.get("BENCH_LENGTHS"):
        cut_batches([int(length) for length in os.environ["BENCH_LENGTHS"].split(",")])
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")
