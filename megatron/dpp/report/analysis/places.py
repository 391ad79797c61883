"""Places of ranks in their job, and the names of ranks and slices in all reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.report.reader import TraceFile


@dataclass(frozen=True)
class JobShape:
    """The job's shape: each rank's stage, and its replica, tensor rank and context rank."""

    num_ranks: int
    num_chunks: int
    pipeline: dict[int, int]
    replica: dict[int, tuple[int, ...]]
    schedule: str

    @classmethod
    def of(cls, files: list[TraceFile]) -> JobShape:
        """Read from the headers of the files."""
        layout = files[0].layout
        places = {file.rank: file.layout for file in files}
        return cls(
            num_ranks=layout.pipeline_size,
            num_chunks=layout.num_chunks,
            pipeline={rank: place.pipeline for rank, place in places.items()},
            replica={rank: (p.data, p.tensor, p.context) for rank, p in places.items()},
            schedule=layout.schedule,
        )

    def name_of(self, rank: int) -> str:
        """A rank by its place and number, without what the job has only one of: ``stage 1, replica
        0 (rank 2)``.
        """
        numbers = zip(*self.replica.values(), strict=True)
        words = ("replica", "tensor rank", "context rank")
        parts = [
            f", {word} {own}"
            for word, own, found in zip(words, self.replica[rank], numbers, strict=False)
            if len(set(found)) > 1
        ]
        return f"stage {self.pipeline[rank]}{''.join(parts)} (rank {rank})"

    def stage_of(self, rank: int) -> list[int]:
        """The ranks of a rank's stage, of all replicas."""
        return [peer for peer, stage in self.pipeline.items() if stage == self.pipeline[rank]]

    def pipelines(self) -> list[list[int]]:
        """Ranks of every pipeline, in order of their stages."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self.pipeline, key=lambda r: self.pipeline[r]):
            groups.setdefault(self.replica[rank], []).append(rank)
        return [groups[key] for key in sorted(groups)]


def slice_names(groups: Sequence[int]) -> list[str]:
    """The ends of the labels of each unit's tasks: `` s2/3`` for the second of three slices.

    >>> slice_names([1, 2])
    ['', ' s1/2', ' s2/2']
    """
    return [f" s{i + 1}/{number}" * (number > 1) for number in groups for i in range(number)]
