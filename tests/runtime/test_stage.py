"""A stage's bookkeeping around its tasks, over models and groups that only remember."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core import boundary, grad_sync, steps
from megatron.dpp.core.steps import Stage, StepCall
from megatron.dpp.errors import ConfigError


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


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_sync, "DistributedDataParallel", Chunk)


def test_complete_chunks_start_their_own_reductions_in_one_order() -> None:
    chunks = [Chunk(config_with()), Chunk(config_with())]
    stage = stage_of(chunks)
    with pytest.raises(AssertionError, match="chunk 0 is complete before chunk 1"):
        stage.chunk_complete(0)
    stage.chunk_complete(1)
    assert [chunk.started() for chunk in chunks] == [[[], []], [[False], [False]]]
    with pytest.raises(AssertionError, match="chunk 1 is complete before chunk 2"):
        stage.chunk_complete(1)
    stage.chunk_complete(0)
    assert [chunk.started() for chunk in chunks] == [[[False], [False]]] * 2


@pytest.mark.parametrize(("by_call", "by_model"), [(True, False), (False, True), (False, False)])
def test_either_the_call_or_the_model_asks_for_reductions_everywhere(
    by_call: bool, by_model: bool
) -> None:
    chunk = Chunk(config_with())
    chunk.force_all_reduce = by_model
    stage_of([chunk], force_all_reduce=by_call).chunk_complete(0)
    assert chunk.started() == [[by_call or by_model]] * 2


def test_between_instances_the_first_step_is_reduced_at_the_end_alone() -> None:
    first, later = (Chunk(config_with(), instances=2, first=first) for first in (True, False))
    for chunk in (first, later):
        stage_of([chunk]).chunk_complete(0)
    assert first.started() == [[], []]
    assert later.started() == [[False], [False]]


@pytest.mark.parametrize("listed", [True, False])
def test_a_users_own_reduction_takes_the_place_of_ours(listed: bool) -> None:
    given: list[str] = []
    sync: Any = [lambda _: given.append("0"), lambda _: given.append("1")]
    config = config_with(grad_sync_func=sync if listed else sync[0])
    chunks = [Chunk(config), Chunk(config)]
    stage = stage_of(chunks)
    for chunk in (1, 0):
        stage.chunk_complete(chunk)
    assert given == (["1", "0"] if listed else ["0", "0"])
    assert [chunk.started() for chunk in chunks] == [[[], []]] * 2


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_gradients_are_finalized_with_what_the_call_asks(
    monkeypatch: pytest.MonkeyPatch, per_token: bool, forward_only: bool
) -> None:
    got: list[tuple[Any, ...]] = []

    def finalize(model: Any, num_tokens: Any, pg_collection: Any, force_all_reduce: bool) -> None:
        tokens = None if num_tokens is None else int(num_tokens)
        got.append((model, tokens, pg_collection, force_all_reduce))

    config = config_with(finalize_model_grads_func=finalize, calculate_per_token_loss=per_token)
    stage = stage_of([Chunk(config)], force_all_reduce=True, forward_only=forward_only)
    forwards(monkeypatch, torch.zeros(1), 3)
    for microbatch in range(2):
        stage.forward(0, microbatch, None)
    stage.finish()
    call = stage.call
    expected = (call.model, 6 if per_token else None, call.pg_collection, True)
    assert got == ([] if forward_only else [expected])


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("offloads", [True, False])
def test_offloaded_activations_are_forgotten_at_the_end_of_a_step(
    offloads: bool, forward_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, bool]] = []

    def reset(groups: Any, *, forward_only: bool) -> None:
        told.append((groups, forward_only))

    monkeypatch.setattr(steps.compat, "reset_offload", reset)
    config = config_with(fine_grained_activation_offloading=offloads)
    stage = stage_of([Chunk(config)], forward_only=forward_only)
    stage.finish()
    assert told == [(stage.call.pg_collection, forward_only)] * offloads


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


class Timers:
    """Notes the timers that are started and stopped."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        told = self.told.append
        return SimpleNamespace(
            start=lambda **_: told(f"start {name}"), stop=lambda: told(f"stop {name}")
        )


def test_weight_gradients_have_a_timer_of_their_own() -> None:
    timers, run = Timers(), []
    store = SimpleNamespace(run=lambda *task: run.append((task, *timers.told)))
    stage = stage_of([Chunk(config_with(timers=timers))], weight_gradients=store)
    stage.weight(0, 3, 1)
    assert run == [((0, 3, 1), "start weight-compute")]
    assert timers.told == ["start weight-compute", "stop weight-compute"]


@pytest.mark.parametrize("given", ["list", "one", "none"])
def test_a_stage_holds_reductions_back_from_its_beginning_to_its_end(given: str) -> None:
    """Within the functions of the config, if there are any, and without them."""
    told: list[str] = []

    @contextlib.contextmanager
    def held(name: str) -> Iterator[None]:
        told.append(f"hold {name}")
        yield
        told.append(f"free {name}")

    names = {"list": ["0", "1"], "one": ["all"], "none": []}[given]
    each: list[Any] = [functools.partial(held, name) for name in names]
    functions: Any = {"list": each, "none": None}.get(given, each[:1] and each[0])
    timers = Timers()
    config = config_with(no_sync_func=functions, timers=timers, barrier_with_L1_time=True)
    config.finalize_model_grads_func = None
    chunks: list[Any] = [Chunk(config), Chunk(config)]
    stage = stage_of(chunks)
    stage.open()
    assert told[2 * len(names) :] == [f"hold {name}" for name in names], "after a trial of them"
    groups = [g for c in chunks for g in c.bucket_groups + c.expert_parallel_bucket_groups]
    assert not any(group.is_last_microbatch for group in groups)
    told.clear()
    assert stage.finish() is stage.forward_data_store
    assert told == [f"free {name}" for name in reversed(names)]
    assert all(group.is_last_microbatch for group in groups)
    assert timers.told == ["start forward-backward", "stop forward-backward"]


