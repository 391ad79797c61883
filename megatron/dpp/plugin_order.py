"""The order of a step's microbatches: planned before the step, undone in what it returns.

Where microbatches are unlike, a step takes less time with some first and others last. All ranks
plan alike, from the sizes that all know. A plan is undone in the losses and outputs that a host
gets back; its sums of gradients have the planned order.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.core.model import balancing_of
from megatron.dpp.errors import ConfigError, Text, one_line, setting
from megatron.dpp.plugin_lengths import read_ahead
from megatron.dpp.schedule import Geometry, parse_cap
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.orders import plan_order
from megatron.dpp.sim.schedules import ScheduleConfig

Rows = Sequence[Sequence[int]]
"""Tokens of the sequences in each microbatch."""

_GAIN = 0.01
"""Least share of a step's simulated time that a planned order must save."""
_MOST_TASKS = 5_000
"""Tasks that a plan simulates beside the named orders, in about 10 ms."""
_REPLAYS = ("moe_enable_routing_replay", "enable_routing_replay")
_HOST_REPLAYS = ("use_routing_replay", "use_rollout_routing_replay")
"""Settings of models and of hosts, under which routers replay what earlier calls recorded."""


class CallOrder:
    """Plans the order of a training step's microbatches.

    Args:
        config: with ``call_order="planned"`` steps take the order; with ``auto`` one line says what
            it would gain.
        say: called with lines that are logged once.
    """

    def __init__(self, config: DppConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self.takes = config.call_order == "planned"
        """Training steps may run in a planned order."""
        self._hints = config.call_order == "auto"
        self._told = False

    def of(self, step: dict[str, Any], rows: Rows | None) -> list[int] | None:
        """The order in which the microbatches run, equal on all ranks; None for the host's.

        Args:
            step: the keywords of the schedule's call, which get other iterators if rows are read.
            rows: None where they are not known yet.
        """
        if not self.takes and (rows is None or not self._hints):
            return None
        reason = self._why_not(step)
        try:
            if reason is None and rows is None:
                rows = read_ahead(step)
                reason = None if rows else "the tokens of microbatches are not known before a step"
        except ConfigError as error:
            reason = one_line(error)
        if reason is None and rows is not None:
            unlike = any(sorted(row) != sorted(rows[0]) for row in rows)
            return self._planned(step, rows) if unlike else None
        if self.takes:
            line = f"dynamic pipeline: microbatches keep the host's order: {reason}"
            self._say(Text(line, reason))
        return None

    def policy(self, step: Mapping[str, Any]) -> str | None:
        """The policy of a step in a planned order, in the place of ``auto``. With one chunk
        Megatron's order of tasks would not use the memory that the cap allows.
        """
        if self._config.policy != "auto":
            return None
        return "megatron" if len(compat.listed(step["model"])) > 1 else "eager"

    def _planned(self, step: Mapping[str, Any], rows: Rows) -> list[int] | None:
        """The planned order if it gains enough, with a line; with ``auto`` the line alone."""
        config, number, chunks = self._config, len(rows), len(compat.listed(step["model"]))
        ranks, cap = compat.pipeline_size(step.get("pg_collection")), config.activation_cap
        if parse_cap(cap, Geometry(ranks, 0, chunks, number)).needs_measuring:
            cap = "auto"
        splits = config.split_backward != "off"
        plan = plan_order(
            [sum(row) for row in rows],
            ranks,
            num_chunks=chunks,
            squares=[sum(tokens * tokens for tokens in row) for row in rows],
            costs=LengthCosts.transformer(compat.config_of(step).hidden_size),
            config=ScheduleConfig(
                policy="megatron", cap=cap, split_backward=splits, sizes_at_start=True
            ),
            memory=None,
            simulations=_MOST_TASKS // (2 * ranks * chunks * number),
        )
        self._hints = False
        if plan.gain < _GAIN or number != step["num_microbatches"]:
            return None
        what = f"{plan.name}: {plan.gain:.0%} less time for this step by simulation"
        rounding = "sums of gradients then equal the host's to rounding"
        named = setting("call_order", "megatron" if self.takes else "planned")
        line = f"microbatches are unlike: {named} runs them in another order ({what}); {rounding}"
        if self.takes:
            line = (
                f"microbatches run in a planned order ({what}), and losses are returned in the "
                f"host's; {rounding}. {named} keeps the host's order"
            )
        if not self._told:
            self._told = True
            self._say(Text(f"dynamic pipeline: {line}", named))
        return plan.order if self.takes else None

    def _why_not(self, step: Mapping[str, Any]) -> str | None:
        """The reason why microbatches must keep their order; None if there is none."""
        config = compat.config_of(step)
        for name in ("record", "replay", "slice_tokens"):
            if value := getattr(self._config, name):
                return Text(given := setting(name, value), given)
        replays = any(getattr(config, name, False) for name in _REPLAYS)
        if replays or any(compat.host_argument(name) for name in _HOST_REPLAYS):
            return "routers replay what calls have recorded in that order"
        if getattr(config, "expert_model_parallel_size", 1) > 1:
            return "replicas that share experts meet in their microbatches"
        if "global_aux_loss" in balancing_of(config):
            return "global_aux_loss looks at the microbatches so far"
        for each in compat.listed(step["data_iterator"]):
            known = hasattr(each, "__next__") or getattr(each, "micro_batch_indices", None)
            if each is not None and not known:
                return f"data comes from a {type(each).__name__}, no iterator"
        return None


class InOrder:
    """A training step whose microbatches may run in an order; a collective of all its ranks.

    Args:
        step: the keywords of the schedule's call.
        order: the host's numbers of its microbatches; None keeps their order.
    """

    def __init__(self, step: Mapping[str, Any], order: Sequence[int] | None) -> None:
        self._order, self._own = order, compat.listed(step["data_iterator"])
        self._agreed = _agreeing(step, order)
        self._given = list(self._own)
        if order is not None:
            self._given = [None if own is None else _reordered(own, order) for own in self._own]
        many = isinstance(step["data_iterator"], list)
        self.step = {**step, "data_iterator": self._given if many else self._given[0]}
        """The keywords that give the microbatches in the order."""

    def restored(self, losses: list[Any]) -> list[Any]:
        """The result of the step, in the host's order. The host's iterators go on behind it.

        Raises:
            ConfigError: ranks have run unlike orders, or forward steps took several items of an
                iterator for a microbatch.
        """
        host = setting("call_order", "megatron")
        if not self._agreed():
            raise ConfigError(
                "ranks planned unlike orders of microbatches: announce the same tokens on all "
                f"ranks, or use {host}",
                host,
            )
        if self._order is None:
            return losses
        number = len(self._order)
        for own, given in zip(self._own, self._given, strict=True):
            if given is None:
                continue
            taken = given.taken if isinstance(given, _Reordered) else given.offset - own.offset
            if taken > number:
                raise ConfigError(
                    f"forward steps took {taken} items of an iterator for {number} microbatches: "
                    f"a planned order needs one for each; use {host}",
                    host,
                )
            if not isinstance(given, _Reordered):
                own.offset = given.offset
        if len(losses) != number:  # not the last stage
            return losses
        found = dict(zip(self._order, losses, strict=True))
        return [found[place] for place in range(number)]


def _agreeing(step: Mapping[str, Any], order: Sequence[int] | None) -> Callable[[], bool]:
    """Compares the orders of all ranks of a replica beside the step; tells whether they agree."""
    mark = zlib.crc32(repr(order and list(order)).encode())
    device = next(compat.listed(step["model"])[0].parameters()).device
    groups = step.get("pg_collection") or compat.default_groups()
    found = []
    for group in (groups.pp, groups.tp, groups.cp):
        marks = torch.tensor([mark, -mark], device=device)
        most = torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(marks, op=most, group=group, async_op=True)
        found.append((work, marks))

    def agreed() -> bool:
        for work, _ in found:
            work.wait()
        return all(int(marks.sum()) == 0 for _, marks in found)

    return agreed


class _Reordered:
    """An iterator whose coming items have another order."""

    def __init__(self, own: Iterator[Any], order: Sequence[int]) -> None:
        items = map(next, itertools.repeat(own))  # a host's may have no __iter__
        coming = list(itertools.islice(items, len(order)))
        self._items = itertools.chain(
            [coming[place] for place in order if place < len(coming)], items
        )
        self.taken = 0

    def __iter__(self) -> _Reordered:
        return self

    def __next__(self) -> Any:
        self.taken += 1
        return next(self._items)


def _reordered(own: Any, order: Sequence[int]) -> Any:
    if not hasattr(own, "micro_batch_indices"):
        return _Reordered(own, order)
    found, indices, start = copy.copy(own), list(own.micro_batch_indices), own.offset
    indices[start : start + len(order)] = [indices[start + place] for place in order]
    found.micro_batch_indices = indices  # slime's and miles' samples of each microbatch
    return found
