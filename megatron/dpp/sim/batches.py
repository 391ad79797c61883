"""Plans of global batches: which sequences each replica runs, in which microbatches and order.

A plan depends on the lengths and the settings alone, so every rank computes the same one without a
message, and a resumed run computes it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp.sim.orders import OrderPlanner, PlannedOrder, Question
from megatron.dpp.sim.packing import balance, orders, pack
from megatron.dpp.sim.slices import Row, cut, row_cost, tokens_for
from megatron.dpp.sim.weighing import WHOLE, Choice, least_slice
from megatron.dpp.slice_sizes import sizes_to_weigh

ORDERS = ("drawn", "ascending", "small-big-small", "planned")
"""Orders of a replica's microbatches."""


@dataclass(frozen=True)
class BatchTokens:
    """Tokens of one or more global batches.

    Args:
        real: without padding.
        padded: with padding.
        squares: sum of the squared lengths.
    """

    real: int = 0
    padded: int = 0
    squares: int = 0

    def __add__(self, other: BatchTokens) -> BatchTokens:
        return BatchTokens(
            self.real + other.real, self.padded + other.padded, self.squares + other.squares
        )

    @property
    def padding(self) -> float:
        """Share of the padding."""
        return 1.0 - self.real / max(self.padded, 1)


Microbatches = list[list[int]]
"""Sequences of each microbatch, as indices into the global batch."""

_PER_RANK = 4
"""Microbatches per pipeline rank that ``even`` packing makes at least, if there are enough
sequences."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Settings of a plan, equal on all ranks.

    Args:
        num_replicas: data-parallel size.
        num_ranks: pipeline size.
        micro_batch_size: sequences of a microbatch that is not packed.
        multiple: the microbatches of a replica are a multiple of this.
        packing: a name of :data:`megatron.dpp.sim.packing.PACKINGS`.
        budget: most tokens of a packed microbatch.
        length_multiple: what sequence and context parallelism divide; rows are padded to it.
        buckets: lengths that rows are padded to, ascending; longer rows are not.
        order: a name of :data:`ORDERS`.
        costs: time of a microbatch.
        slices: tokens of a slice into which longer sequences are cut; 0 for ``auto``, None for no
            cut. Rows of slices run longest first where ``order`` is ``drawn``.
        sorts: otherwise they run as drawn.
        holds_whole: memory holds whole sequences; otherwise ``auto`` always cuts.
    """

    num_replicas: int = 1
    num_ranks: int = 1
    micro_batch_size: int = 1
    multiple: int = 1
    packing: str = "none"
    budget: int = 0
    length_multiple: int = 1
    buckets: tuple[int, ...] = ()
    order: str = "drawn"
    costs: LengthCosts = LengthCosts()  # noqa: RUF009 - frozen
    slices: int | None = None
    sorts: bool = True
    holds_whole: bool = True

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Rows of a microbatch, and their length."""
        return (1 if self.packing != "none" else len(lengths)), self.width(lengths)

    def width(self, lengths: Sequence[int]) -> int:
        """Tokens of a microbatch's rows: all sequences in one when they are packed, else the
        longest."""
        width = max(lengths) if self.packing == "none" else sum(lengths)
        width = -(-width // self.length_multiple) * self.length_multiple
        return next((bucket for bucket in self.buckets if bucket >= width), width)

    def cost(self, lengths: Sequence[int]) -> float:
        """Time of a microbatch's forward, backward and weight gradients."""
        return self.costs.total(lengths)


def share_batch(lengths: Sequence[int], settings: BatchSettings) -> list[Microbatches]:
    """The microbatches of each replica, in the drawn order.

    Args:
        lengths: of the global batch's sequences, in tokens.

    Raises:
        ConfigError: the sequences do not fill the microbatches, or one exceeds the budget.
    """
    bins = _bins(lengths, settings)
    costs = [settings.cost([lengths[i] for i in each]) for each in bins]
    return [[bins[i] for i in given] for given in balance(costs, settings.num_replicas)]


Batch = list[list[Row]]
"""Rows of each replica. A row's sequences are indices into the global batch."""