@pytest.mark.parametrize("barrier", [True, False])
def test_the_timer_of_a_step_begins_at_a_barrier_where_the_config_asks(barrier: bool) -> None:
    started: list[dict[str, Any]] = []

    def timers(name: str, log_level: int) -> Any:
        return SimpleNamespace(start=lambda **given: started.append(given))

    config = config_with(timers=timers, barrier_with_L1_time=barrier, no_sync_func=[])
    stage_of([Chunk(config)]).open()
    assert started == [{"barrier": barrier}]


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


def test_only_the_last_chunk_of_the_last_rank_computes_the_loss() -> None:
    call = stage_of([Chunk(config_with()), Chunk(config_with())]).call
    stages = [Stage(call, rank, 2, 1, None) for rank in range(2)]
    last = [[stage.is_last(chunk) for chunk in range(2)] for stage in stages]
    assert last == [[False, False], [False, True]]


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


class TestBoundaryBackward:
    """Backwards of stages with several inputs or outputs, by megatron-core's own function."""

    def config(self, timers: Any = None) -> Any:
        return SimpleNamespace(
            timers=timers, grad_scale_func=None, deallocate_pipeline_outputs=False
        )

    def test_each_input_gets_its_gradient_and_an_empty_one_where_there_is_none(self) -> None:
        a, b, c = (torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
        outputs = [a * b, a + 0, torch.ones(1)]
        timers = Timers()
        grads = boundary.backward(
            [a, b, c], outputs, [torch.ones(2), torch.empty(0), torch.ones(1)],
            self.config(timers),
        )  # fmt: skip
        assert isinstance(grads, list)
        assert torch.equal(grads[0], b.detach()) and torch.equal(grads[1], a.detach())
        assert grads[2].numel() == 0
        assert timers.told == ["start backward-compute", "stop backward-compute"]

    def test_one_output_of_several_inputs(self) -> None:
        a, ids = torch.full((2,), 3.0, requires_grad=True), torch.zeros(2, dtype=torch.int)
        grads = boundary.backward([a, ids], 2 * a, torch.ones(2), self.config())
        assert isinstance(grads, list)
        assert grads[0].tolist() == [2.0, 2.0] and grads[1].numel() == 0
        b = torch.full((2,), 5.0, requires_grad=True)
        grads = boundary.backward(
            [ids, a.detach().requires_grad_(), b], a * b, torch.ones(2), self.config()
        )
        assert isinstance(grads, list)
        assert grads[0].numel() == 0 and grads[2].tolist() == [3.0, 3.0]

    def test_several_outputs_of_one_input_and_of_the_data(self) -> None:
        a = torch.full((2,), 3.0, requires_grad=True)
        grad = boundary.backward(a, [2 * a, 3 * a], [torch.ones(2)] * 2, self.config())
        assert isinstance(grad, torch.Tensor) and grad.tolist() == [5.0, 5.0]
        weight = torch.full((2,), 3.0, requires_grad=True)
        outputs = [2 * weight, weight * weight]
        assert boundary.backward(None, outputs, [torch.ones(2)] * 2, self.config()) is None
        assert weight.grad is not None and weight.grad.tolist() == [8.0, 8.0]

    def test_one_input_and_one_output(self) -> None:
        a = torch.full((2,), 3.0, requires_grad=True)
        grad = boundary.backward(a, 2 * a, torch.ones(2), self.config())
        assert isinstance(grad, torch.Tensor) and grad.tolist() == [2.0, 2.0]

    def test_links_hold_the_largest_tensor_of_a_boundary(self) -> None:
        opened = boundary.Boundaries(8, (8, 64), (32, 16))
        assert opened.several and not boundary.Boundaries(8, (8,), (8,)).several
        assert boundary.Boundaries(8, (8, 8), (8,)).several
        assert boundary.Boundaries(8, (8,), (8, 8)).several
        opened.check_fits(opened)
        boundary.Boundaries(8, (64, 8), (16, 32)).check_fits(opened)
        for receives, sends, said in (
            ((8, 65), (32, 16), "receive 2 tensors of up to 65 bytes"),
            ((8, 64), (8, 33), "send 2 tensors of up to 33 bytes"),
            ((8,), (32, 16), "receive 1 tensors"),
        ):
            with pytest.raises(ConfigError, match=said):
                boundary.Boundaries(8, receives, sends).check_fits(opened)

    def test_integers_want_no_gradient(self) -> None:
        floats, ids = torch.zeros(2), torch.zeros(2, dtype=torch.int)
        boundary.want_gradients([floats, ids])
        assert floats.requires_grad and not ids.requires_grad
