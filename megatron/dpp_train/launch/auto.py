"""Mode ``auto``: the best layout of a model on these devices, and the nearest that fits.

All possible layouts are sorted by a lower bound on their time, and simulated in that order until no
other can be among the best three. Each is simulated with the flags that ``--mode 3d`` would run it
with, so a pipeline whose layers are planned is planned here too. Of those that fit, the fastest
comes first; a more complex one must gain ``_WORTH`` for each further part. Where none holds whole
sequences, all are tried with slices.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron.dpp.errors import DppError
from megatron.dpp.slice_sizes import auto_tokens
from megatron.dpp_train.cost.estimate import (
    Estimate,
    estimate,
    first_peak_bytes,
    fitting,
    least_seconds,
)
from megatron.dpp_train.cost.memory import least_bytes
from megatron.dpp_train.cost.shape import RunSchedule, RunShape
from megatron.dpp_train.cost.text import size
from megatron.dpp_train.launch.checked import checked, plan_flags, shape_from, with_plan
from megatron.dpp_train.launch.flags import Flags
from megatron.dpp_train.launch.layout import Layout, nearest_multiple, possible_layouts
from megatron.dpp_train.launch.resolve import (
    Devices,
    Resolved,
    divisible,
    forms,
    is_planned,
    resolve,
)
from megatron.dpp_train.preflight.files import check_start

_USABLE = 0.92
"""Share of a device's memory that a run may take. Allocators and libraries need the rest."""
_WORTH = 0.02
"""Share of the time that each further part of a layout must gain."""
_MICRO_BATCHES = (16, 8, 4, 2, 1)
_MOST_CHUNKS = 4
_SHOWN = 3
"""Layouts to report, each with its best micro-batch size."""
_MOST_SIMULATED = 40
"""Limit on simulated layouts, once as many fit as are asked for."""
_SLICES = "--dpp-slice-tokens"
_MOST_PLANNED = 4
"""Limit on pipelines whose layers are planned, which takes 0.1 to 2 s each."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A layout, and how it saves memory. The defaults need the least.

    Args:
        spread: sequence parallelism.
    """

    layout: Layout
    shard: str
    spread: bool
    recompute: str = "full"
    micro_batch: int = 1


@dataclass(frozen=True, kw_only=True)
class Way(Form):
    """A form to simulate.

    Args:
        planned: the layers are laid out by cost.
        least_seconds: lower bound on the time of an iteration.
    """

    planned: bool
    least_seconds: float

    @property
    def parts(self) -> int:
        """The number of features that it uses."""
        return (
            (self.layout.tensor > 1)
            + (self.layout.context > 1)
            + (self.layout.expert > 1)
            + (self.layout.pipeline > 1)
            + (self.layout.chunks > 1)
            + ("none", "optimizer", "gradients", "parameters").index(self.shard)
            + (self.recompute != "none")
        )

    @property
    def least_cost(self) -> float:
        """Lower bound on its candidate's cost."""
        return self.least_seconds * (1 + _WORTH * self.parts)


@dataclass(frozen=True, kw_only=True)
class Candidate(Way):
    """A layout with its estimate.

    Args:
        cut: slices were added, as whole sequences fit in no layout.
    """

    estimate: Estimate
    resolved: Resolved
    cut: bool = False

    @property
    def cost(self) -> float:
        """Estimated seconds, with ``_WORTH`` added for each part."""
        return self.estimate.seconds * (1 + _WORTH * self.parts)

    def command(self) -> str:
        """The options of ``train`` that give this layout."""
        stages = {"optimizer": 1, "gradients": 2, "parameters": 3}
        if self.layout != Layout():
            words = f"--mode 3d {self.layout.text()}"
            static = self.layout.pipeline > 1 and "--use-dpp" not in self.resolved.flags
            words += " --no-dpp" if static else ""
            words += " --use-distributed-optimizer" if self.shard == "optimizer" else ""
            words += " --sequence-parallel" if self.spread else ""
        elif self.shard != "none":
            words = f"--mode zero --zero-stage {stages[self.shard]}"
        else:
            words = "--mode simple"
        if self.recompute != "none":
            words += f" --recompute {self.recompute}"
        if self.cut:
            words += f" {_SLICES} auto"
        return f"{words} --micro-batch-size {self.micro_batch}"


