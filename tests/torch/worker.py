"""Compares schedules on stages of PyTorch, one process per rank: worker.py JSON, a list of cases.

Run by test_schedule.py. Each case names a function below and its arguments, so that one start of
Python serves many of them. Prints ``CASE n ok``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from megatron.dpp import ConfigError, DppConfig, DppError
from megatron.dpp.errors import PeerDead
from megatron.dpp.torch import DynamicSchedule
from tests.torch.stages import (
    Case,
    batch,
    by_hand,
    ends,
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


def as_torch(
    seed: int, case: Case, group: dist.ProcessGroup | None = None,
    wrap: Callable[[Any], Any] = lambda part: part, replica: int = 0, **config: Any,
) -> None:  # fmt: skip
    """A random model is trained as by PyTorch's schedules, bit by bit."""
    p = dist.get_world_size(group)
    model, given = parts(case, seed, p * case.v), batch(case, seed + 1000 * replica)
    made = []
    for each in (model, copy.deepcopy(model)):
        mine = range(dist.get_rank(group), len(each), p)
        wrapped = [wrap(part) if index in mine else part for index, part in enumerate(each)]
        made.append(stages_of(wrapped, group))
    words = {"n_microbatches": case.m, "loss_fn": loss_fn, "scale_grads": case.scale}
    if seed % 2:  # on ranks that are given no arguments, too
        rows, named = TensorChunkSpec(0), given[2]
        by_name = {"kwargs_chunk_spec": dict.fromkeys(named, rows)}
        words |= by_name if named else {"args_chunk_spec": (rows,)}
    if case.v == 1:
        kind: Any = random.Random(seed).choice([ScheduleGPipe, Schedule1F1B])
        wanted = run(kind(*made[0], **words), made[0], given)
    else:
        wanted = run(ScheduleInterleaved1F1B(made[0], **words), made[0], given)
    schedule = DynamicSchedule(made[1], **words, config=DppConfig(**config))
    found = run(schedule, made[1], given)
    schedule.close()
    if difference := first_difference(wanted, found):
        raise AssertionError(f"seed {seed}, {case}: {difference}")


def equal(seed: int, **config: Any) -> None:
    """Bare stages."""
    as_torch(seed, Case.random(seed, dist.get_world_size()), **config)


def fsdp(seed: int) -> None:
    """Stages under FSDP2, in two replicas that are given other rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    case = dataclasses.replace(Case.random(seed, 2), frozen=0.0, dtype=torch.float32)

    def wrap(part: Any) -> Any:
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        return fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)

    as_torch(seed, case, mesh.get_group("pp"), wrap, mesh.get_local_rank("dp"))


def tensor(seed: int) -> None:
    """Stages under PyTorch's tensor parallelism, and under FSDP2 that gathers in each task, run one
    order of two ranks that nobody names.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    case = dataclasses.replace(
        Case.random(seed, 2), v=2, m=6, frozen=0.0, dropout=0.0, dtype=torch.float32
    )

    def wrap(part: Any) -> Any:
        for block in part.blocks:
            if seed % 2:
                fully_shard(block, mesh=mesh["tp"])
            else:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan)
        return fully_shard(part, mesh=mesh["tp"]) if seed % 2 else part

    both = parts(case, seed, 2)[0]
    parallelize_module(both.blocks[0].up, mesh["tp"], ColwiseParallel())
    parallelize_module(both.blocks[0].down, mesh["pp"], ColwiseParallel())
    for given in (None, mesh.get_group("tp")):
        with pytest.raises(ConfigError, match=r"ranks \[.*\], as .* of all of them as together="):
            DynamicSchedule(stages_of([both] * 2, mesh.get_group("pp")), 2, together=given)
    config = {"policy": "dynamic", "inject": "jitter:0.5"}
    replica = mesh.get_local_rank("tp") if seed % 2 else 0
    as_torch(seed, case, mesh.get_group("pp"), wrap, replica, **config)


