"""The chunks of a rank, their gradient buffers, and the schedule of learning rate and decay."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp_train.model import build as model

RATES = {
    "train_samples": None, "train_iters": 100, "global_batch_size": 8, "micro_batch_size": 2,
    "lr_decay_iters": None, "lr_decay_samples": None, "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None, "lr_warmup_fraction": None, "lr_warmup_iters": 0,
    "lr_warmup_samples": 0, "lr_warmup_init": 1e-5, "lr": 1e-2, "min_lr": 1e-3,
    "lr_decay_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.5,
    "weight_decay_incr_style": "linear", "use_checkpoint_opt_param_scheduler": False,
    "override_opt_param_scheduler": False, "lr_wsd_decay_style": "linear",
}  # fmt: skip


def scheduler(**changes: Any) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    args: Any = argparse.Namespace(**RATES | changes)
    return model.build_scheduler(args, optimizer)


def rate(made: Any, samples: int) -> float:
    """The rate after so many samples."""
    made.num_steps = samples
    return float(made.get_lr({"max_lr": made.max_lr, "min_lr": made.min_lr}))


BY_ITERATION = {
    "train_iters": 100, "lr_decay_iters": 50, "lr_warmup_iters": 10, "lr_wsd_decay_iters": 20,
}  # fmt: skip
BY_SAMPLE = {
    "train_samples": 800, "lr_decay_samples": 400, "lr_warmup_samples": 80,
    "lr_wsd_decay_samples": 160,
}  # fmt: skip


@pytest.mark.parametrize("given", [BY_ITERATION, BY_SAMPLE], ids=["iterations", "samples"])
def test_rates_are_counted_in_samples_whatever_flags_count_in(given: dict[str, int]) -> None:
    made = scheduler(**given, lr_decay_style="cosine", lr_wsd_decay_style="minus_sqrt")
    assert made.lr_wsd_decay_style == "minus_sqrt"
    assert (made.lr_decay_style, made.wd_incr_style) == ("cosine", "linear")
    assert (made.lr_warmup_steps, made.lr_decay_steps) == (80, 400)
    assert (made.use_checkpoint_opt_param_scheduler, made.override_opt_param_scheduler) == (
        False, False,
    )  # fmt: skip
    for name in ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"):
        assert getattr(scheduler(**given, **{name: True}), name)
    assert (made.wd_incr_steps, made.wsd_decay_steps) == (800, 160)


@pytest.mark.parametrize("given", [{}, {"train_samples": 800}], ids=["iterations", "samples"])
def test_a_rate_decays_over_the_whole_run_by_default(given: dict[str, Any]) -> None:
    made = scheduler(lr_warmup_fraction=0.25, **given)
    assert (made.lr_decay_steps, made.lr_warmup_steps) == (800, 200)
    assert made.wsd_decay_steps is None
    half = {"lr_decay_samples": 400} if given else {"lr_decay_iters": 50}
    shorter = scheduler(lr_warmup_fraction=0.25, **given, **half)
    assert shorter.lr_warmup_steps == 100, "a share of the decay"
    assert shorter.wd_incr_steps == 800


def test_a_rate_rises_from_its_first_value_and_ends_at_the_least() -> None:
    made = scheduler(lr_warmup_iters=10)
    assert (made.start_wd, made.end_wd) == (0.1, 0.5)
    assert rate(made, 0) == pytest.approx(1e-5)
    assert rate(made, 80) == pytest.approx(1e-2)
    assert rate(made, 440) == pytest.approx((1e-2 + 1e-3) / 2)
    assert rate(made, 800) == rate(made, 900) == pytest.approx(1e-3)


class Place:
    """A rank's place in a pipeline of stages with two chunks each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
        self._first, self._last = rank == 0, rank == size - 1
        monkeypatch.setattr(model.mpu, "is_pipeline_first_stage", self.first)
        monkeypatch.setattr(model.mpu, "is_pipeline_last_stage", self.last)

    def first(self, *, ignore_virtual: bool, vp_stage: int | None) -> bool:
        return self._first and (ignore_virtual or vp_stage == 0)

    def last(self, *, ignore_virtual: bool, vp_stage: int | None) -> bool:
        return self._last and (ignore_virtual or vp_stage == 1)


