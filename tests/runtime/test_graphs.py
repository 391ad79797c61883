"""Conditions for replaying a block. Captured functions are run again, without a GPU.

That replayed numbers are the eager ones is test_equality.py's matter.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.graphs import block as graphed_block
from megatron.dpp.core.graphs import slots as graphs
from megatron.dpp.core.graphs.capture import CapturedRng
from megatron.dpp.core.graphs.parts import Whole
from megatron.dpp.core.graphs.pools import Pools
from megatron.dpp.errors import SetupError
from tests.runtime.graphed import SHAPE, Block, Captures, Chunk, graphs_of, step
from tests.runtime.layers import packed_params
from tests.runtime.losses import Rerun

pytestmark = pytest.mark.usefixtures("captured_at_once")


def test_a_replayed_block_gives_the_same_gradients_and_is_left_as_it_was(chunk: Chunk) -> None:
    hidden = torch.arange(24.0).reshape(SHAPE).requires_grad_()
    chunk.decoder(hidden_states=hidden).sum().backward()
    weight = chunk.decoder.layers[0].weight
    expected, weight.grad = weight.grad, None
    made, _ = graphs_of(chunk)
    assert torch.equal(step(made, chunk)[0], hidden.grad)
    assert torch.equal(weight.grad, expected)
    assert chunk.decoder.forward.__func__ is Block.forward
    assert chunk.decoder.input_tensor is None
    assert isinstance(weight, torch.nn.Parameter) and chunk.decoder.layers[0].weight is weight


def test_a_slot_is_free_after_the_weight_gradients_of_its_last_layer(chunk: Chunk) -> None:
    chunk.decoder.layers.append(torch.nn.Linear(4, 4))
    deferred: list[Any] = []
    store: Any = SimpleNamespace(
        divert=lambda: contextlib.nullcontext({}), delayed_by_modules=lambda number: None,
        defer=lambda layer, work: deferred.append(work),
    )  # fmt: skip
    made, _ = graphs_of(chunk, store=store)
    step(made, chunk)
    assert made._pools
    free = [len(made._pools[0]._free)]
    for work in deferred:
        work.compute()
        free.append(len(made._pools[0]._free))
    assert free == [0, 0, 1]


def test_an_argument_that_changed_in_place_counts_and_gradients_are_the_callers(
    chunk: Chunk,
) -> None:
    made, scale, found = graphs_of(chunk)[0], torch.tensor(2.0), []
    for _ in range(2):
        hidden = torch.ones(SHAPE).requires_grad_()
        with made.bound(torch.empty(SHAPE)):
            output = chunk.decoder(hidden_states=hidden, scale=scale)
            found += torch.autograd.grad(output.sum(), hidden)
        scale.mul_(2)
    assert torch.equal(found[1], 2 * found[0])


@pytest.mark.parametrize(("usual", "other"), [(1.0, 2.0), (torch.ones(1), torch.ones(4))])
def test_other_arguments_than_the_first_run_eagerly_and_are_named_once(
    chunk: Chunk, usual: Any, other: Any
) -> None:
    made, said = graphs_of(chunk)
    (once,) = step(made, chunk, scale=usual)
    assert not [line for line in said if "unlike" in line]
    for _ in range(2):
        expected = other * once if isinstance(other, float) else once
        assert torch.equal(step(made, chunk, scale=other)[0], expected)
    assert len([line for line in said if "unlike" in line]) == 1


def test_packed_rows_replay_by_their_number_of_documents(chunk: Chunk) -> None:
    """Bounds are copied in before each replay. A row whose longest document is not said to be as
    long as the row itself runs eagerly, as do more than three numbers of documents."""
    ends, captures = [[3, 3, 3], [1, 2, 3], [2, 3], [3] * 4, [3] * 5], Captures()
    made, said = graphs_of(chunk, capture=captures)

    def gradient(bounds: list[int], longest: int = SHAPE[0]) -> float:
        params = packed_params(torch.tensor([0, *bounds]), longest)
        return float(step(made, chunk, packed_seq_params=params)[0].sum())

    one = gradient([1, 2, 3])
    for bounds in ends:
        captures.replays.clear()
        assert gradient(bounds) == pytest.approx(bounds[0] * one, rel=1e-4)
        assert len(captures.replays) == 2 * (len(bounds) < 5), "F and B"
    assert captures.number == 6 and "unlike" in said[-1]
    gradient([1, 2, 3], longest=2)
    assert captures.number == 6 and len(captures.replays) == 0


def test_repeated_draws_are_those_of_the_inputs_shape(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer microbatch draws more numbers before each recomputed part than a short one."""
    chunk.config.recompute_granularity = "selective"
    monkeypatch.setattr(graphed_block, "RecomputedDraws", lambda forward: forward())
    block = graphed_block.GraphedBlock(chunk, Whole(chunk), None, Rerun, CapturedRng(), print)
    runs = iter(("draws of 3 rows", "draws of 5 rows"))
    short, long = torch.empty(3, 2, 4), torch.empty(5, 2, 4)
    for example, found in ((short, 3), (long, 5), (short, 3)):
        draws: Any = block.recomputed(lambda: next(runs), example)
        assert draws == f"draws of {found} rows"


