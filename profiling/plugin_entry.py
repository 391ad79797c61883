"""Runs an unmodified ``pretrain_gpt.py`` whose steps take the arms of bench_plugin.py in turns.

Variables: ``BENCH_SCRIPT``, its path; ``BENCH_ARMS``, a JSON list of [name, kind, settings], kind
being ``own``, ``static`` or ``dynamic``, and settings those of a ``DppConfig``; ``BENCH_BLOCK``,
steps of an arm's turn; ``BENCH_TURN``, a JSON list of a folder, the number of this process group
and that of all groups, which take turns by files in the folder; ``BENCH_LENGTHS``, sequence lengths
separated by commas, which microbatches take in turn; ``BENCH_DOCUMENTS``, a JSON list of the
lengths of each microbatch's documents, at whose ends attention ends; ``BENCH_RECORD``, a file to
write (``.RANK`` is added), with a line per step: the fields of ``plugin_group.Line``.

Without ``--no-gradient-accumulation-fusion`` the kernel that this takes of Apex is PyTorch's where
Apex is missing, for all arms.

All steps read the same microbatches. Megatron-LM has no flag for unlike lengths, so these cut its
batches and set ``variable_seq_lengths``.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import logging
import os
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SCRIPT = os.environ["BENCH_SCRIPT"]
sys.path[:0] = [str(Path(SCRIPT).parent)]

import fused_products  # noqa: E402
import torch  # noqa: E402

from megatron.dpp.config import DppConfig  # noqa: E402
from megatron.dpp.plugin import Plugin  # noqa: E402
from megatron.dpp.runtime.static import StaticSchedule  # noqa: E402

BLOCK = int(os.environ["BENCH_BLOCK"])
ARMS: list[tuple[str, str, dict[str, Any]]] = json.loads(os.environ["BENCH_ARMS"])
ON_GPU = torch.cuda.is_available()


def vary_lengths() -> None:
    """Let the script's model exchange tensors of unlike length."""
    from megatron.core.transformer import TransformerConfig

    checked = TransformerConfig.__post_init__

    def with_shapes(config: Any) -> None:
        checked(config)
        config.variable_seq_lengths = True

    TransformerConfig.__post_init__ = with_shapes  # type: ignore[method-assign]


def pack(rows: Sequence[Sequence[int]]) -> None:
    """Tell the model where the documents of its microbatches end, which a chunk gets in turn."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.packed_seq_params import PackedSeqParams

    own, numbers = DistributedDataParallel.forward, defaultdict(itertools.count)
    bounds = [list(itertools.accumulate(row, initial=0)) for row in rows]
    device = "cuda" if ON_GPU else "cpu"
    ends: list[Any] = []

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if not ends:
            ends.extend(torch.tensor(each, dtype=torch.int32, device=device) for each in bounds)
        number = next(numbers[id(self)]) % len(rows)
        options["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends[number], cu_seqlens_kv=ends[number],
            max_seqlen_q=max(rows[number]), max_seqlen_kv=max(rows[number]),
        )  # fmt: skip
        return own(self, *args, **options)

    DistributedDataParallel.forward = forward


class Batches:
    """The same ``number`` batches for each step, the first that the script reads, cut to these
    lengths."""

    def __init__(self, number: int, lengths: Sequence[int]) -> None:
        self._number, self._lengths = number, lengths
        self._kept: dict[int, list[Any]] = defaultdict(list)

    def again(self, iterators: Any) -> Any:
        """Iterators of these batches, in the form of the given: one, one of each chunk, or None."""
        if isinstance(iterators, list):
            return [self._iterator(number, each) for number, each in enumerate(iterators)]
        return self._iterator(0, iterators)

    def _iterator(self, chunk: int, iterator: Any) -> Any:
        from megatron.core.rerun_state_machine import RerunDataIterator

        if iterator is None:
            return None
        kept = self._kept[chunk]
        while len(kept) < self._number:
            kept.append(self._cut(next(iterator), len(kept)))
        copies = [dict(batch) for batch in kept]  # context parallelism cuts them in place
        return RerunDataIterator(iter(copies))  # type: ignore[no-untyped-call]

    def _cut(self, batch: dict[str, Any], place: int) -> dict[str, Any]:
        if not self._lengths:
            return batch
        length = self._lengths[place % len(self._lengths)]
        found = dict(batch)
        for key, tensor in batch.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
                square = key == "attention_mask"
                part = tensor[..., :length, :length] if square else tensor[:, :length]
                found[key] = part.contiguous().pin_memory() if ON_GPU else part.contiguous()
        return found


class Turn:
    """The schedule of an arm's turn; None is the host's own."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self._plugin: Plugin | None = None
        self._static: StaticSchedule | None = None
        self.schedule: Callable[..., Any] | None = None
        if kind == "dynamic":
            self._plugin = Plugin(DppConfig(**settings), strict=True, trace=None)
            self._plugin.remove()
            self.schedule = self._plugin.run
        elif kind == "static":
            self.schedule = self._static = StaticSchedule(DppConfig(**settings))

    def close(self) -> None:
        """End the schedule, and give its memory back."""
        if self._plugin is not None:
            self._plugin.leave(None)
        if self._static is not None:
            self._static.close()
        self._plugin = self._static = self.schedule = None


