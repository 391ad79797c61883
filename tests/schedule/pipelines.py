"""Pipelines that are stepped by hand, and walks over all of their states."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.dpp.direction import Direction
from megatron.dpp.schedule import (
    Action,
    Budget,
    Geometry,
    Kind,
    MemoryLimit,
    Reference,
    Scheduler,
    View,
    key_sizes,
    parse_cap,
    peak_size,
    reference_order,
)


def follow(scheduler: Scheduler, script: str) -> None:
    """Checks what a rank does, word by word: ``f1=2`` and ``b0=1`` are inputs and gradients of a
    chunk that have arrived, ``s0=3`` is the size of a microbatch, ``-`` is no task, and everything
    else the next task.
    """
    for place, word in enumerate(script.split()):
        if match := re.fullmatch(r"([fbs])(\d+)=(\d+)", word):
            number, value = int(match[2]), int(match[3])
            if match[1] == "s":
                scheduler.learn(number, value)
            else:
                scheduler.arrived("fb".index(match[1]), number, value)
            continue
        found = scheduler.next()
        expected = "-" if found is None else str(found)
        assert expected == word, f"word {place} of {script}"


def allowed(view: View) -> list[Action]:
    """Every action that may run now."""
    chunks = range(view.geometry.num_chunks)
    asked = [view.forward(c) for c in chunks] + [view.backward(c) for c in chunks]
    return [action for action in [*asked, view.weight()] if action is not None]


def wild(rng: random.Random, *, forwards_first: bool = False) -> Callable[[View], Action | None]:
    """A policy that takes any task that may run."""

    def policy(view: View) -> Action | None:
        options = allowed(view)
        forwards = [each for each in options if each.kind is Kind.F] if forwards_first else []
        return rng.choice(forwards or options) if options else None

    return policy


class Pipeline:
    """All ranks of an iteration and the messages between them.

    Args:
        sizes: of the microbatches; empty for equal ones. The cap is then the least that is possible
            with what is known at the start.
        know: when ranks learn sizes: at the ``start``, at the ``arrival`` of an input, or after a
            ``forward``.
        groups: of linked microbatches.
        kappa: share of their keys.
        weights: of each chunk.
        heads: bounds the last chunk's activations, too, as in Megatron's order.
        target: a soft limit in sizes.
        cap: where there are no sizes.
    """

    def __init__(
        self, p: int, v: int, m: int, *, sizes: Sequence[int] = (), know: str = "start",
        groups: Sequence[int] = (), kappa: float = 0.0, weights: Sequence[float] = (),
        heads: bool = False, target: int | None = None, cap: str = "strict",
        pieces: tuple[int, ...] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.p, self.v, self.m, self.sizes, self.know = p, v, m, tuple(sizes), know
        self.pieces, self.weights = pieces or (1,) * v, tuple(weights)
        self.geometries = [
            Geometry(p, rank, v, m, w_pieces=self.pieces, groups=tuple(groups)) for rank in range(p)
        ]
        self.split = settings.pop("split", True)
        bounds = cap, kappa, heads, target
        self.ranks = [self._scheduler(one, bounds, settings) for one in self.geometries]
        self.ran: list[list[Action]] = [[] for _ in range(p)]
        self.sent: dict[tuple[Direction, int], int] = {}
        self.delivered: dict[tuple[Direction, int], int] = {}

    def _scheduler(
        self, geometry: Geometry, bounds: tuple[str, float, bool, int | None], settings: Any
    ) -> Scheduler:
        cap, kappa, heads, target = bounds
        settings = {"split_backward": self.split, **settings}
        if not self.sizes:
            return Scheduler(geometry, cap=parse_cap(cap, geometry).chunks, **settings)
        largest, order = max(self.sizes), reference_order(geometry)
        known = self.know == "start"
        assumed = self.sizes if known else [largest] * self.m
        held = with_keys(assumed, geometry.groups, kappa) if known else assumed
        of_head, limits = heads_of(self.v), []
        if heads:
            most = peak_size(order, assumed, of_head) / largest
            limits.append(MemoryLimit(most, of_head, deferred=False))
        if target is not None:
            soft = {"assumed": 1 + largest // 3, "soft": True, "unlike": True}
            limits.append(MemoryLimit(target / largest, self.weights, **soft))  # type: ignore[arg-type]
        return Scheduler(
            geometry, cap=peak_size(order, held, self.weights) / largest, largest=largest,
            sizes=self.sizes if known else None, weights=self.weights, limits=limits, kappa=kappa,
            **settings,
        )  # fmt: skip

    def deliverable(self) -> list[tuple[Direction, int]]:
        """Channels with a message under way."""
        return [key for key, sent in self.sent.items() if self.delivered.get(key, 0) < sent]

    def deliver(self, key: tuple[Direction, int]) -> None:
        """Lets the next message of a channel arrive."""
        direction, stage = key
        number = self.delivered.get(key, 0)
        if self.know == "arrival" and direction is Direction.FORWARD and stage < self.p:
            self.ranks[stage].learn(number, self.sizes[number])
        self.delivered[key] = number + 1
        self.ranks[stage % self.p].arrived(direction, stage // self.p, number + 1)

    def step(self, rank: int) -> bool:
        """Asks one rank for its next task; True if it ran one."""
        scheduler = self.ranks[rank]
        action = scheduler.next()
        if action is None:
            return False
        assert scheduler.held <= scheduler.cap + 1e-6
        self.ran[rank].append(action)
        late = self.know == "forward" or (self.know == "arrival" and rank == 0)
        if self.sizes and late and action.kind is Kind.F and action.chunk == 0:
            scheduler.learn(action.microbatch, self.sizes[action.microbatch])
        stage = action.chunk * self.p + rank
        if action.kind is Kind.F and stage + 1 < self.p * self.v:
            self._send((Direction.FORWARD, stage + 1))
        if action.kind is Kind.B and stage > 0:
            self._send((Direction.BACKWARD, stage - 1))
        return True

    def _send(self, key: tuple[Direction, int]) -> None:
        self.sent[key] = self.sent.get(key, 0) + 1

    def finish(self, rng: random.Random) -> None:
        """Runs to the end, in any order of ranks and messages, and checks each rank's order."""
        while not all(scheduler.done for scheduler in self.ranks):
            moves: list[tuple[Callable[[Any], object], Any]] = [
                *((self.deliver, key) for key in self.deliverable()),
                *((self.step, rank) for rank in range(self.p) if not self.ranks[rank].done),
            ]
            rng.shuffle(moves)
            moved = any(what(which) is not False for what, which in moves[:])
            assert moved, "stuck: " + "; ".join(one.stall().text for one in self.ranks)
        units = self.geometries[0].backward_units
        for rank, ran in enumerate(self.ran):
            for chunk, kind in itertools.product(range(self.v), Kind):
                found = [a[2:] for a in ran if a.kind is kind and a.chunk == chunk]
                each = self.pieces[chunk] * self.split if kind is Kind.W else 1
                expected = range(self.m) if kind is Kind.F else units
                assert found == [(i, k) for i in expected for k in range(each)]
            assert self.ranks[rank].held == 0