# What is captured, and when ---------------------------------------------------------------------


def test_steps_and_sizes_are_awaited_before_anything_is_captured(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decided by the first steps; another size allows another number of slots."""
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    made, _ = graphs_of(chunk)
    for replays in (False, True):
        step(made, chunk)
        assert made.replays is replays and made.awaits_size
    made.keep_size(100.0)
    assert not made.replays and not made.awaits_size
    monkeypatch.setattr(graphs, "why_not_captured", lambda chunk: "no")
    assert not graphs_of(chunk)[0].awaits_size


def test_only_chunks_that_can_be_captured_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[torch.nn.Module] = [Chunk(), Chunk(), Chunk()]
    monkeypatch.setattr(
        graphs, "why_not_captured", lambda chunk: "no" if chunk is chunks[1] else None
    )
    asked: list[list[int]] = []

    def wanted(numbers: Sequence[int]) -> bool:
        asked.append(list(numbers))
        return False

    made = graphs.ChunkGraphs(chunks, None, print, wanted, Rerun)
    for _ in range(2):
        with made.bound(torch.empty(SHAPE)):
            pass
    assert asked == [[0, 2]]


@pytest.mark.parametrize("frozen", [True, False])
def test_without_gradients_nothing_is_captured(chunk: Chunk, frozen: bool) -> None:
    """A frozen block behind frozen ones has no backward: its slot would never be given back."""
    chunk.decoder.requires_grad_(not frozen)
    made, said = graphs_of(chunk)
    with made.bound(torch.empty(SHAPE)), torch.set_grad_enabled(frozen):
        output = chunk.decoder(hidden_states=torch.ones(SHAPE))
    assert not output.requires_grad and chunk.decoder.num_eager == 1
    assert not made.replays and not said


def test_after_a_step_every_block_is_captured_in_every_slot(chunk: Chunk) -> None:
    """A capture in the middle of a later step would make a task of 2 ms take 10 ms."""
    captures, other = Captures(), Chunk()
    made, said = graphs_of(chunk, other, capture=captures)
    step(made, chunk, chunk, other)
    assert captures.number == 2 * 3 * 2  # F and B of two blocks in three slots
    (one,) = step(made, chunk)
    assert all(torch.equal(each, one) for each in step(made, chunk, chunk, chunk))
    step(made, other, other, chunk)
    assert captures.number == 2 * 3 * 2
    assert said == ["CUDA graphs: memory for 3 chunk activations of 0 MiB"]
    made.keep_size(100.0)  # a cap in bytes allows another number of slots
    step(made, chunk, chunk, other)
    assert captures.number == 2 * 2 * 3 * 2


def test_parameters_that_moved_are_captured_anew_and_buffers_are_kept(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer eager call frees megatron-core's buffer of gathered inputs; replays write to it."""
    captures, buffers = Captures(), {"mpu": torch.zeros(8)}
    monkeypatch.setattr(graphed_block, "gather_buffers", lambda: list(buffers.values()))
    made, _ = graphs_of(chunk, capture=captures)
    step(made, chunk)
    before = weakref.ref(buffers["mpu"])
    buffers["mpu"] = torch.zeros(16)
    step(made, chunk)
    assert captures.number == 2 and before() is not None  # F and B of one activation
    chunk.decoder.layers[0].weight.data = torch.eye(4)
    assert torch.equal(step(made, chunk)[0], torch.ones(SHAPE))
    assert captures.number == 4
    for _ in range(2):  # a host may free DDP's buffer of gradients, and take it anew
        chunk.decoder.layers[0].weight.main_grad = torch.zeros(4, 4)
        step(made, chunk)
    assert captures.number == 8
    kept = weakref.ref(captures.replays[-1])
    captures.replays.clear()
    made.close()
    assert kept() is before() is None, "NCCL waits without end for what the collector frees"


# Captures that fail -----------------------------------------------------------------------------


def refuse(function: Any, pool: Any) -> Any:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


def fail_twice(function: Any, pool: Any) -> Any:
    """A failure inside torch.distributed may end as another error; the first is reported."""
    try:
        raise SetupError("cuStreamWaitValue32: not permitted")
    except SetupError:
        raise ValueError("the group is not in a map")  # noqa: B904


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (refuse, "operation not permitted when stream is capturing"),
        (fail_twice, "cuStreamWaitValue32: not permitted"),
    ],
)
def test_a_capture_that_fails_leaves_the_block_eager_and_says_why(
    chunk: Chunk, capture: Any, reason: str
) -> None:
    made, said = graphs_of(chunk, capture=capture)
    for _ in range(2):
        step(made, chunk)
    assert chunk.decoder.num_eager == 2
    assert said == [f"CUDA graphs: chunk 0 runs without graphs: {reason}"]


