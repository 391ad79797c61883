"""The generators that a recomputed part draws from, with states that only count (no GPU).

That the numbers drawn are the eager ones is test_equality.py's matter, on GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as parallel_random

from megatron.dpp.core.graphs import capture, slots
from megatron.dpp.core.graphs.block import GraphedBlock
from megatron.dpp.core.graphs.capture import CapturedRng, RecomputedDraws, cuda_capture
from megatron.dpp.core.graphs.parts import Whole
from megatron.dpp.core.graphs.pools import Pools
from tests.runtime.graphed import SHAPE, Block, Chunk, graphs_of, step
from tests.runtime.losses import Rerun

DEFAULT, PARALLEL = 11, 22
"""Seeds."""


class Generator:
    """Its state is, as a CUDA generator's, a seed and an offset."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.state = torch.tensor([seed, offset])

    def draw(self, number: int) -> None:
        self.state = self.state + torch.tensor([0, number])

    def get_state(self) -> torch.Tensor:
        return self.state

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state

    def clone_state(self) -> Generator:
        return Generator(*self.state.tolist())

    def graphsafe_get_state(self) -> Generator:
        return self


class Machine:
    """The device's default generator, Megatron's tracker, and a forward with two parts."""

    def __init__(self) -> None:
        self.default = Generator(DEFAULT, 100)
        self.states_: dict[str, Any] = {"parallel": torch.tensor([PARALLEL, 1000])}
        self.use_cudagraphable_rng = False

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def all_states(self) -> tuple[Any, ...]:
        return None, self.default.get_state(), self.get_states()

    def set_all_states(
        self, cpu_rng_state: Any, cuda_rng_state: torch.Tensor,
        cuda_rng_state_tracker: dict[str, Any],
    ) -> None:  # fmt: skip
        self.default.set_state(cuda_rng_state)
        self.states_ = cuda_rng_state_tracker

    def fork(self) -> torch.Tensor:
        """Switch the default generator to the tracker's state; returns what it had."""
        before = self.default.get_state()
        self.default.set_state(self.states_["parallel"])
        return before

    def forward(self) -> list[Any]:
        """Two layers: a recomputed part that draws 4 from the tracker's state and 8 by default."""
        saved = []
        for _ in range(2):
            saved.append(parallel_random._get_all_rng_states())
            before = self.fork()
            self.default.draw(4)
            self.states_["parallel"] = self.default.get_state()
            self.default.set_state(before)
            self.default.draw(8)
        return saved


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: made.default.get_state())
    monkeypatch.setattr(capture, "get_cuda_rng_tracker", lambda: made)
    monkeypatch.setattr(torch.cuda, "default_generators", [made.default])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(parallel_random, "_get_all_rng_states", made.all_states)
    monkeypatch.setattr(parallel_random, "_set_all_rng_states", made.set_all_states)
    return made


def test_each_part_has_generators_that_are_set_to_where_the_forward_had_come(
    machine: Machine,
) -> None:
    draws = RecomputedDraws(machine.forward)
    assert machine.default.state.tolist() == [DEFAULT, 100]  # as before the trial
    assert machine.states_["parallel"].tolist() == [PARALLEL, 1000]
    with draws.handed_out():
        kept = machine.forward()
    machine.default.set_state(torch.tensor([DEFAULT, 500]))
    machine.states_["parallel"] = torch.tensor([PARALLEL, 7000])
    draws.rewind(RecomputedDraws.states())
    for number, (_, default, states) in enumerate(kept):
        assert default.state.tolist() == [DEFAULT, 500 + 8 * number]
        assert states["parallel"].state.tolist() == [PARALLEL, 7000 + 4 * number]
    assert len(draws.generators()) == 4
    machine.states_["parallel"] = torch.Generator()
    with pytest.raises(TypeError, match="states that can be saved"):
        RecomputedDraws(machine.forward)


