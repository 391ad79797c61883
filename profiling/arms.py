"""The arms that all benchmarks of schedules share, and the table of their gains."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import harness

from megatron.dpp.config import DppConfig
from megatron.dpp.sim.arms import part_cells, part_names, parts

STATIC, GRAPHS = "static", "static, graphs"
LINKS, GRAPHS_LINKS = "static, links", "static, graphs, links"
EAGER_W = "eager megatron"
"""Megatron's order with a split backward and no CUDA graphs: it separates W from graphs."""


@dataclass(frozen=True)
class Arm:
    """A schedule of a comparison.

    Args:
        below: the arm that it adds ``adds`` to, one of ``sim.arms.INGREDIENTS``; empty for the
            lowest.
        policy: as ``--dpp-policy``; None for megatron-core's own schedule.
        cap: as ``--dpp-activation-cap``.
        split: with tasks of their own for weight gradients.
        graphs: its tasks may be replayed as CUDA graphs, as ``--dpp-cuda-graphs auto`` decides.
    """

    below: str = ""
    adds: str = ""
    policy: str | None = None
    cap: str = "static"
    split: bool = True
    graphs: bool = True

    def settings(self) -> dict[str, Any]:
        """The settings of this arm under ``DppSchedule``, as fields of a :class:`DppConfig`."""
        assert self.policy is not None
        found = {
            "policy": self.policy,
            "activation_cap": self.cap,
            "split_backward": "on" if self.split else "off",
        }
        return found if self.graphs else found | {"cuda_graphs": "off"}

    def config(self, **more: Any) -> DppConfig:
        """:meth:`settings`, and further ones."""
        return DppConfig(**self.settings(), **more)


ARMS = {
    STATIC: Arm(),
    GRAPHS: Arm(STATIC, "graphs"),
    LINKS: Arm(STATIC, "transport"),
    GRAPHS_LINKS: Arm(GRAPHS, "transport"),
    EAGER_W: Arm(LINKS, "W", "megatron", graphs=False),
    "megatron": Arm(LINKS, "W", "megatron"),
    "fused, cap static": Arm(LINKS, "order", "dynamic", split=False),
    "fused": Arm("fused, cap static", "memory", "dynamic", "auto", split=False),
    "dynamic, cap static": Arm("megatron", "order", "dynamic"),
    "dynamic": Arm("dynamic, cap static", "memory", "dynamic", "auto"),
}
"""megatron-core's own schedule over NCCL, with CUDA graphs, over our links, with both; its order
with a split backward, without graphs and with them as they are chosen; the dynamic one with a fused
backward and with a split one, at the static schedule's memory and at the default cap."""


def steps(*, graphs: bool = False, eager: bool = False) -> dict[str, tuple[str, str]]:
    """The steps of :data:`ARMS`.

    Args:
        graphs: the dynamic arms replay CUDA graphs.
        eager: the arm without graphs was measured, so that what they add stands apart from W.
    """
    found = {name: (arm.below, arm.adds) for name, arm in ARMS.items() if arm.below}
    if graphs:
        for name, (below, adds) in found.items():
            low = below == LINKS and name != EAGER_W
            found[name] = (GRAPHS_LINKS if low else below, adds)
    if eager:
        found["megatron"] = (EAGER_W, "graphs")
    return found


@dataclass(frozen=True)
class Measured:
    """The measurements of an arm.

    Args:
        arm: a name of :data:`ARMS`.
        group: arms of one group are compared: they run the same model and microbatches.
        queues: hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``); empty where they were not set.
        times: ms of a step, one of each run, round or step.
        reserved: peak bytes that the worst rank reserved; 0 where not measured.
        equal: what the comparison of the losses said.
    """

    arm: str
    group: str
    queues: str
    times: Sequence[float]
    reserved: float = 0.0
    equal: str = "-"

    @property
    def ms(self) -> float:
        """The median."""
        return statistics.median(self.times)

    def cells(self) -> list[object]:
        """The row without ratio and parts."""
        low, high = min(self.times), max(self.times)
        spread = f"{self.ms:.1f} ({low:.1f}..{high:.1f}, {len(self.times)})"
        memory = f"{self.reserved / 1e9:.2f}" if self.reserved else "-"
        return [self.group, self.arm, self.queues or "-", spread, memory]


def gain_rows(found: Sequence[Measured], *, graphs: bool) -> tuple[list[str], list[list[object]]]:
    """Headings and rows of the table of gains; parts are in per cent of the fastest static row.

    An arm that was measured with several numbers of queues counts with the fastest; the static
    schedule does so, too, as a user runs it best. Rows that do not count have no parts.
    """
    best: dict[tuple[str, str], Measured] = {}
    for one in found:
        key = one.group, one.arm
        best[key] = min(best.get(key, one), one, key=lambda each: each.ms)
    groups = dict.fromkeys(one.group for one in found)
    saved = {}
    for group in groups:
        times = {a: one.ms for (g, a), one in best.items() if g == group}
        saved[group] = parts(times, steps(graphs=graphs, eager=EAGER_W in times))
    names = part_names(each for group in saved.values() for each in group.values())
    rows = []
    for one in found:
        counts = best[one.group, one.arm] is one
        lowest = best.get((one.group, STATIC)) or best.get((one.group, GRAPHS))
        ratio = f"{one.ms / lowest.ms:.3f}" if lowest else "-"
        cells = part_cells(saved[one.group].get(one.arm) if counts else None, names)
        rows.append([*one.cells(), ratio, *cells, one.equal])
    heads = ["group", "arm", "queues", "median ms (min..max, number)", "reserved GB", "/ static"]
    return [*heads, *(f"{name}, %" for name in names), "all, %", "losses equal"], rows


def print_gains(found: Sequence[Measured], *, graphs: bool = False) -> None:
    """Print the table of gains."""
    heads, rows = gain_rows(found, graphs=graphs)
    print("\nWhat comes from what: the parts of a row add up to `all`\n")
    harness.print_table(" | ".join(heads), rows)
