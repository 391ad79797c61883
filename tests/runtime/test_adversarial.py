"""The real executor over drawn lengths, delays, bounds and choices: no run gets stuck.

All ranks of a pipeline run in threads over the fake network, whose clock jumps from event to event.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Tensors
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import (
    Action,
    Geometry,
    MemoryLimit,
    Reference,
    Scheduler,
    View,
    key_sizes,
    peak_size,
)
from megatron.dpp.trace import NullRecorder
from tests.fake_network import FakeNetwork, FakeTransport, VirtualClock
from tests.runtime.pipelines import Arithmetic, check_values, in_threads

LONGEST = 40


@dataclass
class Drawn(Arithmetic):
    """A runner whose tensors have their microbatch's length, and whose tasks take time."""

    lengths: tuple[int, ...] = ()
    transport: FakeTransport | None = None
    rng: random.Random | None = None

    def _take_time(self) -> list[int]:
        assert self.transport is not None
        assert self.rng is not None
        length = self.lengths[self.log[-1][2]]
        self.transport.wait(self.rng.choice((0.0, 0.001)) * length)
        return [4 * length]

    def same(self, received: Tensors | None, sizes: Any) -> torch.Tensor | None:
        return super().same(received, self._take_time())

    def spread(self, tensor: torch.Tensor, sizes: Any) -> Tensors:
        return super().spread(tensor, [4 * self.lengths[self.log[-1][2]]])


@dataclass(frozen=True)
class Case:
    """One pipeline, drawn from a seed."""

    seed: int
    p: int
    v: int
    sizes: tuple[int, ...]
    pieces: tuple[int, ...] | None
    known: bool
    weights: tuple[float, ...]
    target: int | None
    heads: bool
    slack: int
    beta: float
    policy: str | None
    groups: tuple[int, ...] = ()
    kappa: float = 0.0

    @classmethod
    def sliced(cls, seed: int) -> Case:
        """One whose microbatches are linked, with keys; without weights and further limits."""
        case, rng = cls.drawn(seed), random.Random(f"slices {seed}")
        groups = tuple(rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(1, 4)))
        return replace(
            case, groups=groups, sizes=tuple(rng.randint(1, LONGEST) for _ in range(sum(groups))),
            kappa=rng.choice((0.0, 0.09, 0.35)), known=True, weights=(), target=None,
            heads=False,
        )  # fmt: skip

    @classmethod
    def drawn(cls, seed: int) -> Case:
        rng = random.Random(seed)
        p, v, m = rng.randint(2, 4), rng.randint(1, 3), rng.randint(1, 6)
        weighted = rng.random() < 0.5
        return cls(
            seed=seed,
            p=p,
            v=v,
            sizes=tuple(min(LONGEST, int(rng.lognormvariate(1.5, 1.2)) + 1) for _ in range(m)),
            pieces=rng.choice((None, tuple(rng.randint(0, 3) for _ in range(v)))),
            known=rng.random() < 0.5,
            weights=tuple(rng.choice((0.5, 1.0, 2.5)) for _ in range(v)) if weighted else (),
            target=rng.choice((None, rng.randint(0, 3 * LONGEST))),
            heads=rng.random() < 0.3,
            slack=rng.choice((0, 0, LONGEST // 2)),
            beta=rng.random(),
            policy=rng.choice((None, "dynamic", "depth-first", "megatron")),
        )

    def scheduler(self, geometry: Geometry) -> Scheduler:
        """At the least caps of what is known or assumed, with a little slack at most."""
        order, m = Reference(geometry).order, len(self.sizes)
        keys = key_sizes(self.groups, self.sizes, self.kappa)
        sizes = [size + keys.get(i, 0) for i, size in enumerate(self.sizes)]
        sizes = sizes if self.known else [LONGEST] * m
        limits = []
        if self.heads:
            of_head = (*[0.0] * (geometry.num_chunks - 1), 1.0)
            most = peak_size(order, sizes, of_head) / LONGEST
            limits.append(MemoryLimit(most, of_head, deferred=False))
        if self.target is not None:
            most = self.target / LONGEST
            limits.append(MemoryLimit(most, self.weights, assumed=5, soft=True, unlike=True))
        return Scheduler(
            geometry,
            policy=self.policy or wild(random.Random(self.seed + geometry.rank)),
            cap=(peak_size(order, sizes, self.weights) + self.slack) / LONGEST,
            split_backward=self.pieces is not None,
            beta=self.beta,
            largest=LONGEST,
            sizes=self.sizes if self.known else None,
            weights=self.weights,
            limits=limits,
            kappa=self.kappa,
        )


def wild(rng: random.Random) -> Callable[[View], Action | None]:
    """A policy that takes any of the tasks that may run."""

    def choose(view: View) -> Action | None:
        chunks = range(view.geometry.num_chunks)
        asked = [view.forward(c) for c in chunks] + [view.backward(c) for c in chunks]
        options = [action for action in (*asked, view.weight()) if action is not None]
        return rng.choice(options) if options else None

    return choose


def run(case: Case) -> list[Arithmetic]:
    """Runs all ranks of a case, and checks the memory of each."""
    p, v, m = case.p, case.v, len(case.sizes)
    topologies = [Topology(tuple(range(p)), rank, v) for rank in range(p)]
    depth = 1 + case.seed % 2
    opened = [top.channels([4 * LONGEST], [4 * LONGEST], depth) for top in topologies]
    specs = dict.fromkeys(spec for channels in opened for spec in channels.specs)

    def delay(rng: random.Random, *_: Any) -> float:
        return rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.1)))

    network = FakeNetwork(list(specs), seed=case.seed, delay=delay, clock=VirtualClock())
    transports = [network.transport(rank) for rank in range(p)]
    runners = [
        Drawn(top, lengths=case.sizes, transport=transports[top.rank],
              rng=random.Random(case.seed * p + top.rank))
        for top in topologies
    ]  # fmt: skip

    def body(rank: int) -> None:
        channels, transport = opened[rank], transports[rank]
        try:
            links = Links(transport, channels)
            geometry = Geometry(p, rank, v, m, w_pieces=case.pieces, groups=case.groups)
            scheduler = case.scheduler(geometry)
            decider = decider_for(scheduler, channels.receiving, transport.board)
            decider.start(links.consumed)
            Executor(
                runner=runners[rank],
                decider=decider,
                links=links,
                recorder=NullRecorder(),
                timer=HostTimer(),
                injector=None,
                iteration=Iteration(
                    split_backward=case.pieces is not None,
                    number=0,
                    timeout=60.0,
                    count_tokens=torch.Tensor.numel,
                ),
            ).run()
            assert scheduler.held == 0
            assert scheduler.sizes.known == list(case.sizes)
            assert scheduler.peak_held <= scheduler.view.cap + 1e-6
        finally:
            transport.close()

    in_threads(body, p, 120.0)
    return list(runners)


def check(seeds: range, drawn: Callable[[int], Case] = Case.drawn) -> None:
    for seed in seeds:
        case = drawn(seed)
        try:
            check_values(run(case), len(case.sizes), groups=case.groups)
        except BaseException as error:
            raise AssertionError(f"{case}: {error}") from error


def test_random_pipelines_end() -> None:
    check(range(60))


def test_random_pipelines_of_slices_end() -> None:
    """Backwards of a group in reverse order, at the least cap of its slices and keys."""
    check(range(100), Case.sliced)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_pipelines_of_slices_end(part: int) -> None:
    check(range(500 * part, 500 * (part + 1)), Case.sliced)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_pipelines_end(part: int) -> None:
    check(range(500 * part, 500 * (part + 1)))
