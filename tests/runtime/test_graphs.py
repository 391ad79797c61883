"""Conditions for replaying a block. Captured functions are run again, without a GPU.

That replayed numbers are the eager ones is test_equality.py's matter.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.graphs import block as graphed_block
from megatron.dpp.core.graphs import slots as graphs
from megatron.dpp.core.graphs.pools import Pools
from megatron.dpp.core.graphs.rng import CapturedRng
from megatron.dpp.errors import SetupError
from tests.runtime.graphed import Block, Chunk, graphed_chunk  # noqa: F401  (a fixture)
from tests.runtime.rerun import Rerun

SHAPE = (3, 2, 4)


def graphs_of(
    chunk: Chunk, capture: Callable[..., Any] = Rerun, rows: Sequence[int] = ()
) -> tuple[graphs.ChunkGraphs, list[str]]:
    said: list[str] = []
    made = graphs.ChunkGraphs([chunk], None, said.append, lambda chunks: True, capture, rows=rows)
    return made, said


def step(made: graphs.ChunkGraphs, chunk: Chunk, **options: Any) -> torch.Tensor:
    """One forward and backward; the gradient of the input."""
    hidden = torch.arange(24.0).reshape(SHAPE).requires_grad_()
    with made.bound(torch.empty(SHAPE)):
        chunk.decoder(hidden_states=hidden, **options).sum().backward()
    assert hidden.grad is not None
    return hidden.grad


def test_a_replayed_block_gives_the_same_gradients_and_is_left_as_it_was(chunk: Chunk) -> None:
    hidden = torch.arange(24.0).reshape(SHAPE).requires_grad_()
    chunk.decoder(hidden_states=hidden).sum().backward()
    weight = chunk.decoder.layers[0].weight
    expected, weight.grad = weight.grad, None
    made, _ = graphs_of(chunk)
    assert torch.equal(step(made, chunk), hidden.grad)
    assert torch.equal(weight.grad, expected)
    assert chunk.decoder.forward.__func__ is Block.forward
    assert chunk.decoder.input_tensor is None
    assert isinstance(weight, torch.nn.Parameter) and chunk.decoder.layers[0].weight is weight


def test_nothing_is_captured_before_the_steps_by_which_it_is_decided(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    made, _ = graphs_of(chunk)
    step(made, chunk)
    assert not made.replays
    step(made, chunk)
    assert made.replays
    made.keep_size(100.0)
    assert not made.replays, "another size allows another number of slots"


def test_a_size_is_awaited_once_and_only_where_something_is_captured(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = graphs_of(chunk)
    assert made.awaits_size
    made.keep_size(100.0)
    assert not made.awaits_size
    monkeypatch.setattr(graphs, "why_not", lambda chunk: "no")
    assert not graphs_of(chunk)[0].awaits_size


def test_a_frozen_block_behind_frozen_ones_has_no_backward_to_replay(chunk: Chunk) -> None:
    """Its slot would never be given back."""
    chunk.decoder.requires_grad_(False)
    made, _ = graphs_of(chunk)
    with made.bound(torch.empty(SHAPE)):
        output = chunk.decoder(hidden_states=torch.ones(SHAPE))
    assert not output.requires_grad and chunk.decoder.num_eager == 1
    assert not made.replays


def test_a_slot_is_free_after_the_weight_gradients_of_its_last_layer(chunk: Chunk) -> None:
    chunk.decoder.layers.append(torch.nn.Linear(4, 4))
    deferred: list[Any] = []
    store: Any = SimpleNamespace(
        divert=lambda: contextlib.nullcontext({}), delayed_by_modules=lambda number: None,
        defer=lambda layer, work: deferred.append(work),
    )  # fmt: skip
    made = graphs.ChunkGraphs([chunk], store, print, lambda chunks: True, Rerun)
    step(made, chunk)
    assert made._pools is not None
    free = [len(made._pools._free)]
    for work in deferred:
        work.compute()
        free.append(len(made._pools._free))
    assert free == [0, 0, 1]


def test_only_lengths_that_can_be_attended_to_stay(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, kept = graphs.ENGINE_ROWS, list[Any]()
    monkeypatch.setattr(graphs, "Pools", lambda *given: kept.append(given[1]) or Pools(*given))
    chunk.engine = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine"})(1, 1)
    made, _ = graphs_of(chunk, rows=(rows, rows + 1))
    with made.bound(torch.empty(SHAPE)):
        pass
    assert kept == [[rows]]


def test_an_argument_that_changed_in_place_counts_and_gradients_are_the_callers(
    chunk: Chunk,
) -> None:
    made, scale = graphs_of(chunk)[0], torch.tensor(2.0)
    found = []
    for _ in range(2):
        hidden = torch.ones(SHAPE).requires_grad_()
        with made.bound(torch.empty(SHAPE)):
            output = chunk.decoder(hidden_states=hidden, scale=scale)
            found += torch.autograd.grad(output.sum(), hidden)
        scale.mul_(2)
    assert torch.equal(found[1], 2 * found[0])


def test_other_arguments_than_the_first_run_eagerly_and_are_named_once(chunk: Chunk) -> None:
    made, said = graphs_of(chunk)
    step(made, chunk, scale=1.0)
    assert not [line for line in said if "unlike" in line]
    for _ in range(2):
        assert torch.equal(step(made, chunk, scale=2.0), 2.0 * step(made, chunk, scale=1.0))
    assert len([line for line in said if "unlike" in line]) == 1


def test_an_argument_of_another_shape_runs_eagerly(chunk: Chunk) -> None:
    made, said = graphs_of(chunk)
    step(made, chunk, scale=torch.ones(1))
    step(made, chunk, scale=torch.ones(4))
    assert len([line for line in said if "unlike" in line]) == 1


def test_repeated_draws_are_those_of_the_inputs_shape(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer microbatch draws more numbers before each recomputed part than a short one."""
    chunk.config.recompute_granularity = "selective"
    monkeypatch.setattr(graphed_block, "RecomputedDraws", lambda forward: forward())
    block = graphed_block.GraphedBlock(chunk, None, Rerun, CapturedRng(), print)
    runs = iter(("draws of 3 rows", "draws of 5 rows"))
    short, long = torch.empty(3, 2, 4), torch.empty(5, 2, 4)
    for example, found in ((short, 3), (long, 5), (short, 3)):
        draws: Any = block.recomputed(lambda: next(runs), example)
        assert draws == f"draws of {found} rows"