def with_keys(sizes: Sequence[int], groups: Sequence[int], kappa: float) -> list[int]:
    """The sizes that the budget counts."""
    keys = key_sizes(groups, sizes, kappa)
    return [size + keys.get(unit, 0) for unit, size in enumerate(sizes)]


def heads_of(v: int) -> tuple[float, ...]:
    """Weights of chunks under which only the last one's activations count."""
    return (*[0.0] * (v - 1), 1.0)


State = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Of each rank: its F and B by chunk, and its deferred W."""


class Walk:
    """All states of a pipeline whose messages arrive at once, at the least cap.

    Args:
        weights: of each chunk.
        heads: bounds the last chunk's activations, too.
    """

    def __init__(
        self, p: int, v: int, sizes: Sequence[int], *, groups: Sequence[int] = (),
        kappa: float = 0.25, split: bool = False, weights: Sequence[float] = (),
        heads: bool = False,
    ) -> None:  # fmt: skip
        self.p, self.v, self.split = p, v, split
        self.sizes = with_keys(sizes, groups, kappa)
        self.bounds = [tuple(weights)] + [heads_of(v)] * heads
        self.geometries = [Geometry(p, r, v, len(sizes), groups=tuple(groups)) for r in range(p)]
        self.references = [Reference(geometry) for geometry in self.geometries]
        self.room: dict[Any, bool] = {}

    def count(self, most: int = 0) -> int:
        """Reachable states, or ``most`` of them; none may be stuck."""
        start: State = tuple(((0,) * (2 * self.v), ()) for _ in range(self.p))
        seen, todo = {start}, [start]
        while todo and not 0 < most <= len(seen):
            state = todo.pop()
            after = list(self._moves(state))
            ended = all(n == len(self.sizes) for counts, _ in state for n in counts)
            assert after or ended, (self.sizes, self.geometries[0].groups, state)
            fresh = [one for one in after if one not in seen]
            seen.update(fresh)
            todo += fresh
        return len(seen)

    def _moves(self, state: State) -> Iterator[State]:
        for rank, (counts, deferred) in enumerate(state):
            ways = [(counts, deferred[1:])] if deferred else []
            for slot in range(2 * self.v):
                backward, chunk = divmod(slot, self.v)
                if not self._may_run(state, rank, chunk, backward):
                    continue
                later = deferred
                if backward and self.split:
                    later += (self.geometries[rank].backward_units[counts[slot]],)
                ways.append(((*counts[:slot], counts[slot] + 1, *counts[slot + 1 :]), later))
            for way in ways:
                yield (*state[:rank], way, *state[rank + 1 :])

    def _may_run(self, state: State, rank: int, chunk: int, backward: int) -> bool:
        (counts, deferred), geometry = state[rank], self.geometries[rank]
        done, stage = counts[backward * self.v + chunk], chunk * self.p + rank
        if done == geometry.num_microbatches:
            return False
        if not backward:
            before = state[(stage - 1) % self.p][0]
            if stage and before[(stage - 1) // self.p] <= done:
                return False
            key = rank, chunk, counts, sum(self.sizes[i] for i in deferred)
            if key not in self.room:
                self.room[key] = all(self._fits(*key, weights) for weights in self.bounds)
            return self.room[key]
        if geometry.due[counts[chunk]] <= done:
            return False
        after = state[(stage + 1) % self.p][0]
        return stage == self.p * self.v - 1 or after[self.v + (stage + 1) // self.p] > done

    def _fits(
        self, rank: int, chunk: int, counts: Sequence[int], kept: int, weights: Sequence[float]
    ) -> bool:
        """The real budget at its least cap, brought to the state of these counts."""
        reference, geometry, largest = self.references[rank], self.geometries[rank], max(self.sizes)
        least = peak_size(reference.order, self.sizes, weights) / largest
        budget = Budget(reference, MemoryLimit(least, tuple(weights)), largest)
        for microbatch, size in enumerate(self.sizes):
            budget.learn(microbatch, size, [0] * self.v)
        unrun, end = [], len(reference.order)
        for place, (kind, c, i, _) in enumerate(reference.order):
            if geometry.position(kind, i) >= counts[kind * self.v + c]:
                unrun.append(place)
            elif kind is Kind.F:
                budget.forward(place)
            else:
                budget.backward(place, 0)
        budget.kept = kept
        after = [0] * (end + 1)
        for place, following in zip([end, *unrun], [*unrun, end], strict=True):
            after[place] = following
        return budget.fits(reference.places[0][chunk][counts[chunk]], after)
