"""The training loop over parts that only remember: counts, the order of a step, evaluation."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DppError
from megatron.dpp_train.loop import loop
from megatron.dpp_train.loop.logs import StepResult
from megatron.dpp_train.loop.loop import Trainer

Told = list[Any]
"""What the parts were asked to do, in order."""


class Chunk:
    """A model chunk that notes its calls by name and number."""

    def __init__(self, number: int, told: Told) -> None:
        self._number, self._told = number, told

    def __getattr__(self, name: str) -> Any:
        def note(**options: Any) -> None:
            self._told.append((name, self._number, *options.values()))

        return note


class Ramp:
    """megatron-core's calculator: 2 microbatches until 12 samples are consumed, then 3."""

    def __init__(self) -> None:
        self.count = 2

    def get_num_microbatches(self) -> int:
        return self.count

    def update_num_microbatches(self, consumed: int, **_: Any) -> None:
        self.count = 2 if consumed < 12 else 3


class Timers:
    """Notes starts and stops."""

    def __init__(self) -> None:
        self.running = 0

    def __call__(self, _: str, **__: Any) -> Any:
        return self

    def start(self, **_: Any) -> None:
        self.running += 1

    def stop(self) -> None:
        self.running -= 1


class GroupOf:
    """A process group of some ranks."""

    def __init__(self, ranks: int) -> None:
        self.size = lambda: ranks


ARGS = {
    "micro_batch_size": 2, "data_parallel_size": 1, "global_batch_size": 6, "train_iters": 5,
    "seq_length": 8, "decoder_seq_length": None, "variable_lengths": False, "save": None,
    "save_interval": None, "eval_interval": None, "manual_gc": False, "manual_gc_eval": False,
    "manual_gc_interval": 0, "iterations_to_skip": None, "use_dpp": True, "metrics_file": None,
    "check_weight_hash_across_dp_replicas_interval": None, "use_distributed_optimizer": False,
    "overlap_param_gather": False, "overlap_grad_reduce": False, "align_grad_reduce": True,
    "align_param_gather": True, "num_distributed_optimizer_instances": 1, "bf16": False,
    "empty_unused_memory_level": 0, "device": "cpu", "barrier_with_L1_time": True,
    "log_num_zeros_in_grad": False, "log_params_norm": False, "packing_budget": 0,
    "dpp_activation_cap": "1.0", "trace": False, "slice_tokens": None,
}  # fmt: skip


def trainer(told: Told, *, num_chunks: int = 2, plans: Any = None, **changes: Any) -> Trainer:
    """A trainer whose schedule, optimizer, scheduler and checkpointer note what they are given."""
    args = argparse.Namespace(**ARGS | changes)
    chunks = [Chunk(number, told) for number in range(num_chunks)]

    @contextlib.contextmanager
    def around(*_: Any, **__: Any) -> Iterator[None]:
        yield

    run: Any = SimpleNamespace(
        args=args, iteration=0, consumed_train_samples=0, skipped_train_samples=0,
        consumed_valid_samples=0, flops_so_far=0.0, timers=Timers(), timed=around, is_last=True,
        say=lambda text: None, rank=0, steps=[],
        recorder=SimpleNamespace(
            begin_iteration=lambda number: None, end_iteration=lambda: None, span=around
        ),
    )  # fmt: skip
    optimizer: Any = SimpleNamespace(
        zero_grad=lambda: told.append("zero_grad"),
        step=lambda: told.append("update") or (True, 1.0, None),
        scale_loss=lambda loss: loss, get_loss_scale=lambda: torch.tensor(1.0),
        param_groups=[{"lr": 0.5, "is_decoupled_lr": True}, {"lr": 0.25}],
    )  # fmt: skip
    config: Any = SimpleNamespace(
        timers=None, param_sync_func=None, grad_sync_func=None, no_sync_func=None
    )
    trainee: Any = SimpleNamespace(
        chunks=chunks, config=config, optimizer=optimizer,
        scheduler=SimpleNamespace(step=lambda increment: told.append(("rate", increment))),
    )  # fmt: skip

    def schedule(**given: Any) -> list[Any]:
        iterators = given["data_iterator"]
        first = iterators[0] if isinstance(iterators, list) else iterators
        rows = [next(first) for _ in range(given["num_microbatches"])] if first else []
        told.append(("run", given["forward_only"], rows))
        return []

    checkpointer: Any = SimpleNamespace(
        poll=lambda: None, last_saved=None,
        save=lambda: told.append(("save", run.iteration)) or setattr(
            checkpointer, "last_saved", run.iteration
        ),
    )  # fmt: skip
    nothing: Any = SimpleNamespace(
        before_step=lambda: None, after_step=lambda step: None, write=lambda **values: None,
        memory=contextlib.nullcontext, after_iteration=lambda *given: None,
    )  # fmt: skip
    iterators: Any = SimpleNamespace(
        train=[iter(range(100)), None], valid=None, plans=plans, eval_iters=2, has_valid=True
    )
    return Trainer(
        run=run, trainee=trainee, forward_step=lambda *_: None, schedule=schedule,
        iterators=iterators, writers=nothing, metrics=nothing, checkpointer=checkpointer,
        exits=SimpleNamespace(reason=lambda iteration: None),  # type: ignore[arg-type]
        comparison=nothing, diagnostics=nothing,
    )  # fmt: skip