def candidates(
    options: argparse.Namespace,
    flags: Flags,
    devices: Devices,
    plain: RunShape,
    *,
    count: int = _SHOWN,
) -> list[Candidate]:
    """Layouts that fit, each with its best micro-batch size, the best first. None that is left out
    is better than the last of the first ``count``.

    Args:
        plain: the run on one device.

    Raises:
        DppError: flags that go with no layout, or a checkpoint that no layout reads.
    """
    search = _Search(options, flags, devices, plain, count)
    found = search.run()
    if not found and _may_cut(options, flags, plain):
        schedule = dataclasses.replace(plain.schedule, slice_tokens="auto")
        cut = dataclasses.replace(plain, schedule=schedule)
        sliced = _Search(options, flags | {_SLICES: "auto"}, devices, cut, count).run()
        found = [dataclasses.replace(each, cut=True) for each in sliced]
    if not found and search.problem is not None:
        raise search.problem
    return found


def _may_cut(options: argparse.Namespace, flags: Flags, plain: RunShape) -> bool:
    """Nothing says whether sequences are cut, and a dynamic pipeline may run."""
    return not (options.no_dpp or _SLICES in flags or plain.schedule.slice_tokens != "off")


class _Search:
    """Tries layouts, the most promising first. ``problem`` is the last error with one of them."""

    def __init__(
        self,
        options: argparse.Namespace,
        flags: Flags,
        devices: Devices,
        plain: RunShape,
        count: int,
    ) -> None:
        self._options, self._flags, self._devices, self._plain = options, flags, devices, plain
        self._count = count
        self._usable = _USABLE * devices.device.memory_bytes
        self._plans: dict[tuple[Layout, int, bool], Flags] = {}
        self.problem: DppError | None = None

    def run(self) -> list[Candidate]:
        """The best first."""
        best: dict[tuple[Layout, str], Candidate] = {}
        ways = sorted(self._ways(), key=lambda way: way.least_cost)
        for tried, way in enumerate(ways):
            costs = sorted(each.cost for each in best.values())
            enough = len(costs) >= self._count
            if enough and (tried >= _MOST_SIMULATED or way.least_cost >= costs[self._count - 1]):
                break
            key = way.layout, way.shard
            if key in best and way.least_cost >= best[key].cost:
                continue
            limit = costs[self._count - 1] if enough else math.inf
            one = self._try(way, min(limit, best[key].cost if key in best else math.inf))
            if one is not None:
                best[key] = min(best.get(key, one), one, key=_cost)
        return sorted(best.values(), key=_cost)

    def _ways(self) -> Iterator[Way]:
        """Possible forms that may fit."""
        devices, plain, static = self._devices, self._plain, self._options.no_dpp
        for layout, planned in _layouts(self._options, self._flags, devices, plain):
            shards = _shards(layout, devices)
            spreads = (False, True) if layout.tensor > 1 and devices.on_gpu else (False,)
            if layout.tensor > 1 and plain.model.experts is not None:
                spreads = (True,)  # megatron-core asks for it
            ways = product(shards, _MICRO_BATCHES, ("none", "full"), spreads)
            for shard, micro, recompute, spread in ways:
                form = Form(
                    layout=layout,
                    shard=shard,
                    spread=spread,
                    recompute=recompute,
                    micro_batch=micro,
                )
                shape = shape_with(plain, devices, form, static=static)
                if shape is None:
                    continue
                times = [
                    (least_seconds(cut, devices.device, planned=planned), cut)
                    for cut in bounding_cuts(shape)
                ]
                for seconds, cut in sorted(times, key=lambda each: each[0]):
                    if least_bytes(cut) <= self._usable:
                        yield Way(**vars(form), planned=planned, least_seconds=seconds)
                        break

    def _try(self, way: Way, limit: float) -> Candidate | None:
        """The estimate of a way; None where it does not fit, or takes ``limit`` seconds or more."""
        devices = self._devices
        try:
            resolved = self._resolved(way)
            if resolved is None:
                return None
            if self._options.resume_from:  # not all layouts read each other's optimizer state
                check_start(checked(resolved, devices))
            shape = fitting(shape_from(resolved, devices), devices.device)
            seconds = least_seconds(shape, devices.device)
            exact = dataclasses.replace(way, least_seconds=seconds)
            if exact.least_cost >= limit or least_bytes(shape) > self._usable:
                return None
            if shape.num_slices > 1 and first_peak_bytes(shape, devices.device) > self._usable:
                return None
            guess = estimate(shape, devices.device)
        except DppError as problem:
            self.problem = problem
            return None
        if guess.peak_bytes > self._usable:
            return None
        return Candidate(**vars(way), estimate=guess, resolved=resolved)

    def _resolved(self, way: Way) -> Resolved | None:
        """The run's flags; None where its layers would be planned, and enough have been."""
        batch = self._plain.global_batch
        chosen = argparse.Namespace(**vars(self._options))
        chosen.micro_batch_size, chosen.recompute = way.micro_batch, way.recompute
        chosen.batch_size, chosen.engine = batch, None
        sizes = {"--micro-batch-size": way.micro_batch, "--global-batch-size": batch}
        plain = resolve(
            chosen, self._flags | sizes, self._devices, layout=way.layout, shard=way.shard
        )
        resolved = forms(plain, self._devices)[-1 if way.spread else 0]
        if not way.planned:
            return resolved
        key = way.layout, way.micro_batch, way.spread  # a plan depends on nothing else
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANNED:
                return None
            self._plans[key] = plan_flags(resolved, self._devices)
        return with_plan(resolved, self._plans[key])