def test_a_chunk_whose_capture_fails_leaves_the_slots_of_others_to_them(chunk: Chunk) -> None:
    """Else each of its forwards would cost the others an activation's memory for ever."""
    other, captures = Chunk(), itertools.count()

    def capture(function: Any, pool: Any) -> Rerun:
        if next(captures) == 2:  # after F and B of the first
            raise RuntimeError("not permitted")
        return Rerun(function, pool)

    made, said = graphs_of(chunk, other, capture=capture)
    with made.bound(torch.empty(SHAPE)):
        for each in (chunk, other, chunk):
            hidden = torch.arange(24.0).reshape(SHAPE).requires_grad_()
            each.decoder(hidden_states=hidden).sum().backward()
    assert (chunk.decoder.num_eager, other.decoder.num_eager) == (2, 1)
    assert "memory for 1 chunk activations" in said[-1] and "chunk 1" in said[0]


# Lengths that Transformer Engine can attend to --------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "named", "replays"), [(128, (), 2), (64, (), 0), (128, (128, 200), 2), (128, (64,), 0)]
)
def test_lengths_that_cudnn_cannot_attend_to_in_graphs_stay_eager(
    chunk: Chunk, rows: int, named: Sequence[int], replays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed layers of Transformer Engine read foreign memory for sequences of 16 and 64."""
    kept: list[Any] = []
    monkeypatch.setattr(graphs, "Pools", lambda *given: kept.append(given[1]) or Pools(*given))
    chunk.decoder.core = type("Core", (torch.nn.Module,), {"__module__": "transformer_engine.a"})()
    captures = Captures()
    made, said = graphs_of(chunk, capture=captures, rows=named)
    step(made, chunk, longest=rows)
    assert len(captures.replays) == replays
    assert any("no multiple of 128" in line for line in said) == (not replays)
    assert not replays or kept == [[graphs.ENGINE_ROWS]]


@pytest.mark.parametrize(
    ("sharing", "rows", "replays"),
    [
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, 64, 2),
        ({"sequence_parallel": False, "tensor_model_parallel_size": 2}, 64, 0),
        ({"context_parallel_size": 2}, 128, 0),
        ({"context_parallel_size": 2}, 256, 2),
    ],
)
def test_rows_count_as_attention_sees_them(
    chunk: Chunk, sharing: dict[str, Any], rows: int, replays: int
) -> None:
    """Of sequence-parallel ranks together; a context-parallel one attends to halves of its rows."""
    vars(chunk.config).update(sharing)
    chunk.decoder.core = type("Core", (torch.nn.Module,), {"__module__": "transformer_engine.a"})()
    captures = Captures()
    step(graphs_of(chunk, capture=captures)[0], chunk, longest=rows)
    assert len(captures.replays) == replays