def step(made: Trainer) -> StepResult:
    """The result of one iteration."""
    run: Any = made.run
    run.args.train_iters = run.iteration + 1
    made.train()
    found: StepResult = run.steps[-1]
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose steps need no collective; its log keeps the results of steps."""
    monkeypatch.setattr(loop, "microbatches", Ramp())
    monkeypatch.setattr(loop, "mean_losses", lambda reduced: {})
    monkeypatch.setattr(loop, "summed_losses", lambda reduced: {})
    monkeypatch.setattr(loop, "gc", SimpleNamespace(collect=lambda: None, disable=lambda: None))
    monkeypatch.setattr(loop, "added_losses", lambda args, count: {})
    monkeypatch.setattr(loop, "check_step", lambda run, checks: None)
    monkeypatch.setattr(loop.mpu, "get_model_parallel_group", lambda: GroupOf(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(loop, "fused_step", lambda optimizer: contextlib.nullcontext())
    monkeypatch.setattr(loop, "flops_of_step", lambda args, step: 0.0)
    monkeypatch.setattr(
        loop, "TrainingLog", lambda run, writers: SimpleNamespace(add=run.steps.append)
    )
    monkeypatch.setattr(loop, "print_evaluation", lambda *given: None)


def test_samples_are_counted_while_the_batch_grows_and_where_one_is_skipped() -> None:
    """Batches of 4, 4, 4 (skipped), 6, 6 samples: the rows of a skipped one are read past."""
    told: Told = []
    made = trainer(told, iterations_to_skip=[2])
    assert made.train()
    rows = [rows for kind, *rest in [t for t in told if t[0] == "run"] for rows in rest[1:]]
    assert rows == [[0, 1], [2, 3], [6, 7, 8], [9, 10, 11]]
    run = made.run
    assert (run.iteration, run.consumed_train_samples, run.skipped_train_samples) == (5, 24, 4)
    assert [size for kind, size in [t for t in told if t[0] == "rate"]] == [4, 4, 6, 6]


def test_operations_of_all_steps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On from those that a checkpoint had."""
    monkeypatch.setattr(loop, "flops_of_step", lambda args, step: 10.0 * step.batch_size)
    made = trainer([])
    made.run.flops_so_far = 7.0
    made.train()
    assert made.run.flops_so_far == 7.0 + 10.0 * (4 + 4 + 4 + 6 + 6)


def test_losses_that_layers_add_are_means_over_the_steps_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "mean_losses", lambda reduced: {"lm loss": 2.0})
    monkeypatch.setattr(loop, "added_losses", lambda args, count: {"balance": 12.0 / count})
    made = trainer([])
    for consumed, expected in ((0, 6.0), (12, 4.0)):
        made.run.consumed_train_samples = consumed
        assert step(made).losses == {"lm loss": 2.0, "balance": expected}