def _cost(candidate: Candidate) -> float:
    return candidate.cost


def _layouts(
    options: argparse.Namespace, flags: Flags, devices: Devices, plain: RunShape
) -> Iterator[tuple[Layout, bool]]:
    """Possible layouts, and whether their layers are planned; then they need not divide evenly."""
    model = dataclasses.replace(
        divisible(flags, uneven=True),
        num_heads=plain.model.num_heads,
        # The local layers' exchange does not overlap, and has not been measured.
        has_context=devices.on_gpu and not plain.gathers_keys and "--packing" not in flags,
    )
    for layout in possible_layouts(devices.world_size, model):
        stages = layout.pipeline * layout.chunks
        planned = is_planned(options, flags, layout, devices)
        fits = plain.num_layers >= stages if planned else plain.num_layers % stages == 0
        near = devices.per_node % layout.tensor == 0  # else some group lies on two nodes
        if fits and layout.chunks <= _MOST_CHUNKS and near:
            yield layout, planned


def _shards(layout: Layout, devices: Devices) -> tuple[str, ...]:
    replicas = devices.world_size // (layout.tensor * layout.pipeline)
    if replicas == 1:
        return ("none",)
    return ("none", "optimizer", "parameters") if layout == Layout() else ("none", "optimizer")


def shape_with(plain: RunShape, devices: Devices, form: Form, *, static: bool) -> RunShape | None:
    """``plain`` on all devices in a form; None where the batch does not divide."""
    layout, micro = form.layout, form.micro_batch
    data = devices.world_size // layout.replica_size
    if plain.global_batch % (data * micro):
        return None
    microbatches = plain.global_batch // (data * micro)
    group = layout.pipeline if static and layout.chunks > 1 else 1
    if microbatches < layout.pipeline or microbatches % group:
        return None
    stages = layout.pipeline * layout.chunks
    each, rest = divmod(plain.num_layers, stages)
    dynamic = layout.pipeline > 1 and not static
    schedule = RunSchedule(
        cuda_graphs=_graphs(plain, layout), slice_tokens=plain.schedule.slice_tokens
    )
    if dynamic:
        schedule = dataclasses.replace(
            schedule,
            dynamic=True,
            policy="auto",
            cap="auto",
            split_backward=not plain.precision.eight_bit and form.recompute != "full",
        )
    return dataclasses.replace(
        plain,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        layers=tuple(each + (stage < rest) for stage in range(stages)),
        data=data,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.tensor if layout.expert == 1 and plain.model.experts else 1,
        micro_batch=micro,
        num_microbatches=microbatches,
        sequence_parallel=form.spread,
        shard=form.shard,
        recompute=form.recompute,
        schedule=schedule,
        per_node=devices.per_node,
        engine=plain.engine and form.shard != "parameters",  # FSDP2's layers are local
    )


def bounding_cuts(shape: RunShape) -> list[RunShape]:
    """The run as its sequences may be cut: ``--dpp-slice-tokens auto``, which is not simulated
    here, takes its smallest slices or whole sequences."""
    schedule, asked = shape.schedule, shape.schedule.slice_tokens
    word = str(auto_tokens(0, shape.pipeline)) if asked == "auto" else asked
    cut = dataclasses.replace(
        shape, schedule=dataclasses.replace(schedule, slice_tokens=word, head_in_forward=True)
    )
    whole = dataclasses.replace(shape, schedule=dataclasses.replace(schedule, slice_tokens="off"))
    if cut.num_slices == 1:
        return [whole]
    return [cut, whole] if asked == "auto" else [cut]


