"""One schedule that outlives what it began with: longer sequences, another model.

Run by test_lifetimes.py on two ranks: lifetimes_worker.py FOLDER. Prints ``ok NAME`` per check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.runtime import equality_worker as worker

from megatron.core import parallel_state  # isort: skip - lets megatron-core do without CUDA
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.dpp import DppConfig, DppSchedule
from megatron.dpp.core.graphs.slots import ChunkGraphs
from megatron.dpp.runtime.static import StaticSchedule
from tests.runtime.rerun import Rerun

LENGTHS = (8, 8, 16, 8)


def build(layers: int = 2, v: int = 1) -> list[Any]:
    parallel_state.set_virtual_pipeline_model_parallel_world_size(v if v > 1 else None)
    return worker.build({"p": 2, "layers": layers, "v": v})[0]


def forward_step(length: int, iterator: Any, model: Any) -> Any:
    tokens = next(iterator)[:, : length + 1]
    positions = torch.arange(length).expand(len(tokens), -1)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return output, partial(worker.loss_func)


def step(schedule: Any, chunks: list[Any], length: int = 8, **options: Any) -> list[Any]:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return schedule(
        forward_step_func=partial(forward_step, length), model=chunks, num_microbatches=4,
        data_iterator=[worker.batches({}) for _ in chunks],
        micro_batch_size=worker.MICRO_BATCH, **{"seq_length": length, **options},
    )  # fmt: skip


def recording_goes_on_when_links_are_opened_anew(folder: Path) -> None:
    chunks, path = build(), str(folder / "decisions")
    with DppSchedule(DppConfig(record=path), seed=1) as schedule:
        for length in LENGTHS:
            step(schedule, chunks, length)
    with DppSchedule(DppConfig(replay=path), seed=1) as schedule:
        for length in LENGTHS:
            step(schedule, chunks, length)


def static_links_are_opened_anew(folder: Path) -> None:
    chunks = build()
    with StaticSchedule(DppConfig(transport="shm", timeout=20), seed=1) as schedule:
        for length in LENGTHS:
            step(schedule, chunks, length)


def lengths_that_grow_open_few_links(folder: Path) -> None:
    """In four growing steps once more, to twice the length; with the most tokens given, never."""
    chunks = build()
    for max_tokens, openings in ((0, 2), (16 * worker.MICRO_BATCH, 1)):
        said: list[str] = []
        config = DppConfig(timeout=20, max_tokens=max_tokens)
        with DppSchedule(config, seed=1, log=said.append) as schedule:
            for length in (8, 10, 12, 16):
                step(schedule, chunks, length)
        opened = [line for line in said if " -> " in line]
        assert len(opened) == openings, (max_tokens, opened)


def a_nominal_length_takes_the_most_tokens(folder: Path) -> None:
    """Microbatches of unlike length, where the caller names none: losses as with the longest."""
    chunks = build()
    for chunk in chunks:
        worker.get_model_config(chunk).variable_seq_lengths = True
    found = []
    for given, max_tokens in ((16, 0), (1, 16 * worker.MICRO_BATCH)):
        with DppSchedule(DppConfig(timeout=20, max_tokens=max_tokens), seed=1) as schedule:
            losses = step(schedule, chunks, 16, seq_length=given)
            found.append([value for loss in losses for value in loss.values()])
    assert repr(found[0]) == repr(found[1])


def another_number_of_chunks(folder: Path) -> None:
    """Evaluation returns losses, and training uses the shapes of the second model."""
    one, two = build(layers=4), build(layers=4, v=2)
    with DppSchedule(DppConfig(timeout=20), seed=1) as schedule:
        for chunks in (one, two, one):
            for forward_only in (True, False):
                losses = step(schedule, chunks, forward_only=forward_only)
                assert len(losses) == 4 * (dist.get_rank() == 1)
            assert all(chunk.buffers[0].grad_data.abs().sum() > 0 for chunk in chunks)


def another_model_is_measured_anew(folder: Path) -> None:
    small, large = build(layers=2), build(layers=16)
    said: list[str] = []
    with DppSchedule(DppConfig(activation_cap="4MiB"), seed=1, log=said.append) as schedule:
        for chunks in (small, large):
            for _ in range(2):
                step(schedule, chunks)
    caps = [line for line in said if "(4MiB at" in line]
    assert len(caps) == 2, caps


def graphs_of_the_model_before_are_closed(folder: Path) -> None:
    one, two = build(), build()
    closed: list[int] = []
    close: Callable[[ChunkGraphs], None] = ChunkGraphs.close
    ChunkGraphs.close = lambda own: (closed.append(1), close(own))[1]  # type: ignore[method-assign]
    for kind in (StaticSchedule, DppSchedule):
        capture = partial(Rerun, replays=[])
        with kind(DppConfig(cuda_graphs="on"), seed=1, capture=capture) as schedule:
            for chunks in (one, two, one):
                step(schedule, chunks)
    assert len(closed) == 6
    ChunkGraphs.close = close  # type: ignore[method-assign]


def a_script_may_end_by_exit(folder: Path) -> None:
    """The first rank exits before the last one, which must not end it."""
    chunks = build()
    try:
        with DppSchedule(seed=1) as schedule:
            step(schedule, chunks, forward_only=True)
            sys.exit(0)
    except SystemExit as end:
        assert end.code == 0


CHECKS = [
    recording_goes_on_when_links_are_opened_anew,
    static_links_are_opened_anew,
    lengths_that_grow_open_few_links,
    a_nominal_length_takes_the_most_tokens,
    another_number_of_chunks,
    another_model_is_measured_anew,
    graphs_of_the_model_before_are_closed,
    a_script_may_end_by_exit,
]


def main() -> None:
    worker.start()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    for check in CHECKS:
        check(Path(sys.argv[1]))
        dist.barrier()
        print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
