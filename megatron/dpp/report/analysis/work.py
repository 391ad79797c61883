"""Recorded costs of each stage's tasks, for the straggler search and for what-if.

A *cell* is one (rank, chunk). A task cut into pieces counts as one, with the pieces' times added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.dpp.report.analysis.model import Iteration
from megatron.dpp.report.analysis.places import full_name
from megatron.dpp.report.reader import TraceFile

Cell = tuple[int, int]

UNDISTURBED = 0.3
"""Quantile of recorded times that stands for an undisturbed task; disturbances only add time."""


@dataclass(frozen=True, slots=True)
class Work:
    """Times of one iteration's tasks in ns: ``tasks[(rank, chunk)][kind][microbatch]``, each rank's
    tasks (kind, chunk, microbatch, piece) in the order in which they ran, and the groups of its
    microbatches, as in ``Geometry``.
    """

    number: int
    tasks: dict[Cell, dict[str, dict[int, int]]]
    orders: dict[int, list[tuple[str, int, int, int]]] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def typical(self, cell: Cell, kind: str) -> float:
        """Time of an undisturbed task of a kind, 0 where there is none.

        A rank that is slow now and then, or jitter, hardly moves it; one that is always slow does.
        """
        times = sorted(self.tasks[cell].get(kind, {}).values())
        return float(times[int(len(times) * UNDISTURBED)]) if times else 0.0

    def num_tasks(self, rank: int) -> int:
        """Tasks of a rank, pieces counted as one."""
        own = [kinds for (r, _), kinds in self.tasks.items() if r == rank]
        return sum(len(times) for kinds in own for times in kinds.values())

    def per_microbatch(self, cell: Cell) -> float:
        """Undisturbed time of all of a cell's work for one microbatch."""
        return sum(self.typical(cell, kind) for kind in self.tasks[cell])


def work_of(iteration: Iteration) -> Work:
    """Add up the pieces of every task of an iteration."""
    tasks: dict[Cell, dict[str, dict[int, int]]] = {}
    for rank in iteration.ranks.values():
        for task in rank.tasks:
            kinds = tasks.setdefault((rank.rank, task.chunk), {})
            times = kinds.setdefault(task.kind, {})
            times[task.microbatch] = times.get(task.microbatch, 0) + task.length
    orders = {
        rank.rank: [(task.kind, task.chunk, task.microbatch, task.piece) for task in rank.tasks]
        for rank in iteration.ranks.values()
    }
    groups = {number: rank.groups for number, rank in iteration.ranks.items()}
    return Work(iteration.number, tasks, orders, groups)


@dataclass(frozen=True)
class JobShape:
    """The job's shape and where every rank stands in it."""

    num_ranks: int
    num_chunks: int
    pipeline: dict[int, int]
    replica: dict[int, tuple[int, int, int]]
    schedule: str

    @classmethod
    def of(cls, files: list[TraceFile]) -> JobShape:
        """Read from the headers of the files."""
        layout = files[0].layout
        return cls(
            num_ranks=layout.pipeline_size,
            num_chunks=layout.num_chunks,
            pipeline={file.rank: file.layout.pipeline for file in files},
            replica={
                file.rank: (file.layout.data, file.layout.tensor, file.layout.context)
                for file in files
            },
            schedule=layout.schedule,
        )

    def name_of(self, rank: int) -> str:
        """A rank by its place and number, as all reports name it."""
        several = [len(set(numbers)) > 1 for numbers in zip(*self.replica.values(), strict=True)]
        own = zip(self.replica[rank], several, strict=True)
        return full_name(rank, self.pipeline[rank], *(n if many else None for n, many in own))

    def label_of(self, rank: int) -> str:
        """A rank by its stage and number, short."""
        return f"stage {self.pipeline[rank]}, rank {rank}"

    def stage_of(self, rank: int) -> list[int]:
        """The ranks of a rank's stage, of all replicas."""
        return [each for each, place in self.pipeline.items() if place == self.pipeline[rank]]

    def pipelines(self) -> list[list[int]]:
        """Ranks of every pipeline, in order of their stages."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank in sorted(self.pipeline, key=lambda r: self.pipeline[r]):
            groups.setdefault(self.replica[rank], []).append(rank)
        return [groups[key] for key in sorted(groups)]
