"""The hosts of a board: which of its members share memory, and who talks to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BoardHosts:
    """One rank's view of a board, whose members may be on several hosts.

    Args:
        rank: this rank.
        members: the members on its host, the host's head first. They share a block of memory.
        heads: the heads of all hosts, the leader of the board first.
    """

    rank: int
    members: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, ranks: Sequence[int], host_of: Mapping[int, str]) -> BoardHosts:
        """The view of ``rank`` of a board of ``ranks``, leader first."""
        hosts: dict[str, list[int]] = {}
        for member in ranks:
            hosts.setdefault(host_of[member], []).append(member)
        heads = tuple(members[0] for members in hosts.values())
        return cls(rank, tuple(hosts[host_of[rank]]), heads)

    @property
    def is_head(self) -> bool:
        """True if this rank makes the block of its host."""
        return self.rank == self.members[0]

    @property
    def followers(self) -> list[int]:
        """The members that read the block that this rank makes."""
        return list(self.members[1:]) if self.is_head else []

    @property
    def hosts(self) -> list[int]:
        """The heads of the other hosts, if this rank leads the board."""
        return list(self.heads[1:]) if self.rank == self.heads[0] else []

    @property
    def upstream(self) -> int | None:
        """The member from which this rank gets the words; None for the leader."""
        if not self.is_head:
            return self.members[0]
        return None if self.rank == self.heads[0] else self.heads[0]

    @property
    def is_relayed(self) -> bool:
        """True on all hosts but the leader's."""
        return self.members[0] != self.heads[0]

    @property
    def num_lines(self) -> int:
        """Lines of the block: one per member here and, on the leader's host, one per other host."""
        return len(self.members) + (0 if self.is_relayed else len(self.heads) - 1)

    @property
    def partners(self) -> list[int]:
        """The members that this rank has a link with."""
        upstream = [] if self.upstream is None else [self.upstream]
        return [*upstream, *self.followers, *self.hosts]