def test_a_part_inside_of_a_switched_state_follows_that_state(machine: Machine) -> None:
    """With sequence parallelism a whole block runs in the tracker's state."""

    def switched() -> list[Any]:
        before = machine.fork()
        machine.default.draw(3)
        saved = [parallel_random._get_all_rng_states()]
        machine.default.draw(5)
        machine.states_["parallel"] = machine.default.get_state()
        machine.default.set_state(before)
        return saved

    draws = RecomputedDraws(switched)
    with draws.handed_out():
        ((_, default, _),) = switched()
    machine.states_["parallel"] = torch.tensor([PARALLEL, 40])
    draws.rewind(RecomputedDraws.states())
    assert default.state.tolist() == [PARALLEL, 43]


# Replays ------------------------------------------------------------------------------------------


def drawn(states: dict[str, Any], number: int) -> float:
    """Draws from the tracker's state, or from the generator in its place; the draws before."""
    state = states["parallel"]
    if isinstance(state, Generator):
        before = state.get_state()
        state.draw(number)
    else:
        before, states["parallel"] = state, state + torch.tensor([0, number])
    return float(before[1])


class Dropped(torch.autograd.Function):
    """Multiplies by what is drawn. The backward draws it again, as a recomputed part does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, machine: Machine) -> torch.Tensor:
        ctx.saved = parallel_random._get_all_rng_states()[2]
        return hidden * drawn(machine.states_, 4)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient * drawn(ctx.saved, 4), None


class Dropping(Block):
    """A block of two recomputed parts that draw."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _ in range(2):
            hidden_states = Dropped.apply(hidden_states, self.machine)
        return hidden_states


def replayed(machine: Machine, *, recomputes: bool) -> tuple[Chunk, GraphedBlock]:
    """A chunk whose block is replayed with the generators that it was captured with."""
    rng = CapturedRng()

    class Captured(Rerun):
        def replay(self) -> None:
            with rng.capturing():
                super().replay()

    def capture(function: Callable[[], None], pool: Any) -> Captured:
        with rng.capturing() as generators:
            assert all(isinstance(each, Generator) for each in generators)
            assert machine.use_cudagraphable_rng
        return Captured(function, pool)

    chunk = Chunk()
    chunk.decoder = Dropping(machine)
    chunk.config.recompute_granularity = "selective" if recomputes else None
    block = GraphedBlock(chunk, Whole(chunk), None, capture, rng, print)
    block.bind(Pools(torch.empty(SHAPE)))
    return chunk, block


STARTS = (40, 7, 7000)
"""Positions at which three microbatches begin to draw."""


def outputs(machine: Machine, chunk: Chunk) -> list[Any]:
    """Each microbatch's output and its input, and the position in the end."""
    found = []
    for start in STARTS:
        machine.states_["parallel"] = torch.tensor([PARALLEL, start])
        hidden = torch.ones(SHAPE, requires_grad=True)
        output = chunk.decoder(hidden_states=hidden)
        found.append((output, hidden, machine.states_["parallel"].tolist()))
    return found


def test_replays_draw_from_where_the_tracker_is_and_leave_it_where_they_have_come(
    machine: Machine,
) -> None:
    """All microbatches would have one mask otherwise, whatever the seed of their task."""
    chunk, block = replayed(machine, recomputes=False)
    for (output, _, after), start in zip(outputs(machine, chunk), STARTS, strict=True):
        assert torch.equal(output, torch.full(SHAPE, float(start * (start + 4))))
        assert after == [PARALLEL, start + 8]
    block.bind(None)
    assert machine.use_cudagraphable_rng is False, "eager work goes on with states"


def test_a_replayed_backward_draws_its_own_forwards_numbers(machine: Machine) -> None:
    """Other forwards have run meanwhile, in other slots and in its own."""
    chunk, _ = replayed(machine, recomputes=True)
    for _ in range(2):
        for (output, hidden, _), start in zip(outputs(machine, chunk), STARTS, strict=True):
            output.sum().backward()
            assert torch.equal(hidden.grad, torch.full(SHAPE, float(start * (start + 4))))