@pytest.mark.parametrize(
    ("rank", "virtual", "expected"),
    [
        (0, None, [(None, True, False)]),
        (1, None, [(None, False, True)]),
        (0, 2, [(0, True, False), (1, False, False)]),
        (1, 2, [(0, False, False), (1, False, True)]),
    ],
)
def test_one_chunk_has_the_embedding_and_one_the_loss(
    rank: int, virtual: int | None, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Place(monkeypatch, rank)
    asked: list[tuple[Any, ...]] = []

    def build(
        args: Any, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> torch.nn.Module:
        asked.append((vp_stage, pre_process, post_process))
        return torch.nn.Linear(1, 1)

    args: Any = argparse.Namespace(virtual_pipeline_model_parallel_size=virtual)
    chunks = model.bare_chunks(args, SimpleNamespace(), build)  # type: ignore[arg-type]
    assert asked == expected
    assert [chunk.vp_stage for chunk in chunks] == [stage for stage, *_ in expected]
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        assert parameter.tensor_model_parallel is False


TRAINEE = {
    "fp16": False, "bf16": False, "skip_train": False, "deepspeed_zero_stage": None,
    "use_torch_fsdp2": False, "use_dpp": False, "dpp_split_backward": True,
    "transformer_impl": "transformer_engine", "enable_gloo_process_groups": True,
    "overlap_param_gather_with_optimizer_step": False, "data_parallel_random_init": False,
}  # fmt: skip


class Trainees:
    """Builds a trainee of megatron-core's parts, which tell what they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: list[Any]) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.optimizers: list[Any] = []
        self.said: list[str] = []
        told, patch = self.told, monkeypatch.setattr

        class Wrapped:
            def __init__(self, config: Any, given: Any, chunk: Any, disable_bucketing: bool):
                self.chunk = chunk
                told.append((chunk, given.delay_wgrad_compute, disable_bucketing))

            def broadcast_params(self) -> None:
                told.append((self.chunk, "sent"))

        patch(model, "bare_chunks", lambda *given: chunks)
        patch(model, "DistributedDataParallel", Wrapped)
        patch(model, "ddp_config", lambda args, count: SimpleNamespace(count=count))
        patch(model, "delay_weight_gradients", lambda config: "too old")
        patch(model.mpu, "get_data_parallel_rank", lambda **_: 1)
        patch(model, "Float16Module", lambda config, chunk: ("half", chunk))
        patch(model, "optimizer_config", lambda args: SimpleNamespace(of=args))
        patch(model, "get_standard_config_overrides", lambda config: ("by", config))
        patch(
            model, "get_megatron_optimizer",
            lambda *words, **options: self.optimizers.append((words, options)) or "optimizer",
        )  # fmt: skip
        patch(model, "build_scheduler", lambda args, optimizer: f"scheduler of the {optimizer}")

    def build(self, config: Any = None, **changes: Any) -> model.Trainee:
        args = argparse.Namespace(**TRAINEE | changes)
        run: Any = SimpleNamespace(args=args, device="cpu", timers="timers", say=self.said.append)
        config = config or SimpleNamespace(delay_wgrad_compute=False)
        return model.build_trainee(run, config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("delays", [True, False])
@pytest.mark.parametrize("with_step", [True, False])
@pytest.mark.parametrize("random_init", [True, False])
def test_gradient_buffers_know_what_is_delayed_and_start_equal(
    delays: bool, with_step: bool, random_init: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    trainees = Trainees(monkeypatch, [a, b])
    trainees.build(
        SimpleNamespace(delay_wgrad_compute=delays), data_parallel_random_init=random_init,
        overlap_param_gather_with_optimizer_step=with_step,
    )  # fmt: skip
    assert trainees.told[:2] == [(a, delays, with_step), (b, delays, True)]
    assert trainees.told[2:] == ([(a, "sent"), (b, "sent")] if random_init else [])


@pytest.mark.parametrize(
    ("dynamic", "split", "layers", "asked"),
    [
        (True, "on", "transformer_engine", True),
        (True, "stock:1", "transformer_engine", True),
        (True, "auto", "transformer_engine", False),
        (False, "on", "transformer_engine", False),
        (True, "off", "transformer_engine", False),
        (True, "on", "local", False),
    ],
)
def test_only_a_dynamic_split_backward_delays_weight_gradients(
    dynamic: bool, split: str, layers: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainees = Trainees(monkeypatch, [])
    trainees.build(
        use_dpp=dynamic, dpp_split_backward=split, transformer_impl=layers, skip_train=True
    )
    said = ["--dpp-split-backward: the backward is fused: too old"]
    assert trainees.said == (said if asked else [])


@pytest.mark.parametrize("half", ["fp16", "bf16", None])
@pytest.mark.parametrize("without", ["skip_train", "deepspeed_zero_stage", None])
def test_a_trainee_has_what_its_run_needs(
    half: str | None, without: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision wraps the chunks, whose buffers and optimizer come after it."""
    chunk = torch.nn.Linear(2, 2)
    trainees = Trainees(monkeypatch, [chunk])
    made = trainees.build(**dict.fromkeys(filter(None, [half, without]), 1))
    wrapped = ("half", chunk) if half else chunk
    if without:
        assert (made.chunks, made.optimizer, made.scheduler) == ([wrapped], None, None)
    else:
        assert [each.chunk for each in made.chunks] == [wrapped]
        assert (made.optimizer, made.scheduler) == ("optimizer", "scheduler of the optimizer")


@pytest.mark.parametrize("gloo", [True, False])
def test_an_optimizer_has_the_runs_timers_groups_and_overrides(
    gloo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters have learning rates and decays of their own by the flags' overrides."""
    trainees = Trainees(monkeypatch, [torch.nn.Linear(2, 2)])
    made = trainees.build(enable_gloo_process_groups=gloo)
    (((settings, chunks), options),) = trainees.optimizers
    assert settings.of.enable_gloo_process_groups is gloo
    assert (settings.timers, chunks) == ("timers", made.chunks)
    assert options == {"config_overrides": ("by", settings), "use_gloo_process_groups": gloo}


@pytest.mark.parametrize("replica", [0, 1])
def test_one_replica_tells_the_number_of_parameters(
    replica: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Context-parallel ranks hold the same ones."""

    def rank(*, with_context_parallel: bool = False) -> int:
        return replica if with_context_parallel else 0

    trainees = Trainees(monkeypatch, [torch.nn.Linear(2, 2)])
    places = {"get_data_parallel_rank": rank, "get_tensor_model_parallel_rank": lambda: 3,
              "get_pipeline_model_parallel_rank": lambda: 4}  # fmt: skip
    monkeypatch.setattr(model, "mpu", SimpleNamespace(**places))
    trainees.build(skip_train=True)
    line = " > number of parameters on (tensor, pipeline) model parallel rank (3, 4): 6\n"
    assert capsys.readouterr().out == (line if replica == 0 else "")


@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_chunks_are_gathered_again_for_the_backward_if_asked_to(
    reshard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are moved to the device before."""
    from megatron.dpp_train.model import fsdp

    moved: list[str] = []
    chunk: Any = SimpleNamespace(parameters=list, to=moved.append)
    trainees = Trainees(monkeypatch, [chunk])
    monkeypatch.setattr(fsdp, "fully_sharded", lambda config, chunk, **given: (chunk, given))
    made = trainees.build(use_torch_fsdp2=True, torch_fsdp2_reshard_after_forward=reshard)
    assert made.chunks == [(chunk, {"reshard_after_forward": reshard})] and moved == ["cpu"]
