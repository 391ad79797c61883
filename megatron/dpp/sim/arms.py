"""Arms of a comparison of schedules, and the parts of their gain.

Each arm adds one ingredient to another arm. An ingredient's part is the time between the two, so
the parts of an arm add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import find_schedule, run_static

MEGATRON_W = "Megatron's order + W"
FUSED_STATIC = "fused, cap static"
FUSED = "dynamic, fused"
EAGER = "eager + W"
"""A fixed order with as much memory: with one chunk per rank."""
DYNAMIC_STATIC = "dynamic, cap static"
DYNAMIC = "dynamic"
INGREDIENTS = ("transport", "graphs", "W", "order", "memory")
"""Our links in place of NCCL; CUDA graphs; the split backward; the order chosen at run time, at the
static schedule's memory; the memory that a larger cap allows."""

Steps = Mapping[str, tuple[str, str]]
"""Arm -> the arm below it and the ingredient that it adds."""


def steps(static: str, *, split: bool = True) -> dict[str, tuple[str, str]]:
    """The steps of the simulated arms above the arm ``static``.

    Args:
        split: the costs have times of their own for ``W``.
    """
    fused = {FUSED_STATIC: (static, "order"), FUSED: (FUSED_STATIC, "memory")}
    if not split:
        return fused
    return {
        MEGATRON_W: (static, "W"),
        **({EAGER: (MEGATRON_W, "memory")} if static == "1f1b" else {}),
        **fused,
        DYNAMIC_STATIC: (MEGATRON_W, "order"),
        DYNAMIC: (DYNAMIC_STATIC, "memory"),
    }


def parts(times: Mapping[str, float], chain: Steps) -> dict[str, dict[str, float]]:
    """Time that each ingredient of each arm saves, as a share of the lowest arm's.

    An arm that ``times`` lacks is left out: the next one then has the ingredients of both, as in
    ``W + order``. Arms without a time, or without a timed arm below them, have no parts.

    Args:
        times: of the arms, in any unit.
        chain: the steps of the arms.
    """
    found: dict[str, dict[str, float]] = {}
    for arm in times:
        path, low = [arm], arm
        added: list[tuple[str, str, str]] = []
        names: list[str] = []
        while low in chain:
            low, name = chain[low]
            names.insert(0, name)
            if low in times:
                added.insert(0, (path[-1], low, " + ".join(names)))
                path.append(low)
                names = []
        if added:
            base = times[path[-1]]
            found[arm] = {name: (times[b] - times[a]) / base for a, b, name in added}
    return found


@dataclass(frozen=True)
class Arms:
    """The simulated arms of one shape.

    Args:
        num_chunks: per rank; with one the static schedule is 1F1B.
        cap: of the arms at the cap that a run has, as ``DppConfig.activation_cap``.
        split: the costs have times of their own for ``W``.
        stock: as in :class:`~megatron.dpp.sim.schedules.ScheduleConfig`.
        beta: share of an activation that ``B`` frees.
        w_pieces: pieces of a chunk's ``W``.
        group: microbatch group size; ``None`` is the number of ranks.
        lead: ranks choose this long before their running task ends.
        policy: of the dynamic arms.
    """

    num_chunks: int
    cap: str = "auto"
    split: bool = True
    stock: float = math.inf
    beta: float = 0.0
    w_pieces: int = 1
    group: int | None = None
    lead: float = 0.0
    policy: str = "dynamic"

    @property
    def static(self) -> str:
        """Name of the static arm."""
        return "interleaved" if self.num_chunks > 1 else "1f1b"

    @property
    def steps(self) -> dict[str, tuple[str, str]]:
        """The steps of these arms."""
        return steps(self.static, split=self.split)

    @property
    def names(self) -> list[str]:
        """The arms, the static one first."""
        return [self.static, *self.steps]

    def run(self, name: str, shape: Shape, costs: Costs) -> Result:
        """Simulate one arm."""
        if name == self.static:
            return run_static(name, shape, costs, beta=self.beta, group=self.group)
        schedule = find_schedule(
            {MEGATRON_W: "megatron", EAGER: "eager"}.get(name, self.policy),
            cap=self.cap if name in (FUSED, DYNAMIC, EAGER) else "static",
            split_backward=name not in (FUSED, FUSED_STATIC),
            stock=self.stock,
            beta=self.beta,
            w_pieces=self.w_pieces,
            group=self.group,
        )
        return schedule.run(shape, costs, lead=self.lead)


def part_names(found: Iterable[Mapping[str, float]]) -> list[str]:
    """The ingredients of some arms in their usual order, merged ones last."""
    names = dict.fromkeys(name for each in found for name in each)
    known = [name for name in INGREDIENTS if name in names]
    return known + [name for name in names if name not in known]


def part_cells(found: Mapping[str, float] | None, names: Iterable[str]) -> list[str]:
    """A row's cells: each ingredient's part and their sum, in per cent of the static arm's time."""
    cells = [f"{100 * found[name]:.1f}" if found and name in found else "-" for name in names]
    return [*cells, f"{100 * sum(found.values()):.1f}" if found else "-"]