def ddp(seed: int) -> None:
    """Stages under DDP have the mean of the gradients of two replicas, in each of several steps.

    PyTorch's own schedules reduce twice in the first step, and fail in the second one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
    case = dataclasses.replace(Case.random(seed, 2), v=1, keyword=False, dropout=0.0, frozen=0.0)
    model = parts(case, seed, 2)
    batches = [batch(case, seed + replica) for replica in range(2)]
    wanted = []
    for tokens, targets, _ in batches:
        replica = copy.deepcopy(model)
        by_hand(replica, (tokens.chunk(case.m), targets.chunk(case.m)), 1)
        wanted.append(gradients([replica[rank]]))
    made: list[Any] = [*model]
    made[rank] = DistributedDataParallel(model[rank], process_group=mesh.get_group("dp"))
    schedule = DynamicSchedule(stages_of(made, pipeline), case.m, loss_fn, scale_grads=False)
    tokens, targets, _ = batches[mesh.get_local_rank("dp")]
    for _ in range(3):
        made[rank].zero_grad()
        schedule.step(*([tokens] if rank == 0 else []), target=targets if rank else None)
        mean = [(a + b) / 2 for a, b in zip(*wanted, strict=True)]
        if difference := first_difference(mean, gradients([made[rank]])):
            raise AssertionError(f"seed {seed}, {case}: {difference}")
    schedule.close()


class Talks(torch.nn.Module):
    """A stage whose forward and backward communicate with another rank's."""

    def __init__(self, part: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.part, self.group = part, group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.part(*args, **kwargs)
        output.register_hook(self.mean)
        return output + 0.1 * self.mean(output.detach())

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(total := x.clone(), group=self.group)
        return total / 2


def together(seed: int) -> None:
    """Two ranks whose stages communicate within tasks run one order, and one process's numbers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipeline, rank = mesh.get_group("pp"), mesh.get_local_rank("pp")
    case = dataclasses.replace(Case.random(seed, 2), v=2, m=6, pair=False, dropout=0.0, frozen=0.0)
    model = [Talks(part, mesh.get_group("tp")) for part in parts(case, seed, 4)]
    tokens, targets, _ = batch(case, seed)
    wanted = [Talks(copy.deepcopy(each.part), each.group) for each in model]
    by_hand(wanted, (tokens.chunk(6), targets.chunk(6)), 6)
    config = DppConfig(policy="dynamic", inject="jitter:0.5")
    schedule = DynamicSchedule(
        stages_of(model, pipeline), 6, loss_fn, config=config, together=mesh.get_group("tp")
    )
    for _ in range(2):
        for part in model:
            part.zero_grad()
        schedule.step(*([tokens] if rank == 0 else []), target=targets if rank else None)
        if difference := first_difference(gradients(wanted[rank::2]), gradients(model[rank::2])):
            raise AssertionError(f"seed {seed}, {case}: {difference}")
    schedule.close()


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
        generator = torch.Generator().manual_seed(draw.randrange(1000))
        places = [ends(length, draw.randint(1, 9), generator) for _, length in shapes]
        dist.broadcast_object_list(given := [tokens, targets])
        tokens, targets = given
        rows = [{"cu_seqlens": each} for each in places] if case.packed else []
        for each in (model, other):
            for part in each:
                part.zero_grad()
        case_state = torch.get_rng_state()
        wanted_losses, wanted = by_hand([part.eval() for part in model], given, len(shapes), rows)
        torch.set_rng_state(case_state)
        for part in other:
            part.eval()
        losses: list[torch.Tensor] = []
        named: dict[str, Any] = {"target_mbs": targets} if last else {}
        named |= {"kwarg_mbs": rows} if rows else {}
        if first:
            named["arg_mbs"] = [(row,) for row in tokens]
        if longest == 40:
            outputs = schedule.step(losses=losses, **named)
        else:
            target, keywords = targets if last else None, {"cu_seqlens": places} if rows else {}
            args = [tokens] if first else []
            outputs = schedule.step(*args, target=target, losses=losses, **keywords)
        difference = first_difference(gradients(own(model)), gradients(own(other)))
        if last:
            difference = difference or first_difference(wanted, outputs)
            difference = difference or first_difference(wanted_losses, losses)
        if difference:
            raise AssertionError(f"seed {seed}, {case}: {difference}")
    schedule.close()


class Returns(torch.nn.Module):
    """A stage that returns what it is made with, once it has run."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.weight, self.what = torch.nn.Parameter(torch.ones(())), what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what if self.what != "x" else x * self.weight


def refused() -> None:
    """Each refusal is raised by the rank that notices, and named on the other one."""
    rank, x = dist.get_rank(), torch.ones(4, 3)
    good = ["x", "x"]
    mean = {"loss_fn": lambda output, target: (output - target).mean()}
    rows = {"loss_fn": lambda output, target: output - target}
    flat = {"loss_fn": lambda output, _: output.detach().mean()}
    table: list[tuple[list[Any], dict[str, Any], Any, Any, int, str]] = [
        ([None, "x"], mean, x, x, 0, "stage 0 returned NoneType: a stage that is not the last has"),
        ([(), "x"], mean, x, x, 0, "stage 0 returned no tensor"),
        (good, flat, x, x, 1, "loss_fn returned a tensor without gradient"),
        (good, rows, x, x, 1, r"loss_fn returned \(2, 3\): a tensor with one element is needed"),
        (good, mean, x[:1], x, 0, "argument 0 can be cut into 1 microbatches, and 2 are asked for"),
        (good, mean, [x, x, x], [x, x], 1, "rank 1 was given targets of 2 .*, and rank 0 runs 3"),
        (good, mean, x, None, 1, "target: the rank of the last stage has to be given one"),
    ]
    for index, (what, words, given, target, notices, said) in enumerate(table):
        schedule = DynamicSchedule(stages_of([Returns(each) for each in what]), 2, **words)
        try:
            schedule.step(*([given] if rank == 0 else []), target=target if rank else None)
        except DppError as error:
            kind = ConfigError if rank == notices else PeerDead
            assert isinstance(error, kind), f"row {index}: {error!r}"
            assert re.search(said, str(error)) and "\n" not in str(error), f"row {index}: {error}"
        else:
            raise AssertionError(f"row {index} was not refused")
        schedule.close()
    schedule = DynamicSchedule(stages_of([Returns(each) for each in good]), 2, **mean)
    if rank == 0:
        with pytest.raises(PeerDead, match=r"rank 1 gave up: .*without a step"):
            schedule.step(x)
    del schedule
    stages = stages_of([Returns("x"), Returns("x")])
    many: list[tuple[Any, dict[str, Any], str]] = [
        (torch.nn.Linear(1, 1), {}, "stages: got Linear, expected torch.distributed.pipelining"),
        ([], {}, "stages: got nothing"),
        (None, {}, "stages: got NoneType"),
        (stages_of([Returns("x")] * 4)[:1], {}, "as many stages for each rank are needed"),
        (stages, {"n_microbatches": 0}, "n_microbatches is 0: at least 1 is needed"),
        (stages, {"n_microbatches": "2"}, "n_microbatches is '2': at least 1 is needed"),
        (stages, {"config": DppConfig(slice_tokens=8)}, "only models of megatron-core have this"),
    ]
    for stage, more, said in many:
        try:
            DynamicSchedule(stage, **{"n_microbatches": 2, **more})
        except ConfigError as error:
            assert said in str(error), error
        else:
            raise AssertionError(f"{said}: was not refused")


def traced(folder: str) -> None:
    """Steps with a split backward, and an evaluation that is not recorded."""
    case = dataclasses.replace(Case.random(0, 2), v=2, m=4, frozen=0.0)
    model, (tokens, targets, keywords) = parts(case, 0, 4), batch(case, 0)
    config = DppConfig(split_backward="on", activation_cap="1GiB")
    schedule = DynamicSchedule(stages_of(model), 4, loss_fn, config=config, trace=folder)
    given = ([tokens], None) if dist.get_rank() == 0 else ([], targets)
    for step in (schedule.step, schedule.eval, schedule.step, schedule.step):
        step(*given[0], target=given[1], **keywords)
    schedule.close()
    with pytest.raises(ConfigError, match="runs no more steps: it was closed"):
        schedule.step(*given[0], target=given[1], **keywords)


def dies(step: int) -> None:
    """Rank 1 is killed in its second step, in the set-up of its first one, or before."""
    case = Case.random(0, 2)
    model, (tokens, targets, keywords) = parts(case, 0, 2 * case.v), batch(case, 0)
    schedule = DynamicSchedule(stages_of(model), case.m, loss_fn)
    for number in range(2):
        if number == max(step, 0) and dist.get_rank():
            kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            model[1].register_forward_pre_hook(kill)
            if step < 0:
                kill()
        given = ([tokens], None) if dist.get_rank() == 0 else ([], targets)
        schedule.step(*given[0], target=given[1], **keywords)


def frozen() -> None:
    """A stage whose output takes no gradient any more, unlike in the first step, is refused."""
    rank, x, model = dist.get_rank(), torch.ones(4, 3), [Returns("x"), Returns("x")]
    schedule = DynamicSchedule(stages_of(model), 2, lambda output, _: output.mean())
    for kind in (contextlib.nullcontext(), pytest.raises((ConfigError, PeerDead), match="a new")):
        with kind:
            schedule.step(*([x] if rank == 0 else []), target=x if rank else None)
            dist.barrier()  # or the next step could fail while a rank is still in this one
        model[0].weight.requires_grad_(False)
    schedule.close()


def processes() -> None:
    """A rank whose process has ended on this host, or is gone, is dead; one of another host is
    waited for.
    """
    rank, x = dist.get_rank(), torch.ones(2, 3)
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # which leaves it to be waited for
    for pid, here in ((ended.pid, True), (1 << 30, True), (1 << 30, False)):
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(os, "getpid", lambda pid=pid: pid)
            if rank and not here:
                patch.setattr(Path, "read_text", lambda *_, **__: "another boot")
            mean: Any = lambda output, _: output.mean()  # noqa: E731
            schedule = DynamicSchedule(stages_of([Returns("x")] * 2), 1, mean)
        args, target = ([], x) if rank else ([x], None)
        if not here:
            time.sleep(0.3 * rank)  # rank 0 looks first
            schedule.step(*args, target=target)
        elif not rank:
            with pytest.raises(PeerDead, match=r"rank 1 \(pid \d+\) died before its first"):
                schedule.step(*args, target=target)
        dist.barrier()
        schedule.close()
    ended.wait()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, (name, arguments) in enumerate(json.loads(sys.argv[1])):
        globals()[name](**arguments)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"CASE {number} ok", flush=True)
    dist.destroy_process_group()
    assert not [
        name for name in sys.modules if name.startswith(("megatron.core", "megatron.dpp.core"))
    ]