def ways_to_run(
    lengths: Sequence[int], settings: BatchSettings, *, weighs: bool
) -> dict[int, Batch]:
    """The rows of a global batch by tokens of a slice, 0 for whole sequences; coarsest first.

    Args:
        weighs: several ways for ``auto``; otherwise one.
    """
    if settings.slices is None:
        return {WHOLE: _whole_rows(lengths, settings)}
    costs, total = settings.costs, sum(lengths) // settings.num_replicas
    num_ranks, multiple = settings.num_ranks, settings.length_multiple
    if settings.slices or not weighs:
        tokens = tokens_for(total, num_ranks, costs, asked=settings.slices, multiple=multiple)
        return {tokens: cut_batch(lengths, settings, tokens)}
    sizes = sizes_to_weigh(total, num_ranks, least=least_slice(costs), multiple=multiple)
    cuts = {tokens: cut_batch(lengths, settings, tokens) for tokens in sizes}
    if not settings.holds_whole:
        return cuts
    whole = {WHOLE: _whole_rows(lengths, settings)}
    return whole | {tokens: batch for tokens, batch in cuts.items() if _is_cut(batch)}


def _whole_rows(lengths: Sequence[int], settings: BatchSettings) -> Batch:
    return [
        [Row(tuple(each), own, (sum(own),)) for each in mine for own in [_of(lengths, each)]]
        for mine in share_batch(lengths, settings)
    ]


def _of(lengths: Sequence[int], indices: Sequence[int]) -> tuple[int, ...]:
    return tuple(lengths[index] for index in indices)


def _is_cut(batch: Batch) -> bool:
    return any(len(row.ends) > 1 for rows in batch for row in rows)


def cut_batch(lengths: Sequence[int], settings: BatchSettings, tokens: int) -> Batch:
    """The rows of each replica, which run as slices where they are cut: sequences of a replica are
    cut or packed among themselves.

    Args:
        tokens: most tokens of a slice.
    """
    costs, multiple = settings.costs, settings.length_multiple
    found = []
    for given in balance([costs.total([length]) for length in lengths], settings.num_replicas):
        rows = cut(
            [lengths[i] for i in given], tokens, costs, multiple=multiple,
            packs=settings.packing != "none", drawn=not settings.sorts,
        )  # fmt: skip
        found.append(
            [replace(row, sequences=tuple(given[i] for i in row.sequences)) for row in rows]
        )
    return found


