"""Compares schedules on stages of PyTorch, one process per rank: worker.py JSON, a list of cases.

Run by test_schedule.py. Each case names a function below and its arguments, so that one start of
Python serves many of them. Prints ``CASE n ok``.
"""

# ruff: noqa: E402
from __future__ import annotations

import copy
import json
import random
import sys
from typing import Any

sys.modules["megatron.core"] = None  # type: ignore[assignment]  # as where it is not installed

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from megatron.dpp import DppConfig
from megatron.dpp.torch import DynamicSchedule
from tests.torch.stages import (
    Case,
    batch,
    by_hand,
    first_difference,
    gradients,
    loss_fn,
    parts,
    run,
    stages_of,
)


def own(made: list[Any]) -> list[Any]:
    """This rank's modules of a model."""
    return made[dist.get_rank() :: dist.get_world_size()]


def equal(seed: int, **config: Any) -> None:
    """A random model is trained as by PyTorch's schedules, bit by bit."""
    p = dist.get_world_size()
    case = Case.random(seed, p)
    model, given = parts(case, seed, p * case.v), batch(case, seed)
    other = copy.deepcopy(model)
    if case.v == 1:
        kind = random.Random(seed).choice([ScheduleGPipe, Schedule1F1B])
        torchs: Any = kind(*stages_of(model), case.m, loss_fn, scale_grads=case.scale)
    else:
        torchs = ScheduleInterleaved1F1B(stages_of(model), case.m, loss_fn, scale_grads=case.scale)
    wanted = run(torchs, own(model), given)
    schedule = DynamicSchedule(
        stages_of(other), case.m, loss_fn, scale_grads=case.scale, config=DppConfig(**config)
    )
    found = run(schedule, own(other), given)
    schedule.close()
    if difference := first_difference(wanted, found):
        raise AssertionError(f"seed {seed}, {case}: {difference}")


def unlike(seed: int, **config: Any) -> None:
    """Lists of microbatches of unlike length, whose number changes from step to step, are trained
    as in one process that has all stages.
    """
    p, draw = dist.get_world_size(), random.Random(seed)
    case = Case.random(seed, p)
    model = parts(case, seed, p * case.v)
    other = copy.deepcopy(model)
    schedule = DynamicSchedule(stages_of(other), 1, loss_fn, config=DppConfig(**config))
    first, last = dist.get_rank() == 0, dist.get_rank() == p - 1
    for longest in (8, 8, 40):
        shapes = [(1, draw.randint(1, longest)) for _ in range(draw.randint(1, 2 * p))]
        tokens, targets = ([torch.randint(0, 32, shape) for shape in shapes] for _ in range(2))
        dist.broadcast_object_list(given := [tokens, targets])
        tokens, targets = given
        for each in (model, other):
            for part in each:
                part.zero_grad()
        case_state = torch.get_rng_state()
        wanted_losses, wanted = by_hand([part.eval() for part in model], given, len(shapes))
        torch.set_rng_state(case_state)
        for part in other:
            part.eval()
        losses: list[torch.Tensor] = []
        outputs = schedule.step(
            *([tokens] if first else []), target=targets if last else None, losses=losses
        )
        difference = first_difference(gradients(own(model)), gradients(own(other)))
        if last:
            difference = difference or first_difference(wanted, outputs)
            difference = difference or first_difference(wanted_losses, losses)
        if difference:
            raise AssertionError(f"seed {seed}, {case}: {difference}")
    schedule.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, (name, arguments) in enumerate(json.loads(sys.argv[1])):
        globals()[name](**arguments)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"CASE {number} ok", flush=True)
    dist.destroy_process_group()