@pytest.mark.parametrize("bf16", [True, False])
def test_the_parameters_norm_is_that_of_the_main_copy_in_bf16(
    bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm(chunks: Any, *, from_main: bool) -> str:
        return f"{len(chunks)} chunks' {'main copy' if from_main else 'own'}"

    monkeypatch.setattr(loop, "parameters_norm", norm)
    given = {"log_params_norm": True, "bf16": bf16, "fp16": not bf16}
    found: Any = step(trainer([], **given)).params_norm
    assert found == ("2 chunks' main copy" if bf16 else "2 chunks' own")
    assert step(trainer([])).params_norm is None


@pytest.mark.parametrize("equal", [True, False])
def test_replicas_are_compared_after_every_so_many_iterations(
    equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compared = trainer([], check_weight_hash_across_dp_replicas_interval=2), list[int]()

    def check(chunks: Any, *, cross_check: bool) -> bool:
        assert chunks is made.trainee.chunks and cross_check
        compared.append(made.run.iteration)
        return equal

    monkeypatch.setattr(loop, "check_param_hashes_across_dp_replicas", check)
    if equal:
        assert made.train()
    else:
        with pytest.raises(DppError, match="parameters differ between data-parallel replicas"):
            made.train()
    assert compared == ([2, 4] if equal else [2])


def test_a_step_clears_all_gradients_first_and_sets_the_rate_last() -> None:
    told: Told = []
    made = step(trainer(told))
    assert told == [
        ("zero_grad_buffer", 0), ("zero_grad_buffer", 1), "zero_grad", ("run", False, [0, 1]),
        "update", ("rate", 4),
    ]  # fmt: skip
    assert (made.batch_size, made.skipped, made.learning_rate) == (4, False, 0.25)


NORM = torch.tensor(2.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ranks", "succeeds", "norm", "expected", "reads"),
    [
        (1, False, None, (True, None, None, 0.25), 0),
        (1, True, NORM, (False, 2.5, None, 0.25), 1),
        (2, True, NORM, (True, 2.5, 7.0, 7.0), 3),
        (2, True, None, (True, 2.0, 7.0, 7.0), 3),
    ],
)
def test_the_ranks_of_a_model_agree_on_the_largest_of_each_value(
    ranks: int, succeeds: bool, norm: Any, expected: tuple[Any, ...], reads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Another rank skipped its step, and has a norm of 2, 7 zeros and a rate of 7. The norm is read
    once, with the other values; a single rank does not read the device. A step that any rank
    skipped moves no rate."""
    read: list[torch.Tensor] = []

    def with_another_rank(whole: torch.Tensor, op: Any, group: Any) -> None:
        read.append(whole)
        assert op == torch.distributed.ReduceOp.MAX
        if group.size() > 1:
            theirs = [1.0, 2.0] if len(whole) == 2 else [7.0]
            whole.copy_(torch.maximum(whole, whole.new_tensor(theirs)))

    monkeypatch.setattr(loop.mpu, "get_model_parallel_group", lambda: GroupOf(ranks))
    monkeypatch.setattr(loop.dist, "all_reduce", with_another_rank)
    told: Told = []
    made = trainer(told, log_num_zeros_in_grad=True)
    optimizer: Any = made.trainee.optimizer
    optimizer.step = lambda: (succeeds, norm, None)
    found = step(made)
    values = (found.skipped, found.grad_norm, found.num_zeros, found.learning_rate)
    assert values == expected and len(read) == reads
    assert (("rate", 4) in told) is not found.skipped
    if ranks > 1:
        assert step(trainer([])).num_zeros is None, "it was not asked for"


def test_the_rate_of_the_log_is_none_of_a_decoupled_group() -> None:
    made = trainer([])
    assert step(made).learning_rate == 0.25
    made.trainee.optimizer.param_groups.pop()
    assert step(made).learning_rate == 0.0


def test_an_evaluation_counts_its_samples_and_leaves_the_model_in_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: Told = []
    made = trainer(told, micro_batch_size=1, data_parallel_size=2, global_batch_size=8)
    config = made.trainee.config
    config.timers = timers = object()
    seen: list[Any] = []
    made.schedule = lambda **given: (
        seen.append((given["num_microbatches"], given["forward_only"], config.timers))
        or [torch.is_grad_enabled()]
    )
    graphs: list[bool] = []
    monkeypatch.setattr(loop, "summed_losses", lambda reduced: graphs.extend(reduced) or {})
    made.evaluate("here", None)
    assert seen == [(4, True, None)] * 2
    assert graphs == [False] * 2 and torch.is_grad_enabled(), "no graph takes memory"
    assert made.run.consumed_valid_samples == 2 * 8
    assert config.timers is timers
    modes = [call for call in told if call[0] in ("train", "eval")]
    assert modes == [("eval", 0), ("eval", 1), ("train", 0), ("train", 1)]


def test_an_evaluations_loss_is_a_mean_over_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = iter([torch.tensor([6.0, 2.0]), torch.tensor([4.0, 8.0])])
    printed: list[dict[str, Any]] = []
    monkeypatch.setattr(loop, "summed_losses", lambda reduced: {"lm loss": next(sums)})
    monkeypatch.setattr(loop, "print_evaluation", lambda *given: printed.append(given[2]))
    trainer([]).evaluate("here", None)
    assert [float(each["lm loss"]) for each in printed] == [1.0]


def test_what_is_due_is_done_after_every_so_many_iterations() -> None:
    told: Told = []
    made = trainer(told, eval_interval=2, save="x", save_interval=3, train_iters=7)
    evaluated: list[int] = []
    made.evaluate = lambda *given: evaluated.append(made.run.iteration)  # type: ignore[method-assign]
    made.train()
    assert evaluated == [2, 4, 6]
    saves = [iteration for kind, iteration in [t for t in told if t[0] == "save"]]
    # Before the batch grows, where due, and at the end.
    assert saves == [3, 3, 6, 7]
    assert made.run.timers.running == 1


@pytest.mark.parametrize(
    ("flags", "collected"),
    [({}, [2, 4]), ({"manual_gc": True}, []), ({"manual_gc": True, "manual_gc_eval": True}, [2, 4]),
     ({"manual_gc": True, "manual_gc_interval": 3}, [3]), ({"manual_gc_interval": 3}, [2, 4])],
)  # fmt: skip
def test_garbage_is_collected_before_evaluations_and_where_it_was_asked_for(
    flags: dict[str, Any], collected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, found, off = trainer([], eval_interval=2, **flags), list[int](), list[bool]()
    collect = SimpleNamespace(
        collect=lambda: found.append(made.run.iteration), disable=lambda: off.append(True)
    )
    monkeypatch.setattr(loop, "gc", collect)
    made.train()
    assert found == collected and off == [True] * bool(flags.get("manual_gc"))


def test_a_checkpoint_of_the_last_iteration_is_written_once() -> None:
    for interval, expected in ((5, [3, 5]), (None, [3, 5])):
        told: Told = []
        trainer(told, save="x", save_interval=interval).train()
        assert [t[1] for t in told if t[0] == "save"] == expected


def test_a_run_without_an_iteration_writes_no_checkpoint() -> None:
    told: Told = []
    assert trainer(told, save="x", train_iters=0).train()
    assert told == []


def test_a_run_that_continues_with_another_batch_size_saves_nothing_before_its_first_step() -> None:
    told: Told = []
    made = trainer(told, save="x", train_iters=1)
    made.run.consumed_train_samples = 12
    made.train()
    assert [t for t in told if t[0] in ("run", "rate", "save")] == [
        ("run", False, [0, 1, 2]), ("rate", 6), ("save", 1)
    ]  # fmt: skip


def test_an_exit_condition_ends_the_run_with_a_checkpoint() -> None:
    told: Told = []
    made = trainer(told, save="x")
    made.exits.reason = lambda iteration: "enough" if iteration == 2 else None  # type: ignore[method-assign]
    assert made.train() is False
    assert made.run.iteration == 2 and told[-1] == ("save", 2)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_schedule_gets_the_hooks_of_every_chunk(
    chunks: int, instances: int, aligned: bool
) -> None:
    made = trainer(
        [], num_chunks=chunks, overlap_grad_reduce=True, overlap_param_gather=True,
        align_grad_reduce=aligned, align_param_gather=aligned,
        num_distributed_optimizer_instances=instances, train_iters=0,
    )  # fmt: skip
    made.train()
    config, names = made.trainee.config, []
    for functions in (config.no_sync_func, config.grad_sync_func, config.param_sync_func):
        assert functions is None or isinstance(functions, list) == (chunks > 1)
        names.append(functions is not None)
    assert names == [True, aligned and instances == 1, aligned]
    assert config.grad_scale_func is made.trainee.optimizer.scale_loss
    assert config.finalize_model_grads_func is loop.finalize_model_grads
    assert config.timers is made.run.timers


def given_to_schedule(made: Trainer, *names: str) -> tuple[Any, ...]:
    """Keywords of the schedule in one training step."""
    given: dict[str, Any] = {}
    made.schedule = lambda **keywords: given.update(keywords) or []
    step(made)
    return tuple(given.get(name) for name in names)


def test_the_planners_choices_are_those_of_the_samples_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "write_lengths", lambda *_: None)
    plans: Any = SimpleNamespace(
        policy=lambda first: f"policy of {first}", own_sizes=lambda first: [first],
        num_microbatches=lambda first: first + 1, batch_size=16, tokens=lambda first: None,
    )  # fmt: skip
    names = ("policy", "sizes", "num_microbatches")
    for cap, sizes in (("static", [32]), ("1.0", None)):
        told: Told = []
        made = trainer(told, plans=plans, dpp_activation_cap=cap)
        made.run.consumed_train_samples = 32
        assert given_to_schedule(made, *names) == ("policy of 32", sizes, 33)
        assert ("rate", 16) in told
    assert given_to_schedule(trainer([]), *names) == (None, None, 2)
    plans.policy = lambda first: None
    made = trainer([], plans=plans, use_dpp=False, dpp_activation_cap="static")
    assert given_to_schedule(made, *names) == (None, None, 1)


def test_the_longest_row_is_told_where_lengths_are_unlike() -> None:
    given = {"packing_budget": 70, "length_multiple": 4}
    made = trainer([], variable_lengths=True, **given)
    assert given_to_schedule(made, "seq_length") == (72,)
    assert given_to_schedule(trainer([], **given), "seq_length") == (8,)


OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True}


def hooks_of(told: Told, outcomes: list[bool], **changes: Any) -> Told:
    """Trains steps that succeed as ``outcomes`` say; tells of hooks, of steps, and whether each
    step's parameters were gathered by the schedule."""
    made = trainer(
        told, train_iters=len(outcomes), **OVERLAP | {"align_param_gather": False} | changes
    )
    made.trainee.config.param_sync_func = gather = object()
    ends = iter(outcomes)
    optimizer: Any = made.trainee.optimizer
    optimizer.step = lambda: (next(ends), 1.0, None)
    made.schedule = lambda **_: (
        told.append(("step", made.trainee.config.param_sync_func is gather)) or []
    )
    made.evaluate = lambda *_: told.append(("evaluation",))  # type: ignore[method-assign]
    made.train()
    return [t for t in told if t[0] in ("step", "evaluation") or "hook" in t[0]]


def test_parameters_are_gathered_by_hooks_after_the_first_step_that_was_made() -> None:
    """Whole parameters are read while the hooks are off."""
    on = [("enable_forward_pre_hook", n) for n in (0, 1)]
    off, gathered = (
        [("disable_forward_pre_hook", n, flag) for n in (0, 1)] for flag in (False, True)
    )
    assert hooks_of([], [False, True, True], eval_interval=3) == [
        *off, ("step", False), ("step", False), *on, ("step", True), *gathered, ("evaluation",),
        *on, *gathered,
    ]  # fmt: skip
    assert hooks_of([], [False], eval_interval=1) == [*off, ("step", False), ("evaluation",)]


@pytest.mark.parametrize("name", ["use_distributed_optimizer", "overlap_param_gather"])
def test_there_are_no_hooks_without_an_overlap(name: str) -> None:
    assert hooks_of([], [True, True], **{name: False}) == [("step", True)] * 2
