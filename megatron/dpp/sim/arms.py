"""Arms of a comparison of schedules, and the parts of their gain.

Each arm adds one ingredient to another arm. An ingredient's part is the time between the two, so
the parts of an arm add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron.dpp.sim.costs import Costs, Shape
from megatron.dpp.sim.result import Result
from megatron.dpp.sim.schedules import ScheduleConfig, run_static

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


_DEFAULT = ScheduleConfig()


@dataclass(frozen=True)
class Arms:
    """The simulated arms of one shape.

    Args:
        num_chunks: per rank; with one the static schedule is 1F1B.
        config: settings of ``dynamic``. Without ``split_backward`` the costs have no times of their
            own for ``W``.
    """

    num_chunks: int
    config: ScheduleConfig = _DEFAULT

    @property
    def static(self) -> str:
        """Name of the static arm."""
        return "interleaved" if self.num_chunks > 1 else "1f1b"

    @property
    def steps(self) -> dict[str, tuple[str, str]]:
        """The steps of the arms above the static one."""
        fused = {FUSED_STATIC: (self.static, "order"), FUSED: (FUSED_STATIC, "memory")}
        if not self.config.split_backward:
            return fused
        return {
            MEGATRON_W: (self.static, "W"),
            **({EAGER: (MEGATRON_W, "memory")} if self.num_chunks == 1 else {}),
            **fused,
            DYNAMIC_STATIC: (MEGATRON_W, "order"),
            DYNAMIC: (DYNAMIC_STATIC, "memory"),
        }

    @property
    def names(self) -> list[str]:
        """The arms, the static one first."""
        return [self.static, *self.steps]

    def run(self, name: str, shape: Shape, costs: Costs) -> Result:
        """Simulate one arm."""
        config = self.config
        if name == self.static:
            return run_static(name, shape, costs)
        schedule = replace(
            config,
            policy={MEGATRON_W: "megatron", EAGER: "eager"}.get(name, config.policy),
            cap=config.cap if name in (FUSED, DYNAMIC, EAGER) else "static",
            split_backward=name not in (FUSED, FUSED_STATIC),
        )
        return schedule.run(shape, costs)


def part_names(found: Iterable[Mapping[str, float]]) -> list[str]:
    """The ingredients of some arms in their usual order, merged ones last."""
    names = dict.fromkeys(name for each in found for name in each)
    known = [name for name in INGREDIENTS if name in names]
    return known + [name for name in names if name not in known]


def part_cells(found: Mapping[str, float] | None, names: Iterable[str]) -> list[str]:
    """A row's cells: each ingredient's part and their sum, in per cent of the static arm's time."""
    cells = [f"{100 * found[name]:.1f}" if found and name in found else "-" for name in names]
    return [*cells, f"{100 * sum(found.values()):.1f}" if found else "-"]