def synchronize() -> None:
    """Wait for the GPU's work."""
    if ON_GPU:
        torch.cuda.synchronize()


class Captures:
    """Counts the CUDA graphs that this process captures, the host's own, too."""

    def __init__(self) -> None:
        self._number = 0
        begin = torch.cuda.CUDAGraph.capture_begin

        def counted(graph: Any, *args: Any, **options: Any) -> None:
            self._number += 1
            begin(graph, *args, **options)

        torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]

    def any(self) -> bool:
        """True if some rank has captured one since the last call, which is a collective."""
        device = torch.device("cuda" if ON_GPU else "cpu")
        number = torch.tensor(self._number, device=device)
        self._number = 0
        torch.distributed.all_reduce(number)
        return bool(number.item())


def peaks() -> tuple[int, int]:
    """The most bytes that were allocated and reserved."""
    if not ON_GPU:
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class Turns:
    """The turns of this process group among others, that have started, too."""

    def __init__(self) -> None:
        folder, self._own, self._groups = json.loads(os.environ["BENCH_TURN"])
        self._folder = Path(folder)

    def wait(self, turn: int) -> None:
        """Wait until all turns before a ``turn`` of this group are over."""
        number = turn * self._groups + self._own
        while number and not (self._folder / str(number)).exists():
            time.sleep(0.01)

    def end(self, turn: int) -> None:
        """Let the next group begin."""
        if os.environ["RANK"] == "0":
            (self._folder / str(turn * self._groups + self._own + 1)).touch()


def take_turns(batches: Batches) -> None:
    """Let each step of the training loop run the schedule whose turn it is."""
    from megatron.training import training  # type: ignore[import-not-found]

    original = training.train_step
    names = list(inspect.signature(original).parameters)
    place, data = names.index("forward_backward_func"), names.index("data_iterator")
    done, turn, captures, turns = 0, Turn("own", {}), Captures(), Turns()

    def step(*args: Any, **options: Any) -> Any:
        nonlocal done, turn
        (name, kind, settings), number = ARMS[done // BLOCK % len(ARMS)], done % BLOCK
        if number == 0:
            turns.wait(done // BLOCK)
            turn.close()
            gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            turn = Turn(kind, settings)
        given = list(args)
        given[data] = batches.again(given[data])
        if turn.schedule is not None:
            given[place] = turn.schedule
        synchronize()
        torch.distributed.barrier()
        begin = time.perf_counter()
        result = original(*given, **options)
        synchronize()
        took = time.perf_counter() - begin
        if ON_GPU and (done + 1) % BLOCK == 0:
            torch.cuda.empty_cache()  # for the group whose turn is next
        loss = {key: float(value) for key, value in result[0].items()}.get("lm loss")
        line = [name, number, took, *peaks(), loss, float(result[5]), captures.any()]
        with Path(f"{os.environ['BENCH_RECORD']}.{os.environ['RANK']}").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(json.dumps(line) + "\n")
        done += 1
        if done % BLOCK == 0:
            turns.end(done // BLOCK - 1)
        return result

    training.train_step = step


if os.environ["RANK"] == "0":
    logging.getLogger("megatron.dpp").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("megatron.dpp").setLevel(logging.INFO)
LENGTHS = [int(length) for length in os.environ["BENCH_LENGTHS"].split(",") if length]
if LENGTHS:
    vary_lengths()
if documents := json.loads(os.environ["BENCH_DOCUMENTS"]):
    pack(documents)
if "--no-gradient-accumulation-fusion" not in sys.argv:
    fused_products.provide()
take_turns(Batches(int(os.environ["BENCH_MICROBATCHES"]), LENGTHS))
sys.argv[0] = SCRIPT
runpy.run_path(SCRIPT, run_name="__main__")
