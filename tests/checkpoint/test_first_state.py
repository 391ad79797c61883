"""The state of an optimizer that has not stepped yet, or whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.dpp_train.checkpoint import first_state
from megatron.dpp_train.model import fsdp
from megatron.dpp_train.model.fsdp import as_shards
from megatron.dpp_train.optimizer.optimizer import fill_state, own_steps, steps_may_lack

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


@pytest.mark.parametrize("own", ["fused", "capturable", None])
def test_a_count_of_steps_lies_where_the_kernel_reads_it(own: str | None) -> None:
    """PyTorch refuses a count on the host there, and waits for one on the device elsewhere."""
    inner = torch.optim.Adam([torch.nn.Parameter(torch.ones(3, device="meta"))], lr=0.1)
    if own is not None:
        inner.param_groups[0][own] = True
    with first_state.begun(SimpleNamespace(optimizer=inner)):
        ((_, state),) = inner.state.items()
        assert state["step"].device.type == ("cpu" if own is None else "meta")
        assert state["exp_avg"].device.type == "meta"


def test_each_sgd_learns_to_make_its_own_state_and_adam_keeps_its_way() -> None:
    sgds, adam = [of(torch.optim.SGD, momentum=0.9) for _ in range(2)], of(torch.optim.Adam)
    adam.init_state_fn = len
    first_state.teach_sgd(SimpleNamespace(chained_optimizers=[*sgds, adam]))
    assert adam.init_state_fn is len
    for sgd in sgds:
        assert not sgd.optimizer.state
        sgd.init_state_fn(sgd.optimizer, None)
        assert [set(state) for state in sgd.optimizer.state.values()] == [{"momentum_buffer"}]


def distributed(*, stub: bool = False, stepped: bool = False) -> Any:
    """megatron-core's distributed optimizer around PyTorch's Adam, of which some has stepped."""
    made = object.__new__(DistributedOptimizer)
    made.optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3)) for _ in range(2)], lr=0.1)
    made.is_stub_optimizer = stub
    if stepped:
        step = torch.tensor(1.0)
        for parameter in made.optimizer.param_groups[0]["params"]:
            made.optimizer.state[parameter] = {"step": step}
    return made


def test_only_a_distributed_optimizer_without_state_is_filled() -> None:
    """Zeros would overwrite the moments of one that has stepped; a stub has no parameters."""
    filled: list[int] = []
    given = [of(torch.optim.Adam), distributed(stub=True), distributed(stepped=True), distributed()]
    for number, each in enumerate(given):
        each._init_optimizer_states_with_dummy_values = lambda number=number: filled.append(number)
    fill_state(SimpleNamespace(chained_optimizers=given))
    assert filled == [3]
    fill_state(given[3])
    assert filled == [3, 3]


def test_what_a_checkpoint_has_replaces_a_parameters_state_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put: list[Any] = []
    kept = {"param": 1, "step": 2}

    def own(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        put.append((model_param, tensors))

    patch = monkeypatch.setattr
    patch(DistributedOptimizer, "_set_main_param_and_optimizer_states", own)
    patch(DistributedOptimizer, "_get_main_param_and_optimizer_states", lambda *_: kept)
    optimizer = distributed()
    with steps_may_lack():
        optimizer._set_main_param_and_optimizer_states("p", {"param": 5, "exp_avg": 6})
    optimizer._set_main_param_and_optimizer_states("p", {"param": 7})
    assert put == [("p", {"param": 5, "exp_avg": 6, "step": 2}), ("p", {"param": 7})]


def test_every_parameter_gets_the_loaded_count_of_steps_in_a_tensor_of_its_own() -> None:
    resumed, older, stub = distributed(stepped=True), distributed(stepped=True), distributed()
    resumed.optimizer.param_groups[0]["step"] = 7
    stub.is_stub_optimizer, stub.optimizer = True, None
    own_steps(SimpleNamespace(chained_optimizers=[stub, of(torch.optim.Adam), resumed, older]))
    first, second = (state["step"] for state in resumed.optimizer.state.values())
    assert first.item() == second.item() == 7.0 and first is not second
    assert first.data_ptr() != second.data_ptr() and first.dtype == torch.float32
    assert all(state["step"].item() == 1.0 for state in older.optimizer.state.values())


@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_layers_are_units_of_their_own_and_are_freed_as_asked(
    reshard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        fsdp.TorchFullyShardedDataParallel, "__init__",
        lambda _, *rest, **more: given.append((rest, more)),
    )  # fmt: skip
    fsdp.fully_sharded("config", "chunk", reshard_after_forward=reshard)  # type: ignore[arg-type]
    (((config, settings, chunk), more),) = given
    assert (config, chunk, more) == ("config", "chunk", {"sub_modules_to_wrap": {TransformerLayer}})
    assert settings.reshard_after_forward is reshard


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One rank over which parameters are sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_loaded_shards_are_placed_as_their_own_parameters(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the parameter's whole shape: the last rank's shard may be shorter."""
    given: list[dict[str, Any]] = []
    local = DTensor.from_local
    monkeypatch.setattr(
        DTensor, "from_local", lambda *of, **options: given.append(options) or local(*of, **options)
    )
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
    assert {tuple(each["shape"]) for each in given} == set(shapes)
    assert {each["stride"] for each in given} == {(3, 1), (1,)}
    assert not any(each["run_check"] for each in given)


def test_a_parameters_shard_is_one_object_while_its_state_is_sharded(mesh: Any) -> None:
    parameter, plain = torch.nn.Parameter(distribute_tensor(torch.ones(2), mesh)), torch.ones(2)
    with fsdp.shards_keep_identity():
        shards = [optimizer.to_local_if_dtensor(each) for each in (parameter, parameter, plain)]
    assert shards[0] is shards[1] and not isinstance(shards[0], DTensor)
    assert shards[2] is plain
