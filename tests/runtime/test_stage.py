"""A stage's bookkeeping around its tasks, over models and groups that only remember."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import boundary, grad_sync, steps
from megatron.dpp.core.call import StepCall
from megatron.dpp.core.steps import Stage


class Group:
    """A bucket group that notes the reductions it is asked to start."""

    def __init__(self, is_first_batch: bool) -> None:
        self.is_first_batch, self.is_last_microbatch = is_first_batch, True
        self.grad_reduce_handle: Any = None
        self.params = {torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))}
        self.started: list[bool] = []
        self.counted: list[tuple[Any, bool]] = []

    def start_grad_sync(self, force_all_reduce: bool) -> None:
        self.started.append(force_all_reduce)

    def register_grad_ready(self, param: Any, force_all_reduce: bool) -> None:
        assert self.is_last_microbatch
        self.counted.append((param, force_all_reduce))


class Chunk(torch.nn.Module):
    """One model chunk with two bucket groups, one of them of experts."""

    def __init__(self, config: Any, instances: int = 1, first: bool = True) -> None:
        super().__init__()
        self.config, self.model_type = config, 1
        self.force_all_reduce = False
        self.ddp_config = SimpleNamespace(
            num_distributed_optimizer_instances=instances, overlap_grad_reduce=True
        )
        self.bucket_groups = [Group(first)]
        self.expert_parallel_bucket_groups = [Group(first)]

    def started(self) -> list[list[bool]]:
        groups = self.bucket_groups + self.expert_parallel_bucket_groups
        return [group.started for group in groups]


def config_with(**settings: Any) -> Any:
    given = {
        "grad_sync_func": None, "param_sync_func": None, "timers": None,
        "num_microbatches_with_partial_activation_checkpoints": None,
        "finalize_model_grads_func": lambda *_, **given: None, "no_sync_func": None,
        "calculate_per_token_loss": False,
        "fine_grained_activation_offloading": False, "cpu_offloading": False,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **settings})


def stage_of(
    chunks: list[Chunk], window: int = 1, weight_gradients: Any = None, **call: Any
) -> Stage:
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 4))
    checked = StepCall.checked(
        data_iterator=[None] * len(chunks), model=chunks, pg_collection=groups,
        forward_step_func=None, seq_length=8, micro_batch_size=1,
        **{"num_microbatches": 1, **call},
    )  # fmt: skip
    return Stage(checked, 0, 1, window, weight_gradients)


def forwards(monkeypatch: pytest.MonkeyPatch, output: Any, num_tokens: int = 0) -> list[Any]:
    """Make each forward return this output; the list gets the keywords of each."""
    seen: list[dict[str, Any]] = []

    def forward(*_: Any, **more: Any) -> Any:
        seen.append(more)
        return output, num_tokens

    monkeypatch.setattr(steps.schedules, "forward_step", forward)
    return seen


def frees(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """The outputs that are freed, each with the config's word."""
    freed: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        steps.schedules, "deallocate_output_tensor", lambda *given: freed.append(given)
    )
    return freed


class Timers:
    """Notes the timers that are started and stopped."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.given: list[dict[str, Any]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        def start(**given: Any) -> None:
            self.given.append(given)
            self.told.append(f"start {name}")

        return SimpleNamespace(start=start, stop=lambda: self.told.append(f"stop {name}"))


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_sync, "DistributedDataParallel", Chunk)


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize(("per_token", "offloads"), [(True, False), (False, True)])
def test_a_step_ends_as_the_call_and_its_config_ask(
    monkeypatch: pytest.MonkeyPatch, per_token: bool, offloads: bool, forward_only: bool
) -> None:
    """Gradients are finalised, and offloaded activations forgotten."""
    got: list[tuple[Any, ...]] = []

    def finalize(model: Any, num_tokens: Any, pg_collection: Any, force_all_reduce: bool) -> None:
        tokens = None if num_tokens is None else int(num_tokens)
        got.append((model, tokens, pg_collection, force_all_reduce))

    config = config_with(finalize_model_grads_func=finalize, calculate_per_token_loss=per_token)
    resets: list[tuple[Any, bool]] = []
    monkeypatch.setattr(
        steps.compat, "reset_offload",
        lambda groups, *, forward_only: resets.append((groups, forward_only)),
    )  # fmt: skip
    config.fine_grained_activation_offloading = offloads
    stage = stage_of([Chunk(config)], force_all_reduce=True, forward_only=forward_only)
    forwards(monkeypatch, torch.zeros(1), 3)
    for microbatch in range(2):
        stage.forward(0, microbatch, None)
    stage.finish()
    call = stage.call
    expected = (call.model, 6 if per_token else None, call.pg_collection, True)
    assert got == ([] if forward_only else [expected])
    assert resets == [(call.pg_collection, forward_only)] * offloads


def test_as_many_forwards_as_asked_keep_their_activations_of_each_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = forwards(monkeypatch, torch.zeros(1))
    config = config_with(num_microbatches_with_partial_activation_checkpoints=2)
    stage = stage_of([Chunk(config)], window=3)
    for number in range(7):
        stage.forward(0, number, None)
    stage_of([Chunk(config_with())]).forward(0, 0, None)
    told = [each["checkpoint_activations_microbatch"] for each in seen]
    assert told == [False, False, True, False, False, True, False, None]


def test_parameters_are_gathered_one_chunk_ahead_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards(monkeypatch, torch.zeros(1))
    gathered: list[int] = []
    functions = [lambda _, chunk=chunk: gathered.append(chunk) for chunk in range(3)]
    config = config_with(param_sync_func=functions)
    stage = stage_of([Chunk(config) for _ in range(3)])
    for chunk, expected in ((0, [0, 1]), (0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2])):
        stage.forward(chunk, 0, None)
        assert gathered == expected
    gathered.clear()
    stage_of([Chunk(config)], forward_only=True).forward(0, 0, None)
    assert not gathered


class Linear(Chunk):
    """A chunk that computes something, on its input."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = torch.nn.Linear(4, 4, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(value)
        return hidden * hidden


