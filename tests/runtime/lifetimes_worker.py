"""Promises of schedules from call to call: links, models, measurements, announcements, delays.

Run by test_lifetimes.py on two ranks: lifetimes_worker.py FOLDER. Prints ``ok NAME`` per check.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime import equality_worker as worker

from megatron.core import parallel_state  # isort: skip - lets megatron-core do without CUDA
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.dpp import ConfigError, DppConfig, DppSchedule
from megatron.dpp.core.graphs.slots import ChunkGraphs
from megatron.dpp.errors import PeerDead, ScheduleError
from megatron.dpp.runtime.static import StaticSchedule
from tests.runtime import several
from tests.runtime.losses import Rerun

LENGTHS = (8, 8, 16, 8)


def build(layers: int = 2, v: int = 1, *, varies: bool = False, **more: Any) -> list[Any]:
    parallel_state.set_virtual_pipeline_model_parallel_world_size(v if v > 1 else None)
    chunks: list[Any] = worker.build({"p": 2, "layers": layers, "v": v, **more})[0]
    for chunk in chunks:
        worker.get_model_config(chunk).variable_seq_lengths = varies
    return chunks


def forward_step(lengths: Any, iterator: Any, model: Any) -> Any:
    length = lengths[model]()
    tokens = next(iterator)[:, : length + 1]
    positions = torch.arange(length).expand(len(tokens), -1)
    output = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return output, partial(worker.loss_func)


def step(schedule: Any, chunks: list[Any], *lengths: int, **options: Any) -> list[Any]:
    """One call of four microbatches, which have these lengths in turn."""
    lengths = lengths or (8,)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    turns = {chunk: partial(next, itertools.cycle(lengths)) for chunk in chunks}
    return schedule(
        forward_step_func=partial(forward_step, turns), model=chunks, num_microbatches=4,
        data_iterator=[worker.batches({}) for _ in chunks],
        micro_batch_size=worker.MICRO_BATCH, **{"seq_length": max(lengths), **options},
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
    chunks, said = build(), list[str]()
    config = DppConfig(transport="shm", timeout=20)
    with StaticSchedule(config, seed=1, log=said.append) as schedule:
        for length in LENGTHS:
            step(schedule, chunks, length)
        assert sum("static pipeline: link to" in line for line in said) == 2, said
        schedule.close()
        step(schedule, chunks)


def lengths_that_grow_open_few_links(folder: Path) -> None:
    """In four growing steps once more, to twice the length; with the most tokens given, never.
    Memory is measured anew then.
    """
    chunks = build()
    for max_tokens, openings in ((0, 2), (16 * worker.MICRO_BATCH, 1)):
        said: list[str] = []
        config = DppConfig(timeout=20, split_backward="on", max_tokens=max_tokens)
        with DppSchedule(config, seed=1, log=said.append) as schedule:
            for length in (8, 10, 12, 16):
                step(schedule, chunks, length)
        opened = [line for line in said if " -> " in line]
        assert len(opened) == openings, (max_tokens, opened)
        assert sum("an activation takes" in line for line in said) == openings, "measured anew"


def a_nominal_length_takes_the_most_tokens(folder: Path) -> None:
    """Microbatches of unlike length, where the caller names none: losses as with the longest. A
    wider model, as a critic beside its actor, has links of its own size.
    """
    chunks, wider = build(varies=True), build(varies=True, hidden=64)
    found = []
    for given, max_tokens in ((16, 0), (1, 16 * worker.MICRO_BATCH)):
        with DppSchedule(
            DppConfig(timeout=20, split_backward="on", max_tokens=max_tokens), seed=1
        ) as schedule:
            losses = step(schedule, chunks, 16, seq_length=given)
            found.append([value for loss in losses for value in loss.values()])
            if max_tokens:
                step(schedule, wider, 16, seq_length=given)
                step(schedule, chunks, 16, seq_length=given)
    assert repr(found[0]) == repr(found[1])


def another_number_of_chunks(folder: Path) -> None:
    """Evaluation returns losses, and training uses the shapes of the second model."""
    one, two = build(layers=4), build(layers=4, v=2)
    with DppSchedule(DppConfig(timeout=20, split_backward="on"), seed=1) as schedule:
        for chunks in (one, two, one):
            for forward_only in (True, False):
                losses = step(schedule, chunks, forward_only=forward_only)
                assert len(losses) == 4 * (dist.get_rank() == 1)
            assert all(chunk.buffers[0].grad_data.abs().sum() > 0 for chunk in chunks)
        assert schedule.iteration == 6, "evaluations are numbered, too"
        for call in (schedule, schedule.check):
            with pytest.raises(ConfigError, match=r"1 chunks were given, but virtual_.*=2 asks"):
                step(call, two[:1])


def another_model_is_measured_anew(folder: Path) -> None:
    small, large = build(layers=2), build(layers=16)
    said: list[str] = []
    with DppSchedule(
        DppConfig(activation_cap="4MiB", split_backward="on"), seed=1, log=said.append
    ) as schedule:
        for chunks in (small, large):
            for _ in range(2):
                step(schedule, chunks)
    caps = [line for line in said if "(4MiB at" in line]
    assert len(caps) == 2, caps
    assert len([line for line in said if "an activation takes" in line]) == 2, "once a model"


def a_measured_activation_is_that_of_the_longest(folder: Path) -> None:
    """Microbatch 0 is measured, whose length may be another: a cap in bytes has as much room."""
    chunks, held = build(varies=True), []
    for first in (16, 8):
        said: list[str] = []
        config = DppConfig(split_backward="off", activation_cap="64MiB")
        with DppSchedule(config, seed=1, log=said.append) as schedule:
            for _ in range(2):
                step(schedule, chunks, first, 16)
        held += re.findall(r"may hold (\S+) chunk activations \(64MiB at", "".join(said))
    assert float(held[1]) == pytest.approx(float(held[0]), rel=0.2)


def announced_sizes_serve_one_step(folder: Path) -> None:
    """Each size is compared with what a microbatch then has."""
    chunks, own = build(varies=True), worker.MICRO_BATCH
    with DppSchedule(DppConfig(timeout=20, split_backward="on"), seed=1) as schedule:
        told = [8 * own, 16 * own] * 2
        schedule.announce(told)
        told.clear()  # the host's own list
        step(schedule, chunks, 8, 16)
        step(schedule, chunks, 16, 8)
        schedule.announce([8 * own] * 3)
        with pytest.raises(ConfigError, match="announce: 3 sizes for a step of 4 microbatches"):
            step(schedule, chunks, 8, 16)
    with DppSchedule(DppConfig(timeout=20, split_backward="on"), seed=1) as schedule:
        schedule.announce([8 * own] * 4)
        first = ScheduleError, "microbatch 0 has size 32, but had size 16"
        kind, words = (PeerDead, "has closed") if dist.get_rank() else first
        with pytest.raises(kind, match=words):
            step(schedule, chunks, 16)


def delays_are_those_of_the_task_in_every_schedule(folder: Path) -> None:
    """With one seed; a slow rank is one of its pipeline. What was injected stays counted."""
    chunks = build(layers=4, v=2)
    for inject, both in (("delay:3ms", True), ("slow-rank:1:3", False)):
        found = []
        for kind in (StaticSchedule, DppSchedule):
            config = DppConfig(inject=inject, split_backward="off")
            with kind(config, seed=5) as schedule:
                schedule.iteration = 3
                for length in (8, 16):
                    step(schedule, chunks, length)
                found.append(schedule.injected_seconds)
            schedule.close()
            if kind is DppSchedule:
                assert schedule.injected_seconds == found[-1]
        assert (min(found) > 0) == (both or dist.get_rank() == 1)
        assert not both or found[0] == pytest.approx(found[1])


def late_messages_need_links_of_ours(folder: Path) -> None:
    chunks = build()
    for transport, told in (("auto", 1), ("shm", 0)):
        said: list[str] = []
        config = DppConfig(inject="message-delay:1ms", transport=transport)
        with StaticSchedule(config, seed=1, log=said.append) as schedule:
            for _ in range(2):
                step(schedule, chunks)
        assert sum("delays no messages" in line for line in said) == told
        assert any("link to" in line for line in said) is not bool(told)


def a_check_opens_nothing(folder: Path) -> None:
    chunks, said = build(), list[str]()
    with DppSchedule(DppConfig(), seed=1, log=said.append) as schedule:
        step(schedule.check, chunks)
        step(schedule.check, chunks, forward_only=True)
        assert schedule.iteration == 0 and not said


def graphs_of_the_model_before_are_closed(folder: Path) -> None:
    """An evaluation has none; a static schedule captures only where it is asked to."""
    one, two = build(), build()
    closed: list[int] = []
    close: Callable[[ChunkGraphs], None] = ChunkGraphs.close
    ChunkGraphs.close = lambda own: (closed.append(1), close(own))[1]  # type: ignore[method-assign]
    for kind, word in ((StaticSchedule, "auto"), (StaticSchedule, "on"), (DppSchedule, "on")):
        replays: list[Rerun] = []
        capture = partial(Rerun, replays=replays)
        with kind(
            DppConfig(cuda_graphs=word, split_backward="on"), seed=1, capture=capture
        ) as schedule:
            for chunks in (one, two, one):
                for _ in range(3):
                    step(schedule, chunks)
                number = len(replays)
                assert bool(number) == (word == "on")
                step(schedule, chunks, forward_only=True)
                assert len(replays) == number
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


def stages_may_exchange_several_tensors(folder: Path) -> None:
    parallel_state.destroy_model_parallel()
    for case in several.CASES:
        several.run_case(case)


CHECKS = [
    recording_goes_on_when_links_are_opened_anew,
    static_links_are_opened_anew,
    lengths_that_grow_open_few_links,
    a_nominal_length_takes_the_most_tokens,
    another_number_of_chunks,
    another_model_is_measured_anew,
    a_measured_activation_is_that_of_the_longest,
    announced_sizes_serve_one_step,
    delays_are_those_of_the_task_in_every_schedule,
    late_messages_need_links_of_ours,
    a_check_opens_nothing,
    graphs_of_the_model_before_are_closed,
    a_script_may_end_by_exit,
    stages_may_exchange_several_tensors,
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
