"""The generators that a recomputed part draws from, with states that only count (no GPU).

That the numbers drawn are the eager ones is test_equality.py's matter, on GPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as parallel_random

from megatron.dpp.mcore.graphs import rng as captured_rng
from megatron.dpp.mcore.graphs.rng import RecomputedDraws

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
    monkeypatch.setattr(captured_rng, "get_cuda_rng_tracker", lambda: made)
    monkeypatch.setattr(captured_rng, "_default_generator", lambda: made.default)
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


def test_states_that_are_generators_are_refused(machine: Machine) -> None:
    machine.states_["parallel"] = torch.Generator()
    with pytest.raises(TypeError, match="states that can be saved"):
        RecomputedDraws(machine.forward)