class Store:
    """Weight gradients whose deferred bytes grow by 10 with a backward of microbatch 0, and by 30
    with any other.
    """

    def __init__(self) -> None:
        self.held_bytes = 7

    @contextlib.contextmanager
    def collect(self, chunk: int, microbatch: int) -> Iterator[None]:
        yield
        self.held_bytes += 30 if microbatch else 10


def test_memory_is_measured_of_each_chunks_first_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward's deferred bytes are the growth of all deferred bytes."""
    counted: list[torch.nn.Module] = []

    def count(outputs: Any, model: torch.nn.Module, apart: Any) -> int:
        counted.append(model)
        return 100 * len(counted)

    monkeypatch.setattr(steps, "saved_bytes", count)
    monkeypatch.setattr(
        steps.schedules, "forward_step", lambda f, i, model, m, given, *_, **__: (model(given), 0)
    )
    monkeypatch.setattr(steps.boundary, "backward", lambda *_: None)
    chunks = [Linear(config_with()), Linear(config_with())]
    freed = frees(monkeypatch)
    stage = stage_of(chunks, weight_gradients=Store())  # type: ignore[arg-type]
    stage.forward(0, 0, torch.ones(2, 4))
    stage.backward(0, 0, None)
    assert not stage.activation_bytes and not stage.deferred_bytes
    stage.measure()
    for microbatch in range(2):
        for chunk in range(2):
            stage.forward(chunk, microbatch, torch.ones(2, 4))
    for microbatch in range(2):
        for chunk in (1, 0):
            stage.backward(chunk, microbatch, None)
    assert stage.activation_bytes == {0: 100, 1: 200} and counted == chunks
    assert stage.deferred_bytes == {0: 10, 1: 10}
    for microbatch in range(2):
        stage.free_output(0, microbatch)
    assert not freed, "every activation was given back"


@pytest.mark.parametrize("name", [None, "cpu_offloading", "fine_grained_activation_offloading"])
def test_offloaded_activations_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    forwards(monkeypatch, torch.zeros(1))
    monkeypatch.setattr(steps, "saved_bytes", lambda *_: 100)
    stage = stage_of([Chunk(config_with(**{name: True} if name else {}))])
    stage.measure()
    stage.forward(0, 0, None)
    assert stage.activation_bytes == ({} if name else {0: 100})


@pytest.mark.parametrize("barrier", [True, False])
def test_a_step_and_its_weight_gradients_have_timers(barrier: bool) -> None:
    """That of a step begins at a barrier where the config asks for it."""
    timers, run = Timers(), []
    config = config_with(
        timers=timers, barrier_with_L1_time=barrier, finalize_model_grads_func=None
    )
    store = SimpleNamespace(run=lambda *task: run.append((task, *timers.told[1:])))
    stage = stage_of([Chunk(config)], weight_gradients=store)
    stage.open()
    stage.weight(0, 3, 1)
    assert stage.finish() is stage.forward_data_store
    assert run == [((0, 3, 1), "start weight-compute")]
    assert timers.told == [
        "start forward-backward", "start weight-compute", "stop weight-compute",
        "stop forward-backward",
    ]  # fmt: skip
    assert timers.given == [{"barrier": barrier}, {}]