def test_a_capture_registers_generators_and_gives_the_tracker_its_states_back(
    machine: Machine,
) -> None:
    """Also one that fails. Those of recomputed parts are registered with their backward alone."""
    before, own = machine.states_, Generator(DEFAULT)
    for error in (None, RuntimeError("not permitted")):
        with contextlib.suppress(RuntimeError), CapturedRng().capturing():
            assert machine.states_ is not before and machine.use_cudagraphable_rng
            if error is not None:
                raise error
        assert machine.states_ is before and machine.use_cudagraphable_rng is False
    rng, draws = CapturedRng(), SimpleNamespace(generators=lambda: [own])
    with rng.repeating(draws), rng.capturing() as generators:  # type: ignore[arg-type]
        assert generators[-1] is own and len(generators) == 2
    with rng.capturing() as generators:
        assert own not in generators and len(generators) == 1
    # A tracker of generators (``--te-rng-tracker``) is captured as it is.
    machine.use_cudagraphable_rng, machine.states_ = True, {"parallel": Generator(PARALLEL)}
    with rng.capturing() as generators:
        assert generators == list(machine.states_.values())
    with rng.replaying():
        pass
    assert machine.use_cudagraphable_rng and generators == list(machine.states_.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_random_states_are_exchanged_around_replays_of_layers_that_draw(
    machine: Machine, dropout: float, monkeypatch: pytest.MonkeyPatch, captured_at_once: None
) -> None:
    exchanged: list[CapturedRng] = []

    def replaying(rng: CapturedRng) -> Any:
        exchanged.append(rng)
        return contextlib.nullcontext()

    monkeypatch.setattr(slots, "cuda_capture", lambda rng: Rerun)
    monkeypatch.setattr(CapturedRng, "replaying", replaying)
    chunk = Chunk()
    vars(chunk.config).update(
        hidden_dropout=dropout, moe_input_jitter_eps=None, moe_router_force_load_balancing=False
    )
    step(graphs_of(chunk, capture=None)[0], chunk)
    assert len(exchanged) == (dropout > 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the CUDA driver that captures make."""
    told: list[Any] = []

    class Stream:
        def __init__(self, name: str = "our own") -> None:
            self.name = name
            told.extend(["a new stream"] * (name == "our own"))

        def wait_stream(self, other: Any) -> None:
            told.append(f"{self.name} waits for {other.name}")

    class Graph:
        def register_generator_state(self, generator: Any) -> None:
            told.append(generator)

        def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
            told.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            told.append("end")
            if "invalid" in told:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self) -> None:
            told.append("replay")

    @contextlib.contextmanager
    def on(stream: Stream) -> Any:
        told.append(f"on {stream.name}")
        yield
        told.append(f"leaves {stream.name}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("the current"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return told


RNG: Any = SimpleNamespace(capturing=lambda: contextlib.nullcontext(["one", "other"]))
CAPTURED = [
    "our own waits for the current", "on our own", "one", "other",
    ("begin", "pool", "thread_local"), "work", "end", "leaves our own",
    "the current waits for our own",
]  # fmt: skip


def test_a_capture_knows_its_generators_and_no_stream_overtakes_it(driver: list[Any]) -> None:
    """All captures are on one stream, which is not the steps' own."""
    capture = cuda_capture(RNG)
    for _ in range(2):
        driver.clear()
        graph = capture(lambda: driver.append("work"), "pool")
        assert driver == CAPTURED
    graph.replay()
    assert driver[len(CAPTURED) :] == ["replay"]


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("error", [ValueError("of the work"), KeyboardInterrupt()])
def test_a_capture_whose_work_fails_is_ended_and_tells_the_works_error(
    error: BaseException, valid: bool, driver: list[Any]
) -> None:
    """The driver would refuse what the GPU is asked after it; its own error names no reason."""

    def work() -> None:
        driver.extend(["invalid"] * (not valid))
        raise error

    with pytest.raises(type(error)) as caught:
        cuda_capture(RNG)(work, "pool")
    assert caught.value is error and driver[-1] == "end"
