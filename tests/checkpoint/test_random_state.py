"""The random states of a checkpoint: whose they are, and what a resumed run draws."""

from __future__ import annotations

import argparse
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from megatron.dpp_train.checkpoint import random_state


class Places:
    """Ranks of groups: data 1 of 3, with context parallelism 5 of 6, pipeline 2 of 4, tensor 1 of
    2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, experts: int = 1) -> None:
        groups = SimpleNamespace(
            get_data_parallel_world_size=lambda with_context_parallel=False: (
                6 if with_context_parallel else 3
            ),
            get_data_parallel_rank=lambda with_context_parallel=False: (
                5 if with_context_parallel else 1
            ),
            get_data_parallel_group=lambda: "data",
            get_pipeline_model_parallel_world_size=lambda: 4,
            get_pipeline_model_parallel_rank=lambda: 2,
            get_tensor_model_parallel_world_size=lambda: 2,
            get_tensor_model_parallel_rank=lambda: 1,
            get_expert_model_parallel_world_size=lambda: experts,
        )
        self.tracker = SimpleNamespace(
            get_states=lambda: dict(self.tracked), set_states=self._track
        )
        self.tracked: dict[str, Any] = {"a": torch.tensor([4, 200])}
        patch = monkeypatch.setattr
        patch(random_state, "mpu", groups)
        patch(random_state.tensor_parallel, "get_cuda_rng_tracker", lambda: self.tracker)
        self.device = torch.tensor([3, 100])
        patch(torch.cuda, "get_rng_state", lambda: self.device)
        patch(torch.cuda, "set_rng_state", lambda state: setattr(self, "device", state))
        patch(random_state.dist, "all_gather_object", self._gather)

    def _track(self, states: dict[str, Any]) -> None:
        self.tracked = states

    def _gather(self, states: list[Any], state: Any, group: str) -> None:
        assert group == "data"
        states[:] = ["first", state, "third"]


@pytest.mark.parametrize("generators", [True, False])
def test_a_resumed_run_draws_the_next_numbers_of_every_generator(
    monkeypatch: pytest.MonkeyPatch, generators: bool
) -> None:
    """Of the device and of the tracker too, whose states become what that tracker works with."""

    def converted(state: Any, *, to_graphable: bool) -> Any:
        return ("generator", state) if to_graphable else state

    parallel = random_state.tensor_parallel
    monkeypatch.setattr(parallel, "is_graph_safe_cuda_rng_tracker", lambda _: generators)
    monkeypatch.setattr(parallel, "convert_cuda_rng_state", converted)
    ranks = Places(monkeypatch)
    device, tracked = ranks.device, ranks.tracked["a"]
    args = argparse.Namespace(data_parallel_random_init=False)
    saved = random_state.collect(args, sharded=False)
    drawn = draw_from_each()
    ranks.device, ranks.tracked = torch.tensor([3, 108]), {}
    random_state.restore(args, saved)
    assert draw_from_each() == drawn
    assert ranks.device is device
    assert ranks.tracked == {"a": ("generator", tracked) if generators else tracked}


@pytest.mark.parametrize(
    ("experts", "shape", "place", "replica"), [(1, (4, 2), (2, 1), 5), (2, (4, 2, 6), (2, 1, 5), 0)]
)
def test_random_states_have_a_place_in_the_layout(
    monkeypatch: pytest.MonkeyPatch, experts: int, shape: Any, place: Any, replica: int
) -> None:
    """With experts every replica draws numbers of its own."""
    Places(monkeypatch, experts)
    args = argparse.Namespace(data_parallel_random_init=False)
    found = random_state.collect(args, sharded=True)
    assert (found.global_shape, found.global_offset) == (shape, place)
    assert found.replica_id == replica and len(found.data) == 1


def draw_from_each() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_replicas_that_began_with_other_seeds_keep_their_own_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Places(monkeypatch)
    args = argparse.Namespace(data_parallel_random_init=True)
    states = random_state.collect(args, sharded=False)
    assert states[0] == "first" and states[2] == "third" and isinstance(states[1], dict)
    own, drawn = states[1], draw_from_each()
    monkeypatch.setattr(
        random_state.tensor_parallel, "is_graph_safe_cuda_rng_tracker", lambda _: False
    )
    monkeypatch.setattr(
        random_state.tensor_parallel, "convert_cuda_rng_state", lambda one, to_graphable: one
    )
    for init, kept in ((True, [None, own, None]), (False, [own, None, None])):
        random_state.restore(argparse.Namespace(data_parallel_random_init=init), kept)
        assert draw_from_each() == drawn