def _bins(lengths: Sequence[int], settings: BatchSettings) -> Microbatches:
    """All microbatches of a global batch, each replica's number a multiple of ``multiple``."""
    size, count = settings.micro_batch_size, len(lengths)
    if settings.packing == "none":
        return [list(range(start, start + size)) for start in range(0, count, size)]
    step = settings.num_replicas * settings.multiple
    if count < step:
        raise ConfigError(
            f"global_batch_size={count!r}: packing={settings.packing!r} needs at least {step} "
            "sequences, one per microbatch"
        )
    if settings.packing != "even":
        return _split(pack(lengths, settings.budget, settings.packing), lengths, step)
    costs = [settings.cost([length]) for length in lengths]
    least = -(-sum(lengths) // settings.budget)
    wanted = max(least, _PER_RANK * settings.num_ranks * settings.num_replicas)
    fewest = min(-(-min(wanted, count) // step), count // step) * step
    for num_bins in range(fewest, count + 1, step):
        try:
            found = pack(lengths, settings.budget, "even", costs=costs, num_bins=num_bins)
        except ConfigError:
            continue  # they do not fit into so few
        return [sorted(each) for each in found]
    return _split([[index] for index in range(count)], lengths, step)


def _split(bins: Microbatches, lengths: Sequence[int], step: int) -> Microbatches:
    """``bins`` with the largest cut in two until their number is a multiple of ``step``; where
    that is more than there are sequences, bins are joined."""
    bins = [list(each) for each in bins]
    while len(bins) % step:
        several = [index for index, each in enumerate(bins) if len(each) > 1]
        if not several:
            raise ConfigError(
                f"{len(lengths)} sequences, none of which share a microbatch, are no multiple of "
                f"{step} microbatches; change global_batch_size"
            )
        index = max(several, key=lambda i: sum(lengths[j] for j in bins[i]))
        half = len(bins[index]) // 2
        bins[index : index + 1] = [bins[index][:half], bins[index][half:]]
    return bins


class BatchPlans:
    """The plans of a data set's global batches, each computed once.

    Args:
        lengths: gives the lengths of samples ``first`` to ``first + batch_size``; fewer at the end
            of the data.
        replica: number of this data-parallel rank.
        planner: plans the order ``planned``, and weighs slices of ``auto``. Without one ``auto``
            cuts by its rule.
    """

    def __init__(
        self,
        lengths: Callable[[int, int], Sequence[int]],
        batch_size: int,
        replica: int,
        settings: BatchSettings,
        planner: OrderPlanner | None = None,
    ) -> None:
        self.batch_size, self.settings, self.planner = batch_size, settings, planner
        self._drawn_lengths, self._replica = lengths, replica
        if settings.order == "planned" and planner is None:
            raise ConfigError("order='planned' needs a planner")
        self.lengths = functools.lru_cache(maxsize=8)(self._lengths)
        self._ways = functools.lru_cache(maxsize=8)(self._find_ways)
        self._ordered = functools.lru_cache(maxsize=8)(self._order)

    def microbatches(self, first: int) -> Microbatches:
        """This replica's microbatches of the global batch that begins with sample ``first``, as
        numbers of samples."""
        return [[first + index for index in row.sequences] for row in self._own_rows(first)]

    def num_microbatches(self, first: int) -> int:
        """Microbatches of each replica in that global batch."""
        return len(self._rows(first)[self._replica])

    def slice_ends(self, first: int) -> list[tuple[int, ...]]:
        """Ends of the slices of this replica's microbatches of that global batch, in tokens with
        padding, in their order; a single one where a microbatch is not cut."""
        width = self.settings.width
        return [(*row.ends[:-1], width(row.lengths)) for row in self._own_rows(first)]

    def choice(self, first: int) -> Choice | None:
        """The choice of ``auto`` for that global batch; None where there was none to make."""
        return self._ordered(first).choice

    def slice_tokens(self, first: int) -> int:
        """Most tokens of a slice of that global batch; 0 where sequences run whole."""
        choice, ways = self.choice(first), self._ways(first)
        return choice.tokens if choice is not None else next(iter(ways))

    def policy(self, first: int) -> str | None:
        """The policy that runs that global batch; None for that of the run."""
        return self._ordered(first).policy

    def own_lengths(self, first: int) -> list[list[int]]:
        """Lengths of this replica's microbatches of that global batch, in their order."""
        return [list(row.lengths) for row in self._own_rows(first)]

    def own_sizes(self, first: int) -> list[int]:
        """Tokens of this replica's microbatches of that global batch, with padding, in their
        order."""
        shapes = (self.settings.shape(each) for each in self.own_lengths(first))
        return [rows * width for rows, width in shapes]

    def tokens(self, first: int) -> BatchTokens:
        """Tokens of that global batch over all replicas."""
        lengths = self.lengths(first)
        shapes = (self.settings.shape(row.lengths) for mine in self._rows(first) for row in mine)
        padded = sum(rows * width for rows, width in shapes)
        return BatchTokens(sum(lengths), padded, sum(length**2 for length in lengths))

    def drawn_places(self, first: int) -> list[int]:
        """Place of each of this replica's microbatches in the drawn order."""
        return list(self._ordered(first).order)

    def close(self) -> None:
        """Ends the planner. May be called twice."""
        if self.planner is not None:
            self.planner.close()

    def _lengths(self, first: int) -> Sequence[int]:
        return self._drawn_lengths(first, first + self.batch_size)

    def _find_ways(self, first: int) -> dict[int, Batch]:
        return ways_to_run(self._whole_batch(first), self.settings, weighs=self.planner is not None)

    def _rows(self, first: int) -> Batch:
        """The rows of all replicas as they run."""
        return self._ways(first)[self.slice_tokens(first)]

    def _own_rows(self, first: int) -> list[Row]:
        """This replica's rows, in their order."""
        mine = self._rows(first)[self._replica]
        return [mine[i] for i in self._ordered(first).order]

    def _whole_batch(self, first: int) -> Sequence[int]:
        lengths = self.lengths(first)
        if len(lengths) < self.batch_size:
            raise DataError(
                f"the data set has ended: {len(lengths)} of {self.batch_size} sequences are left "
                "for a step; lower train_iters, add data, or give weights to the prefixes of "
                "data_path (then they repeat)"
            )
        return lengths

    def _question(self, first: int) -> Question:
        """All replicas choose by the rows of the first, which has the longest sequence."""
        ways = self._ways(first)
        own = {tokens: batch[self._replica] for tokens, batch in ways.items()}
        weighs = self.settings.slices == 0
        others = weighs and self._replica
        weighed = {tokens: batch[0] for tokens, batch in ways.items()} if others else {}
        return Question(own, weighed, self.settings.order, weighs)

    def _order(self, first: int) -> PlannedOrder:
        if self.planner is None:
            (batch,) = self._ways(first).values()
            costs = [row_cost(row, self.settings.costs) for row in batch[self._replica]]
            name = self.settings.order
            return PlannedOrder(orders(costs, self.settings.num_ranks)[name], name)
        found = self.planner.take(first, self._question(first))
        after = first + self.batch_size
        if len(self.lengths(after)) == self.batch_size:
            self.planner.ask(after, self._question(after))
        return found
