"""DeepSpeed's engine under our loop, with an engine that only remembers: settings, steps, files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint.loader import Wanted
from megatron.dpp_train.loop import zero_engine
from megatron.dpp_train.loop.zero_engine import (
    EngineChunk,
    EngineLoader,
    EngineOptimizer,
    accumulate,
    engine_settings,
)
from megatron.dpp_train.options.run_config import Settings


class Engine:
    """Notes losses and where a step ends."""

    def __init__(self, stage: int = 2) -> None:
        self.module = torch.nn.Linear(4, 2)
        self.dp_world_size = 2
        self.told: list[Any] = []
        self._stage, self.applied, self.half = stage, True, False
        parameters = [{"params": [*self.module.parameters()], "lr": 0.1}]
        inner = SimpleNamespace(param_groups=parameters)
        self.optimizer = SimpleNamespace(optimizer=inner, loss_scale=8.0)

    def zero_optimization_stage(self) -> int:
        return self._stage

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.told.append(is_boundary)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> None:
        self.told.append((loss.item(), scale_wrt_gas))

    def step(self) -> None:
        self.told.append("step")

    def was_step_applied(self) -> bool:
        return self.applied

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.tensor(3.0)

    def fp16_enabled(self) -> bool:
        return self.half

    def load_checkpoint(self, folder: str, **given: Any) -> tuple[str | None, dict[str, Any]]:
        self.told.append(given)
        return (None if "gone" in folder else folder), {"iteration": 3}


ARGS = {
    "global_batch_size": 24, "micro_batch_size": 2, "data_parallel_size": 3, "clip_grad": 0.5,
    "deepspeed_zero_stage": 2, "bf16": False, "fp16": False, "loss_scale": None,
    "initial_loss_scale": 2.0**20, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 1.5,
}  # fmt: skip


def settings_of(**changes: Any) -> dict[str, Any]:
    args: Any = Settings.of(ARGS | changes)
    return engine_settings(args)


def test_the_engine_accumulates_the_microbatches_of_one_replica() -> None:
    made = settings_of()
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["gradient_accumulation_steps"] == 4
    assert made["gradient_clipping"] == 0.5 and made["zero_optimization"] == {"stage": 2}
    assert settings_of(bf16=True)["bf16"] == {"enabled": True}


def test_the_engine_scales_losses_as_the_flags_say() -> None:
    made = settings_of(fp16=True)["fp16"]
    assert made == {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 7,
        "hysteresis": 3, "min_loss_scale": 1.5,
    }  # fmt: skip
    assert settings_of(fp16=True, loss_scale=128.0)["fp16"]["loss_scale"] == 128.0


@pytest.mark.parametrize("counted", [True, False])
def test_each_microbatch_counts_by_its_mean_and_the_last_ends_the_step(counted: bool) -> None:
    engine = Engine()
    batches = iter([(12.0, 4), (20.0, 2), (7.0, 0), (0.0, 0)])

    def forward_step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
        total, count = next(iterator)

        def loss(output: Any) -> tuple[Any, ...]:
            tokens = (torch.tensor(count),) if counted else ()
            return torch.tensor(total), *tokens, {"lm loss": total}

        return None, loss

    def run(count: int, *, forward_only: bool) -> Any:
        return accumulate(
            forward_step_func=forward_step, data_iterator=batches, model=[EngineChunk(engine)],
            num_microbatches=count, forward_only=forward_only, seq_length=8,
        )  # fmt: skip

    logged = run(2, forward_only=False)
    assert logged == [{"lm loss": 12.0}, {"lm loss": 20.0}]
    halves = [1.5, 5.0] if counted else [6.0, 10.0]
    assert engine.told == [False, (halves[0], False), True, (halves[1], False)]
    engine.told.clear()
    assert run(1, forward_only=True) == [{"lm loss": 7.0}]
    assert engine.told == [True], "an evaluation has no backward"
    engine.told.clear()
    run(1, forward_only=False)
    assert engine.told == [True, (0.0, False)], "without tokens there is no loss"


@pytest.mark.parametrize(("stage", "share"), [(1, 40), (2, 20), (3, 16)])
def test_gradients_are_a_share_where_the_engine_keeps_one(stage: int, share: int) -> None:
    engine = Engine(stage)
    if stage == 3:  # its parameters are shards themselves
        engine.module.weight.ds_tensor = torch.zeros(2)  # type: ignore[assignment]
    assert EngineChunk(engine).gradient_bytes() == share


def test_a_step_tells_whether_it_was_made() -> None:
    engine = Engine()
    optimizer = EngineOptimizer(engine)
    assert optimizer.step() == (True, 3.0, None)
    engine.applied = False
    assert optimizer.step() == (False, None, None)
    assert engine.told == ["step", "step"]
    assert optimizer.get_loss_scale().item() == 1.0
    engine.half = True
    assert optimizer.get_loss_scale().item() == 8.0
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("name", "decoupled", "kind"),
    [("adam", True, "AdamW"), ("adam", False, "Adam"), ("sgd", True, "SGD")],
)
def test_the_optimizer_is_the_flags(
    name: str, decoupled: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = torch.nn.Linear(2, 2)
    groups = [{"params": [chunk.weight]}, {"params": [chunk.bias], "weight_decay": 0.0}]
    given: dict[str, Any] = {}
    package: Any = SimpleNamespace(
        initialize=lambda **options: given.update(options) or (Engine(),)
    )
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.setattr(zero_engine, "parameter_groups", lambda chunks, settings: groups)
    monkeypatch.setattr(zero_engine, "optimizer_config", lambda args: None)
    monkeypatch.setattr(zero_engine, "build_scheduler", lambda args, optimizer: optimizer)
    args: Any = argparse.Namespace(
        **ARGS, optimizer=name, decoupled_weight_decay=decoupled, lr=0.1, weight_decay=0.2,
        sgd_momentum=0.3, adam_beta1=0.4, adam_beta2=0.5, adam_eps=0.6,
    )  # fmt: skip
    run: Any = SimpleNamespace(args=args, device=torch.device("cpu"))
    trainee: Any = SimpleNamespace(chunks=[chunk])
    zero_engine.start_engine(run, trainee)
    assert given["model"] is chunk and given["config"] == engine_settings(args)
    assert isinstance(trainee.optimizer, EngineOptimizer) and isinstance(
        trainee.chunks[0], EngineChunk
    )
    made = given["optimizer"]
    assert trainee.scheduler is made
    assert type(made).__name__ == kind
    first, second = made.param_groups
    assert (first["lr"], first["weight_decay"], second["weight_decay"]) == (0.1, 0.2, 0.0)
    if name == "sgd":
        assert first["momentum"] == 0.3
    else:
        assert first["betas"] == (0.4, 0.5) and first["eps"] == 0.6


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_without_its_optimizer_gives_the_module_alone(
    with_optimizer: bool, tmp_path: Path
) -> None:
    engine = Engine()
    trainee = SimpleNamespace(chunks=[EngineChunk(engine)])
    contents: Any = SimpleNamespace(run=None, trainee=trainee)
    made, wanted = EngineLoader(contents), Wanted(True, with_optimizer, True)
    found: Any = SimpleNamespace(path=tmp_path / "iter_3", is_deepspeed=True)
    assert made.read(found, wanted) == {"iteration": 3}
    assert engine.told == [
        {"tag": "iter_3", "load_optimizer_states": with_optimizer,
         "load_module_only": not with_optimizer}
    ]  # fmt: skip
    gone: Any = SimpleNamespace(path=Path("gone/iter_3"), is_deepspeed=True)
    with pytest.raises(DataError, match="gone/iter_3: DeepSpeed could not load it"):
        made.read(gone, wanted)


@pytest.mark.parametrize(
    ("by_engine", "expected"),
    [(None, ["load", "start"]), (False, ["load", "start"]), (True, ["start", "load"])],
)
def test_the_engine_takes_the_parameters_of_a_checkpoint_in_megatrons_form(
    by_engine: bool | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies them when it starts. Its own checkpoints are read by the engine itself."""
    told: list[str] = []
    found = None if by_engine is None else SimpleNamespace(is_deepspeed=by_engine)
    monkeypatch.setattr(zero_engine.files, "find_start", lambda args: found)
    monkeypatch.setattr(
        zero_engine.Wanted, "of", lambda args, found: SimpleNamespace(optimizer=False)
    )
    monkeypatch.setattr(zero_engine.Loader, "load", lambda self: told.append("load"))
    monkeypatch.setattr(zero_engine, "start_engine", lambda run, trainee: told.append("start"))
    contents: Any = SimpleNamespace(run=SimpleNamespace(args=None), trainee=None)
    EngineLoader(contents).load()
    assert told == expected
