"""The state of an optimizer that has not stepped yet, or whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.dpp.mcore.training import first_state
from megatron.dpp.mcore.training.fsdp import as_shards

MOMENTS = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}


def of(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """megatron-core's optimizer around PyTorch's."""
    inner = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **options)  # type: ignore[call-arg]
    return SimpleNamespace(optimizer=inner, init_state_fn=None)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("state", "added"),
    [
        ({0: MOMENTS}, True),
        ({}, False),
        ({0: MOMENTS | {"step": torch.tensor(3.0)}}, False),
        ({0: MOMENTS, "common_step": torch.tensor(3.0)}, False),
    ],
)
def test_a_count_of_steps_that_was_not_saved_is_none(
    state: dict[Any, Any], added: bool, inside: bool
) -> None:
    """All steps were skipped; with any other count the next step would correct its bias wrongly."""
    state = dict(state)
    before = dict(state)
    loaded = {"state": state}
    first_state.add_steps(of(torch.optim.AdamW), {"optimizer": loaded} if inside else loaded)
    if added:
        assert state.pop("common_step").item() == 0.0
    assert state == before


def test_each_of_several_optimizers_gets_its_own_count() -> None:
    optimizers = [of(torch.optim.Adam), of(torch.optim.SGD), of(torch.optim.Adam)]
    loaded: list[dict[str, Any]] = [{"state": {0: dict(MOMENTS)}} for _ in optimizers]
    loaded[2]["state"]["common_step"] = 5
    first_state.add_steps(SimpleNamespace(chained_optimizers=optimizers), loaded_by_number(loaded))
    assert [each["state"].get("common_step") for each in loaded] == [0.0, None, 5]


def loaded_by_number(states: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return dict(enumerate(states))


def test_a_distributed_optimizer_keeps_its_count_elsewhere() -> None:
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.optimizer = of(torch.optim.Adam).optimizer
    loaded = {"state": {0: dict(MOMENTS)}}
    first_state.add_steps(optimizer, loaded)
    assert set(loaded["state"]) == {0}


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (lambda: of(torch.optim.Adam), {"step", "exp_avg", "exp_avg_sq"}),
        (lambda: of(torch.optim.SGD, momentum=0.9), {"momentum_buffer"}),
        (lambda: of(torch.optim.SGD), None),
    ],
)
def test_an_optimizer_has_its_first_state_while_it_is_saved(
    made: Any, names: set[str] | None
) -> None:
    optimizer = made()
    inner = optimizer.optimizer
    with first_state.begun(optimizer):
        states = list(inner.state.values())
        assert [set(state) for state in states] == ([] if names is None else [names])
        assert all(not value.any() for state in states for value in state.values())
    assert not inner.state
    (parameter,) = inner.param_groups[0]["params"]
    parameter.grad = torch.ones(3)
    inner.step()
    stepped = dict(inner.state.get(parameter, {}).items())
    with first_state.begun(optimizer):
        assert dict(inner.state.get(parameter, {})) == stepped
    assert dict(inner.state.get(parameter, {})) == stepped, "it has stepped"


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One rank over which parameters are sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_loaded_shards_are_placed_as_their_own_parameters(mesh: Any) -> None:
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh)) for shape in ((2, 3), (5,))
    ]
    inner = SimpleNamespace(
        param_groups=[{"params": [each]} for each in parameters],
        fp32_from_float16_groups=[parameters],
    )
    shapes = ((2, 3), (5,))
    state: dict[str, Any] = {
        "optimizer": {"state": {
            index: {"exp_avg": torch.full(shape, float(index)), "step": torch.tensor(4.0)}
            for index, shape in enumerate(shapes)
        } | {"common_step": 4}},
        "fp32_from_fp16_params": [[torch.zeros(shape) for shape in shapes]],
    }  # fmt: skip
    assert as_shards(SimpleNamespace(chained_optimizers=[inner]), state) is state
    kept = state["optimizer"]["state"]
    for index, (main, shape) in enumerate(
        zip(state["fp32_from_fp16_params"][0], shapes, strict=True)
    ):
        average = kept[index]["exp_avg"]
        assert isinstance(average, DTensor) and isinstance(main, DTensor)
        assert average.shape == main.shape == shape
        assert average.placements == parameters[index].placements  # type: ignore[attr-defined]
        assert torch.equal(average.to_local(), torch.full(shape, float(index)))
        assert not isinstance(kept[index]["step"], DTensor), "a number has no shards"
    assert kept["common_step"] == 4