def test_after_a_step_every_block_is_captured_in_every_slot(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture in the middle of a later step would make a task of 2 ms take 10 ms."""
    captured: list[Any] = []

    def capture(function: Any, pool: Any) -> Rerun:
        captured.append(function)
        return Rerun(function, pool)

    other, said = Chunk(), list[str]()
    made = graphs.ChunkGraphs([chunk, other], None, said.append, lambda chunks: True, capture)

    def forwards(*chunks: Chunk) -> list[torch.Tensor]:
        inputs = [torch.arange(24.0).reshape(SHAPE).requires_grad_() for _ in chunks]
        with made.bound(torch.empty(SHAPE)):
            outputs = [c.decoder(hidden_states=h) for c, h in zip(chunks, inputs, strict=True)]
            for output in outputs:
                output.sum().backward()
        return [hidden.grad for hidden in inputs]

    forwards(chunk, chunk, other)
    assert len(captured) == 2 * 3 * 2  # F and B of two blocks in three slots
    one = forwards(chunk)[0]
    assert all(torch.equal(each, one) for each in forwards(chunk, chunk, chunk))
    forwards(other, other, chunk)
    assert len(captured) == 2 * 3 * 2
    assert said == ["CUDA graphs: memory for 3 chunk activations of 0 MiB"]
    made.keep_size(100.0)  # a cap in bytes allows another number of slots
    forwards(chunk, chunk, other)
    assert len(captured) == 2 * 2 * 3 * 2


def test_a_capture_that_fails_leaves_the_block_eager_and_says_why(chunk: Chunk) -> None:
    def refuse(function: Any, pool: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    made, said = graphs_of(chunk, refuse)
    for _ in range(2):
        step(made, chunk)
    assert chunk.decoder.num_eager == 2
    assert said == [
        "CUDA graphs: chunk 0 runs without graphs: operation not permitted when stream is capturing"
    ]


def test_a_chunk_whose_capture_fails_leaves_the_slots_of_others_to_them(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its forwards would cost the others an activation's memory for ever."""
    other, said, captures = Chunk(), list[str](), itertools.count()

    def capture(function: Any, pool: Any) -> Rerun:
        if next(captures) == 2:  # after F and B of the first
            raise RuntimeError("not permitted")
        return Rerun(function, pool)

    made = graphs.ChunkGraphs([chunk, other], None, said.append, lambda chunks: True, capture)
    with made.bound(torch.empty(SHAPE)):
        for each in (chunk, other, chunk):
            hidden = torch.arange(24.0).reshape(SHAPE).requires_grad_()
            each.decoder(hidden_states=hidden).sum().backward()
    assert (chunk.decoder.num_eager, other.decoder.num_eager) == (2, 1)
    assert "memory for 1 chunk activations" in said[-1] and "chunk 1" in said[0]


def test_parameters_that_moved_are_captured_anew(chunk: Chunk) -> None:
    captured: list[Any] = []

    def capture(function: Any, pool: Any) -> Rerun:
        captured.append(function)
        return Rerun(function, pool)

    made, _ = graphs_of(chunk, capture)
    step(made, chunk)
    step(made, chunk)
    assert len(captured) == 2  # F and B of one activation
    layer = chunk.decoder.layers[0]
    layer.weight.data = torch.eye(4)
    assert torch.equal(step(made, chunk), torch.ones(SHAPE))
    assert len(captured) == 4


def test_a_buffer_that_graphs_gather_into_outlives_its_successor(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer eager call frees megatron-core's buffer of gathered inputs; replays write to it."""
    buffers = {"mpu": torch.zeros(8)}
    monkeypatch.setattr(graphed_block, "gather_buffers", lambda: list(buffers.values()))
    made, _ = graphs_of(chunk)
    step(made, chunk)
    before = weakref.ref(buffers["mpu"])
    buffers["mpu"] = torch.zeros(16)
    step(made, chunk)
    assert before() is not None
    made.close()
    assert before() is None


@pytest.mark.parametrize(
    ("rows", "named", "replays"), [(128, (), 2), (64, (), 0), (128, (128, 200), 2), (128, (64,), 0)]
)
def test_lengths_that_cudnn_cannot_attend_to_in_graphs_stay_eager(
    chunk: Chunk, rows: int, named: Sequence[int], replays: int
) -> None:
    """Replayed layers of Transformer Engine read foreign memory for sequences of 16 and 64."""
    chunk.decoder.core = type("Core", (torch.nn.Module,), {"__module__": "transformer_engine.a"})()
    made: list[Rerun] = []
    engine, said = graphs_of(chunk, partial(Rerun, replays=made), named)
    with engine.bound(torch.zeros(rows, 1, 4)):
        hidden = torch.ones(rows, 1, 4, requires_grad=True)
        chunk.decoder(hidden_states=hidden).sum().backward()
    assert len(made) == replays
    assert any("no multiple of 128" in line for line in said) == (not replays)


def test_without_gradients_nothing_is_captured(chunk: Chunk) -> None:
    made, said = graphs_of(chunk)
    with made.bound(torch.empty(SHAPE)), torch.no_grad():
        chunk.decoder(hidden_states=torch.ones(SHAPE))
    assert chunk.decoder.num_eager == 1 and not said


def test_closing_frees_what_was_captured(chunk: Chunk) -> None:
    """NCCL waits without end for graphs that only the garbage collector frees."""
    captured: list[weakref.ref[Rerun]] = []

    def capture(function: Any, pool: Any) -> Rerun:
        made = Rerun(function, pool)
        captured.append(weakref.ref(made))
        return made

    made, _ = graphs_of(chunk, capture)
    step(made, chunk)
    made.close()
    assert captured and not any(reference() for reference in captured)


def test_only_chunks_that_can_be_captured_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[torch.nn.Module] = [Chunk(), Chunk(), Chunk()]
    monkeypatch.setattr(graphs, "why_not", lambda chunk: "no" if chunk is chunks[1] else None)
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 0)
    asked: list[list[int]] = []

    def wanted(numbers: Sequence[int]) -> bool:
        asked.append(list(numbers))
        return False

    made = graphs.ChunkGraphs(chunks, None, lambda line: None, wanted, Rerun)
    for _ in range(2):
        with made.bound(torch.empty(SHAPE)):
            pass
    assert asked == [[0, 2]]


def test_whatever_fails_in_a_capture_leaves_the_chunk_eager_and_its_first_error_is_named(
    chunk: Chunk,
) -> None:
    """A failure inside torch.distributed may end as another error; the first is reported."""

    def capture(function: Any, pool: Any) -> Rerun:
        try:
            raise SetupError("cuStreamWaitValue32: not permitted")
        except SetupError:
            raise ValueError("the group is not in a map")  # noqa: B904

    made, said = graphs_of(chunk, capture)
    step(made, chunk)
    assert chunk.decoder.num_eager
    assert any("runs without graphs: cuStreamWaitValue32" in line for line in said)