def _graphs(plain: RunShape, layout: Layout) -> str:
    """``--dpp-cuda-graphs`` as :func:`resolve` will set it."""
    alone = layout.pipeline == 1 and plain.model.arch == "gpt" and plain.model.experts is None
    asked = plain.schedule.cuda_graphs
    return "on" if alone and asked == "auto" else asked


def report(best: list[Candidate], devices: Devices) -> list[str]:
    """The three best with their estimates, and why the first is first."""
    memory = devices.device.memory_bytes
    table = [f"{'':2s}{'ms/iteration':>12s}{'tokens/s':>12s}{'of ' + size(memory):>15s}  options"]
    for index, each in enumerate(best, 1):
        guess = each.estimate
        table.append(
            f"{index:<2d}{guess.seconds * 1e3:12.1f}{guess.tokens_per_second:12,.0f}"
            f"{size(guess.peak_bytes):>15s}  {each.command()}{' (planned)' if each.planned else ''}"
        )
    if any(each.planned for each in best):
        table.append("planned: the layers are laid out by what they cost, in chunks where it pays")
    return [*table, f"why: {_why(best)}"]


def _why(best: list[Candidate]) -> str:
    first = best[0]
    reasons = []
    if first.layout == Layout() and first.shard != "parameters":
        travels = ", so only gradients have to travel" if first.estimate.shape.data > 1 else ""
        reasons.append(f"the model fits on one device{travels}")
    if first.layout.tensor > 1:
        reasons.append(f"tensor parallel {first.layout.tensor} stays within a node")
    if first.layout.expert > 1:
        sent = size(first.estimate.traffic.experts)
        reasons.append(f"expert parallel {first.layout.expert} sends {sent} an iteration")
    if first.layout.pipeline > 1:
        reasons.append(
            f"the pipeline sends {size(first.estimate.traffic.pipeline)} an iteration and waits "
            f"{first.estimate.bubble:.0%} of its time"
        )
    if first.shard != "none":
        reasons.append("sharding the optimizer makes room and shortens its step"
                       if first.shard == "optimizer"
                       else "sharding the parameters makes room")  # fmt: skip
    if first.recompute == "full":
        reasons.append("activations fit only when they are computed again")
    if first.cut:
        reasons.append(f"whole sequences fit in no layout: {_SLICES} auto cuts them")
    if len(best) > 1:
        gain = best[1].estimate.seconds / first.estimate.seconds - 1
        if gain >= 0.0005:
            reasons.append(f"{gain:.1%} faster than the second")
        elif first.parts < best[1].parts:
            reasons.append("simpler than the second, which would gain too little")
        else:
            reasons.append("as fast as the second")
    return "; ".join(reasons)


def why_nothing_fits(
    options: argparse.Namespace, flags: Flags, devices: Devices, plain: RunShape
) -> str:
    """The need of the least demanding layout, and the number of devices that it needs."""
    usable = _USABLE * devices.device.memory_bytes
    least: tuple[float, Layout, str] | None = None
    for layout, _ in _layouts(options, flags, devices, plain):
        for shard in _shards(layout, devices):
            form = Form(layout=layout, shard=shard, spread=layout.tensor > 1 and devices.on_gpu)
            shape = shape_with(plain, devices, form, static=options.no_dpp)
            if shape is not None:
                shape = bounding_cuts(shape)[0]
                need = least_bytes(shape)
                if need <= usable:
                    need = estimate(shape, devices.device).peak_bytes
                least = min(least or (need, layout, shard), (need, layout, shard), key=_first)
    if least is None:
        near = nearest_multiple(plain.global_batch, devices.world_size)
        return (
            f"a batch of {plain.global_batch} cannot be divided over {devices.world_size} "
            f"devices; nearest possible: --batch-size {near}"
        )
    more = f"about --gpus {int(-(-least[0] // usable)) * devices.per_node}, or fewer layers"
    nearest = more if devices.on_gpu else "fewer layers (processes share the machine's memory)"
    shared = "nothing" if least[2] == "none" else least[2]
    return (
        f"no layout fits: the least ({least[1].text()}, {shared} sharded, full recompute, "
        f"micro batch 1) needs {size(least[0])} on every device; of its "
        f"{size(devices.device.memory_bytes)}, {_USABLE:.0%} can be used; nearest: {nearest}"
    )


def _first(entry: tuple[float, Layout, str]) -> float:
    return entry[0]
