"""Trains a small GPT whose host changes its modules, statically and dynamically; two ranks.

Run by test_host_changes.py: host_changes_worker.py JSON, a list of examples. Prints per example
``EXAMPLE name equal``, or ``refused`` with the reason, and fails where parameters differ.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.dpp import DppConfig, DppSchedule
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.static import StaticSchedule
from tests.runtime import equality_worker as models
from tests.runtime.host_changes import CHANGES, LOSSES

STEPS, LATE = 3, "delay:2ms,message-delay:3ms"


def train(example: dict[str, Any], schedule: Any) -> dict[str, torch.Tensor]:
    """Two or three steps; returns all parameters and what is left of their gradients, by name."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.ones(1)  # not of another model
    torch.manual_seed(7 + dist.get_rank())
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    chunks, _ = models.build(example)
    config = chunks[0].config
    config.grad_scale_func, config.finalize_model_grads_func = None, None
    if not example.get("bare"):
        config.finalize_model_grads_func = finalize_model_grads
    iterators = [models.batches(example) for _ in chunks]
    forward_step = models.ForwardStep(example)
    told: list[torch.Tensor] = []
    losses = [LOSSES[name] for name in example.get("losses", ())]
    for step in range(example.get("steps", STEPS)):
        for name, when, seed in example["changes"]:
            if when == step:
                CHANGES[name](random.Random(f"{seed} {dist.get_rank()}"), chunks)
        for chunk in chunks:
            if not example.get("bare"):
                chunk.zero_grad_buffer()
        for parameter in parameters(chunks).values():
            if parameter.grad is not None and parameter.grad._is_view():
                parameter.grad.zero_()  # of a host's buffer
            else:
                parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
        schedule(
            forward_step_func=partial(with_losses, forward_step, losses, told),
            data_iterator=iterators, model=chunks,
            num_microbatches=example["m"], seq_length=models.SEQUENCE,
            micro_batch_size=models.MICRO_BATCH, forward_only=False,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in parameters(chunks).values():
                for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
                    if gradient is not None and parameter.requires_grad:
                        parameter -= 0.1 * gradient
    found = {name: p.detach().clone() for name, p in parameters(chunks).items()}
    found |= {f"loss {number}": loss for number, loss in enumerate(told)}
    found |= {f"buffer {n}": chunk.flat for n, chunk in enumerate(chunks) if hasattr(chunk, "flat")}
    found |= {
        f"main_grad of {name}": p.main_grad.clone()
        for name, p in parameters(chunks).items()
        if hasattr(p, "main_grad")
    }
    return found


def with_losses(forward_step: Any, losses: Any, told: Any, iterator: Any, model: Any) -> Any:
    """A forward step whose loss a host has changed."""
    output, loss_func = forward_step(iterator, model)

    def changed(output: torch.Tensor) -> Any:
        loss, *rest = loss_func(output)
        for each in losses:
            loss = each(loss, output, model)
        told.append(loss.detach().clone())
        return loss, *rest

    return output, changed


def parameters(chunks: list[Any]) -> dict[str, Any]:
    return {f"{n} {name}": p for n, c in enumerate(chunks) for name, p in c.named_parameters()}


def difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> str:
    if expected.keys() != got.keys():
        return f"parameters {expected.keys() ^ got.keys()}"
    unlike = [name for name in got if not torch.equal(got[name], expected[name])]
    return f"{len(unlike)} unlike, such as {unlike[0]}" if unlike else ""


def run(example: dict[str, Any]) -> str:
    """The outcome of an example on this rank."""
    with StaticSchedule(DppConfig(), seed=1234) as schedule, as_written():
        expected = train(example, schedule)
    assert all(value.isfinite().all() for value in expected.values())
    said: list[str] = []
    try:
        settings = DppConfig(inject=LATE if example.get("late") else "")
        with DppSchedule(settings, seed=1234, log=said.append) as schedule, as_written():
            got = train(example, schedule)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"left: {type(error).__name__}: {error}"
    found = difference(expected, got)
    if found and any("in the order of tasks" in line or "derives its own" in line for line in said):
        return "told"
    lines = [line for line in said if "is computed within B" in line]
    return found or f"equal, {len(lines)} lines {lines[:1] if example.get('shows') else ''}".strip()


@contextmanager
def as_written() -> Iterator[None]:
    """Leave megatron-core's autograd function as it was."""
    function = layers.LinearWithGradAccumulationAndAsyncCommunication
    own = vars(function)["backward"]
    try:
        yield
    finally:
        function.backward = own


def verdict(found: list[str]) -> str:
    refused = [each for each in found if each.startswith("refused")]
    if "told" in found:  # other ranks' numbers follow from this one's
        return "told"
    if refused and all(each.startswith(("refused", "left", "equal")) for each in found):
        return refused[0]
    wrong = [each for each in found if not each.startswith("equal")]
    return f"WRONG: {wrong}" if wrong else max(found)


def main() -> None:
    models.start()
    layout, wrong = None, 0
    for example in json.loads(sys.argv[1]):
        # megatron-core's cross entropy has room for one backward pass alone
        example["own_loss"] = bool(example.get("losses"))
        example |= {"p": dist.get_world_size(), "m": 2 + example.get("v", 1), "untied": True}
        example["layers"] = max(example["layers"], example["p"] * example["v"])
        example["m"] = -(-example["m"] // example["p"]) * example["p"]
        if layout != (layout := (example.get("v", 1),)):
            parallel_state.destroy_model_parallel()
            models.initialize(example)
        try:
            mine = run(example)
        except Exception:
            traceback.print_exc()
            raise
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        text = verdict(found)
        wrong += text.startswith("WRONG")
        if dist.get_rank() == 0:
            print(f"EXAMPLE {example['name']} {text}", flush=True)
    dist.destroy_process_group()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