@pytest.mark.parametrize("deallocate", [True, False])
def test_only_an_output_of_one_tensor_is_freed_and_as_the_config_says(
    monkeypatch: pytest.MonkeyPatch, deallocate: bool
) -> None:
    freed, one = frees(monkeypatch), torch.zeros(2)
    stage = stage_of([Chunk(config_with(deallocate_pipeline_outputs=deallocate))])
    for microbatch, output in ((1, one), (2, (one, one))):
        forwards(monkeypatch, output)
        stage.forward(0, microbatch, None)
    for microbatch in range(3):  # an evaluation keeps nothing
        stage.free_output(0, microbatch)
    assert len(freed) == 1 and freed[0][0] is one and freed[0][1] is deallocate


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_stage_keeps_its_inputs_for_its_backward_alone(
    monkeypatch: pytest.MonkeyPatch, several: bool, forward_only: bool
) -> None:
    received: Any = [torch.zeros(2), torch.zeros(2)] if several else torch.zeros(2)
    seen = forwards(monkeypatch, [tuple(received)] if several else received)
    config = config_with()
    stage = stage_of([Chunk(config), Chunk(config)], forward_only=forward_only)
    output = stage.forward(1, 0, received)
    tensors = received if several else [received]
    assert all(tensor.requires_grad is not forward_only for tensor in tensors)
    assert isinstance(output, list) == several
    assert seen[0]["vp_stage"] == 1 and seen[0]["is_last_stage"] is True
    assert seen[0]["is_first_microbatch"] is True and seen[0]["cp_group_size"] == 4
    stage.forward(0, 2, received)
    assert seen[1]["vp_stage"] == 0 and seen[1]["is_last_stage"] is False
    assert seen[1]["is_first_microbatch"] is False and seen[1]["current_microbatch"] == 2
    monkeypatch.setattr(steps.boundary, "backward", lambda given, *_: given)
    for task in ((1, 0), (0, 2)):
        if not forward_only:
            assert stage.backward(*task, None) is received
        with pytest.raises(KeyError):
            stage.backward(*task, None)


@pytest.mark.parametrize("asked", [True, False])
def test_a_forward_collects_what_the_call_asks(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Whatever a model returns is no loss then; only an evaluation's first step is a first one."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        steps.schedules, "forward_step", lambda *_, **more: seen.append(more) or (torch.zeros(1), 0)
    )
    stage = stage_of(
        [Chunk(config_with())], collect_non_loss_data=asked, first_val_step=asked, forward_only=True
    )
    stage.forward(0, 0, None)
    assert seen[0]["collect_non_loss_data"] is seen[0]["is_first_microbatch"] is asked
    assert seen[0]["vp_stage"] is None, "a single chunk has no number"


# Backwards of stages with several inputs or outputs, by megatron-core's own function

ONES = torch.ones(2)


def full(value: float, *, trained: bool = True) -> torch.Tensor:
    return torch.full((2,), value, requires_grad=trained)


def ids() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int)


BACKWARDS: list[tuple[Any, Any, Any, Any]] = [
    # inputs, outputs of them, gradients of these, gradients of the inputs (None: an empty one)
    ((1.0, 2.0, 3.0), lambda a, b, c: [a * b, a + 0, torch.ones(1)],
     [ONES, torch.empty(0), torch.ones(1)], [2.0, 1.0, None]),
    ((3.0, None), lambda a, _: 2 * a, ONES, [2.0, None]),
    ((None, 3.0, 5.0), lambda _, a, b: a * b, ONES, [None, 5.0, 3.0]),
    (3.0, lambda a: [2 * a, 3 * a], [ONES, ONES], 5.0),
    (3.0, lambda a: 2 * a, ONES, 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("given", "function", "received", "expected"), BACKWARDS)
def test_each_input_gets_its_gradient_and_an_empty_one_where_there_is_none(
    given: Any, function: Any, received: Any, expected: Any
) -> None:
    several, timers = isinstance(given, tuple), Timers()
    config = SimpleNamespace(timers=timers, grad_scale_func=None, deallocate_pipeline_outputs=False)
    inputs = [ids() if value is None else full(value) for value in (given if several else [given])]
    found = boundary.backward(inputs if several else inputs[0], function(*inputs), received, config)
    assert isinstance(found, list) is several
    pairs = zip(boundary.as_list(found), expected if several else [expected], strict=True)
    for gradient, value in pairs:
        assert gradient.tolist() == ([] if value is None else [value] * 2)
    assert timers.told == ["start backward-compute", "stop backward-compute"]


def test_outputs_of_the_data_alone_have_gradients_of_no_input() -> None:
    weight = full(3.0)
    config = SimpleNamespace(timers=None, grad_scale_func=None, deallocate_pipeline_outputs=False)
    outputs = [2 * weight, weight * weight]
    assert boundary.backward(None, outputs, [ONES] * 2, config) is None
    assert weight.grad is not None and weight.grad.tolist() == [8.0, 8.0]


def test_integers_want_no_gradient() -> None:
    floats, numbers = full(0.0, trained=False), ids()
    boundary.want_gradients([floats, numbers])
    assert floats.requires_grad and not numbers.requires_grad
