"""Chooses a layout: the fastest one that fits, or the nearest number of devices that would do.

All possible layouts are sorted by a lower bound on their time, and simulated in that order until no
other can be among the best three. A more complex one must gain ``_WORTH`` for each further part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost.device import Devices
from megatron.dpp_train.cost.estimate import (
    Estimate,
    estimate,
    layout_line,
    outside_seconds,
    size,
)
from megatron.dpp_train.cost.flags import Given, name_of, shape_of
from megatron.dpp_train.cost.memory import least_bytes
from megatron.dpp_train.cost.pipeline import balanced, layout_text, least_seconds
from megatron.dpp_train.cost.shape import RunShape

_USABLE = 0.92
"""Share of a device's memory that a run may take. Allocators and libraries need the rest."""
_WORTH = 0.02
"""Share of the time that each further part of a layout must gain."""
_SHOWN, _MOST_SIMULATED, _MOST_CHUNKS, _MICRO_BATCHES = 3, 40, 4, (1, 2, 4, 8, 16)
_TENSOR, _PIPELINE, _CONTEXT, _EXPERT = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size"),
)
_CHUNKS, _LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
_MICRO, _CAP, _OPTIMIZER = (
    "--micro-batch-size",
    "--dpp-activation-cap",
    "--use-distributed-optimizer",
)
_FULL = "--recompute-granularity"
_FULL_RECOMPUTE = {_FULL: "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
_PARTS = (_TENSOR, _PIPELINE, _CONTEXT, _EXPERT, _CHUNKS, _LAYOUT, _FULL)
"""Flags of the parts that make a layout more complex."""
_OF_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Flags that lay layers out, so that this need not."""


class Choice(NamedTuple):
    """A layout for a model on given devices.

    Args:
        flags: those to add to the given ones, as ``{"--tensor-model-parallel-size": 2, "--use-dpp":
            True}``.
        lines: a table of the best layouts with their times and memory.
    """

    flags: dict[str, object]
    lines: list[str]


def choose(flags: Mapping[str, object], devices: Devices, *, arch: str = "gpt") -> Choice:
    """The fastest layout that fits: tensor, context, expert and pipeline parallel sizes, virtual
    stages or a planned ``--pipeline-model-parallel-layout``, micro-batch size, recompute,
    ``--use-distributed-optimizer``, ``--sequence-parallel`` and ``--use-dpp``.

    Flags that are given stay as they are; the others are chosen. ``--global-batch-size`` has to be
    given. ``--use-dpp`` that is False asks for static pipelines.

    Raises:
        ConfigError: a flag is missing or has a value that is not possible, or sizes do not divide;
            or nothing fits: names the nearest that does.
    """
    given = Given(flags)
    best = Search(given, devices, arch).best()
    lines = [f"  ms/iteration    tokens/s  of {size(devices.device.memory_bytes):>10s}  flags"]
    for index, way in enumerate(best, 1):
        found = way.found
        assert found is not None
        words = (k if v is True else f"{k} {v}" for k, v in way.named(given).items())
        rate = way.shape.global_tokens / found.seconds
        lines.append(
            f"{index} {found.seconds * 1e3:12.1f} {rate:11,.0f}  "
            f"{size(found.peak_bytes):>13s}  {' '.join(words)}"
        )
    return Choice(best[0].named(given), lines)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A layout that may fit.

    Args:
        flags: that give it; those that are False are not named.
        least_cost: lower bound on its cost.
        found: its estimate, once it was simulated.
    """

    flags: dict[str, object]
    shape: RunShape
    least_cost: float
    found: Estimate | None = None

    @property
    def cost(self) -> float:
        """Estimated seconds, with ``_WORTH`` added for each part."""
        return self.found.seconds * _with_parts(self.flags) if self.found else math.inf

    @property
    def key(self) -> tuple[object, ...]:
        """Ways that differ by micro-batch size, recompute and layers alone are one layout."""
        names = (_TENSOR, _PIPELINE, _CONTEXT, _EXPERT, _OPTIMIZER)
        return (self.shape.chunks, *(self.flags.get(name) for name in names))

    def named(self, given: Given) -> dict[str, object]:
        """The flags that it adds to the given ones."""
        return {
            flag: value
            for flag, value in self.flags.items()
            if value is not False
            and not given.on(name_of(flag))
            and (value is True or value != 1 or flag == _MICRO)
        }


def _with_parts(flags: dict[str, object]) -> float:
    """1, and ``_WORTH`` for each part that a layout has."""
    return 1 + _WORTH * sum(flags.get(name, 1) != 1 for name in _PARTS)


class Search:
    """The layouts of one model on given devices; flags that are given stay as they are."""

    def __init__(self, given: Given, devices: Devices, arch: str) -> None:
        self._given, self._devices, self._arch = given, devices, arch
        self._usable = _USABLE * devices.device.memory_bytes
        self._batch = given.number("global_batch_size")
        self._dynamic = given.values.get("use_dpp") is not False
        self._lays_out = not any(given.on(name) for name in _OF_STAGES)
        self._least = (math.inf, "")
        self._problem: ConfigError | None = None

    def best(self) -> list[Way]:
        """The best layouts, each with its best micro-batch size, the best first.

        Raises:
            ConfigError: none fits; names the nearest that does, or what does not divide.
        """
        best: dict[tuple[object, ...], Way] = {}
        for tried, way in enumerate(sorted(self.ways(), key=lambda way: way.least_cost)):
            costs = sorted(one.cost for one in best.values())
            enough = len(costs) >= _SHOWN
            if enough and (tried >= _MOST_SIMULATED or way.least_cost >= costs[_SHOWN - 1]):
                break
            if way.least_cost < best.get(way.key, way).cost and (one := self._simulated(way)):
                best[way.key] = min(best.get(way.key, one), one, key=lambda way: way.cost)
        if not best:
            raise self._nothing()
        return sorted(best.values(), key=lambda way: way.cost)[:_SHOWN]

    def ways(self) -> Iterator[Way]:
        """Possible layouts that may fit."""
        for base in self._forms():
            try:
                shape = self._shape(base)
            except ConfigError as problem:
                self._problem = problem
                continue
            sizes = [n for n in _MICRO_BATCHES if self._batch % (shape.data * n) == 0]
            for micro in self._options(_MICRO, sizes):
                number = self._batch // (shape.data * micro)
                one = dataclasses.replace(shape, micro_batch=micro, num_microbatches=number)
                for flags, run in self._stages({**base, _MICRO: micro}, one):
                    if (way := self._way(flags, run)) is not None:
                        yield way

    def _way(self, flags: dict[str, object], shape: RunShape) -> Way | None:
        group = shape.pipeline if shape.chunks > 1 and not shape.dynamic else 1
        if shape.num_microbatches < shape.pipeline or shape.num_microbatches % group:
            return None
        need, device = least_bytes(shape), self._devices.device
        self._least = min(self._least, (need, layout_line(shape)))
        if need > self._usable:
            return None
        seconds = least_seconds(shape, device) + outside_seconds(shape, device)
        return Way(flags=flags, shape=shape, least_cost=seconds * _with_parts(flags))

    def _shape(self, flags: dict[str, object]) -> RunShape:
        values, devices = {**self._given.values, **flags}, self._devices
        if self._lays_out:  # any, until they are laid out
            stages, layers = int(str(values[_PIPELINE])), self._given.number("num_layers")
            values |= {_LAYOUT: "E" + "t" * layers + "|" * (stages - 1) + "L"}
        given, on_gpu = Given(values), devices.on_gpu
        return shape_of(given, devices.number, devices.per_node, on_gpu=on_gpu, arch=self._arch)

    def _options(self, flag: str, options: list[int]) -> list[int]:
        """The possible sizes; the given one where there is one."""
        name = name_of(flag)
        return [self._given.number(name)] if self._given.on(name) else options

    def _forms(self) -> Iterator[dict[str, object]]:
        """Flags of layouts that the devices divide into."""
        number, given, on_gpu = self._devices.number, self._given, self._devices.on_gpu
        sizes = [n for n in range(1, number + 1) if number % n == 0]
        near = [n for n in sizes if self._devices.per_node % n == 0]
        length, experts = given.number("seq_length"), given.number("num_experts", 0, 0)
        contexts = [n for n in sizes if on_gpu and length % (2 * n) == 0] or [1]
        asked = given.on("recompute_granularity") or given.on("recompute_activations")
        for tensor, pipeline, context, expert in itertools.product(
            self._options(_TENSOR, near),
            self._options(_PIPELINE, sizes),
            self._options(_CONTEXT, contexts),
            self._options(_EXPERT, [n for n in sizes if experts and experts % n == 0] or [1]),
        ):
            data, rest = divmod(number, tensor * pipeline * context)
            if rest:
                continue
            base: dict[str, object] = {_TENSOR: tensor, _PIPELINE: pipeline, _CONTEXT: context}
            base |= {_EXPERT: expert, "--expert-tensor-parallel-size": 1} if expert > 1 else {}
            base[_OPTIMIZER] = data * context > 1
            base["--use-dpp"] = pipeline > 1 and self._dynamic
            spreads = [False, True] if tensor > 1 and on_gpu else [False]
            if tensor > 1 and (experts or given.on("sequence_parallel")):
                spreads = [True]  # megatron-core asks for it with experts
            for spread, full in itertools.product(spreads, [False] if asked else [False, True]):
                yield {**base, "--sequence-parallel": spread, **(_FULL_RECOMPUTE if full else {})}

    def _stages(
        self, flags: dict[str, object], shape: RunShape
    ) -> Iterator[tuple[dict[str, object], RunShape]]:
        """The layout with each number of chunks, planned where that gains over even ones."""
        if shape.pipeline == 1 or not self._lays_out:
            yield flags, shape
            return
        device, number = self._devices.device, shape.num_layers
        for chunks in self._options(_CHUNKS, list(range(1, _MOST_CHUNKS + 1))):
            stages = shape.pipeline * chunks
            if stages - 2 > number:
                continue
            each, rest = divmod(number, stages)
            even = dataclasses.replace(shape, layers=(each,) * (stages - 1) + (each + rest,))
            run = balanced(even, device)
            gains = least_seconds(even, device) > (1 + _WORTH) * least_seconds(run, device)
            if rest or gains:
                yield {**flags, _LAYOUT: layout_text(run.layers)}, run
            else:
                yield {**flags, _CHUNKS: chunks}, even

    def _simulated(self, way: Way) -> Way | None:
        """The way with its estimate, under a smaller cap if need be; None where it does not fit."""
        ways = [way]
        if way.shape.dynamic and not self._given.on("dpp_activation_cap"):
            flags, shape = (
                {**way.flags, _CAP: "strict"},
                dataclasses.replace(way.shape, cap="strict"),
            )
            ways.append(dataclasses.replace(way, flags=flags, shape=shape))
        for one in ways:
            try:
                found = estimate(one.shape, self._devices.device)
            except ConfigError as problem:  # a cap that is too small
                self._problem = problem
                return None
            if found.peak_bytes <= self._usable:
                return dataclasses.replace(one, found=found)
        return None

    def _nothing(self) -> ConfigError:
        """The need of the least demanding layout, and the number of devices that would do."""
        need, layout = self._least
        if math.isinf(need):
            return self._problem or ConfigError(
                f"--global-batch-size {self._batch}: too few samples for {self._devices.number} "
                "devices"
            )
        near = "fewer layers, or shorter sequences"
        for factor in (2, 4, 8, 16, 32, 64) if self._devices.on_gpu else ():
            number = factor * self._devices.number
            per_node = max(self._devices.per_node, min(8, number))
            more = dataclasses.replace(self._devices, number=number, per_node=per_node)
            if next(Search(self._given, more, self._arch).ways(), None):
                near = f"--gpus {number}, or {near}"
                break
        whole = size(self._devices.device.memory_bytes)
        return ConfigError(
            f"no layout fits: the least ({layout}) needs {size(need)} on every device, of whose "
            f"{whole} {_USABLE:.0%} can be used; nearest: {near}"
        )
