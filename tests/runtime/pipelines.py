"""Pipelines over the fake network, one thread per rank, and single ranks of them.

The tasks are arithmetic: stage s maps x to 2 x + s, and each backward triples the gradient. A
message that is lost, doubled or swapped changes the numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Tensors
from megatron.dpp.runtime.timer import TaskTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import UNIT, Geometry, Scheduler, parse_cap
from megatron.dpp.trace import NullRecorder
from tests.fake_network import Delay, FakeNetwork, FakeTransport, VirtualClock


@dataclass
class Arithmetic:
    """A TaskRunner of arithmetic; ``log`` keeps the order of its tasks.

    All elements of all tensors of a boundary are copies of one number.
    """

    topology: Topology
    receives: Sequence[int] = (4,)
    """Bytes of each tensor that it gets from the stage before it, and gives a gradient to."""
    sends: Sequence[int] = (4,)
    """Likewise, of the stage after it."""
    late: Callable[[int], object] = lambda microbatch: None
    """Called as a task begins, with its microbatch."""
    lengths: Sequence[int] = ()
    """Elements of each microbatch's one tensor, in the place of the bytes above."""
    log: list[tuple[str, int, int, int]] = field(default_factory=list)
    results: dict[tuple[str, int, int], float] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    complete_after: list[int] = field(default_factory=list)
    """Of each entry of ``complete``, the number of tasks in ``log`` by then."""

    def _begin(self, kind: str, chunk: int, microbatch: int) -> None:
        self.log.append((kind, chunk, microbatch, 0))
        self.late(microbatch)
        if self.lengths:
            self.receives = self.sends = [4 * self.lengths[microbatch]]

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        self._begin("F", chunk, microbatch)
        value = self.same(received, self.receives)
        value = torch.tensor([float(microbatch)]) if value is None else value
        output = 2 * value + self.topology.stage(chunk)
        self.results["F", chunk, microbatch] = output.item()
        return self.spread(output, self.sends)

    def same(self, received: Tensors | None, sizes: Sequence[int]) -> torch.Tensor | None:
        if received is None:
            return None
        assert isinstance(received, list) == (len(sizes) > 1)
        tensors = received if isinstance(received, list) else [received]
        assert [tensor.nbytes for tensor in tensors] == list(sizes)
        first = tensors[0][:1]
        assert all(bool((tensor == first).all()) for tensor in tensors)
        return first

    def spread(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Tensors:
        copies = [tensor.expand(size // tensor.itemsize).clone() for size in sizes]
        return copies if len(sizes) > 1 else copies[0]

    def free_output(self, chunk: int, microbatch: int) -> None:
        pass

    def backward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors | None:
        self._begin("B", chunk, microbatch)
        value = self.same(received, self.sends)
        value = torch.tensor([1.0 + microbatch]) if value is None else value
        self.results["B", chunk, microbatch] = value.item()
        return self.spread(3 * value, self.receives) if self.topology.stage(chunk) else None

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        self.log.append(("W", chunk, microbatch, piece))

    def chunk_complete(self, chunk: int) -> None:
        self.complete.append(chunk)
        self.complete_after.append(len(self.log))


class NeverStarts(TaskTimer):
    """A device that never gets the inputs of tasks that were launched ahead."""

    num_ahead = 0

    def begin(self, *, ahead: bool = False) -> None:
        super().begin(ahead=ahead)
        self.num_ahead += ahead

    def waiting(self) -> int:
        return self.num_ahead


class StartsLater(NeverStarts):
    """A device that is seen to start a task launched ahead at every second look."""

    _looks = 0

    def waiting(self) -> int:
        self._looks += self.num_ahead > 0
        self.num_ahead -= self.num_ahead > 0 and self._looks % 2 == 0
        return self.num_ahead


def _topologies(p: int, v: int, members: int) -> list[Topology]:
    """The place of each rank, by its number."""
    replicas = [tuple(range(member, p * members, members)) for member in range(members)]
    return [Topology(ranks, stage, v) for stage in range(p) for ranks in replicas]


def run_pipeline(
    p: int, v: int, m: int, *, policy: str = "dynamic", cap: str = "auto", split: bool = True,
    delay: Delay = 0.0, seed: int = 0, timeout: float = 20.0, iterations: int = 1,
    network: FakeNetwork | None = None, members: int = 1, tensors: int = 1, ahead: bool = False,
    forward_only: bool = False, late: float = 0.0, evaluations: Collection[int] = (),
    pieces: Sequence[int] | None = None, sizes: Sequence[Sequence[int]] | None = None,
    lengths: Sequence[int] = (), kind: type[Arithmetic] = Arithmetic,
    schedulers: Sequence[Scheduler] = (), clock: VirtualClock | None = None, depth: int = 2,
    spend: Callable[[FakeTransport, int], object] | None = None,
) -> list[Any]:  # fmt: skip
    """Runs every rank of a pipeline in a thread of its own; ``members`` ranks share each stage.

    The last stage's forwards take ``late`` seconds. ``evaluations`` are the iterations without
    backwards. ``pieces`` has the number of pieces of each chunk's weight gradient. ``sizes`` has
    the bytes of each tensor that a rank's stages send, and ``lengths`` the elements of each
    microbatch's. ``schedulers`` are of each rank, for one iteration. A task calls ``spend``.
    Returns the runners.
    """
    topologies = _topologies(p, v, members)
    sends = sizes or [[4 * max(lengths)] if lengths else [4] * tensors] * p
    places = [(top, sends[top.rank - 1], sends[top.rank]) for top in topologies]
    opened = [top.channels(*room, depth) for top, *room in places]
    specs = list(dict.fromkeys(spec for channels in opened for spec in channels))
    network = network or FakeNetwork(specs, seed=seed, delay=delay, ahead=ahead, clock=clock)
    runners = [kind(*place, lengths=lengths) for place in places]
    for runner in runners[-members:]:
        runner.late = lambda microbatch: time.sleep(late)

    def made(geometry: Geometry) -> Scheduler:
        chunks, most = parse_cap(cap, geometry).chunks, max(lengths, default=UNIT)
        return Scheduler(geometry, policy=policy, cap=chunks, split_backward=split, largest=most)

    def body(index: int) -> None:
        top, *room = places[index]
        first = index - index % members
        counters = 2 * sum(spec.destination == top.ranks[top.rank] for spec in opened[index])
        ranks = range(first, first + members) if members > 1 else None
        transport = network.transport(index, board_counters=counters, board_ranks=ranks)
        runners[index].late = partial(spend, transport) if spend else runners[index].late
        try:
            links = Links(transport, top, *map(len, room))
            w_pieces = tuple(pieces or (2,) * v) if split else None
            for iteration in range(iterations):
                only = forward_only or iteration in evaluations
                geometry = Geometry(p, top.rank, v, m, w_pieces=w_pieces, forward_only=only)
                scheduler = made(geometry) if not schedulers else schedulers[index]
                rank_of(
                    links=links, scheduler=scheduler, runner=runners[index], timer=StartsLater(),
                    number=iteration, timeout=timeout,
                    **({"count_tokens": torch.Tensor.numel} if lengths else {}),
                ).run()  # fmt: skip
                assert scheduler.held == 0 and scheduler.peak_held <= scheduler.cap + 1e-6
                assert not lengths or scheduler.sizes.known == list(lengths[:m])
        finally:
            if clock is not None:
                transport.close()

    in_threads(body, len(runners), timeout + 100)
    return runners


FIRST, LAST = (Topology((0, 1), rank, 1) for rank in range(2))
"""The two ranks of a pipeline of one chunk each."""


def network_of(
    topology: Topology, sends: Sequence[int] = (4,), depth: int = 2, **more: Any
) -> FakeNetwork:
    """The network of one rank, whose stages send tensors of these bytes."""
    return FakeNetwork(list(topology.channels([4], sends, depth)), **more)


def put(network: FakeNetwork, number: int, *, iteration: int = 0, channel: int = 0) -> None:
    """Rank 0 sends the first microbatches."""
    for microbatch in range(number):
        tensor = torch.zeros(1)
        network.transport(0).put(channel, tensor, iteration=iteration, microbatch=microbatch)


def rank_of(
    network: FakeNetwork | None = None, geometry: Geometry | None = None, **more: Any
) -> Executor:
    """The executor of one rank of two, or of ``topology``; ``more`` replaces its arguments, those
    of its links, or settings of its iteration.
    """
    scheduler = more.pop("scheduler", None)
    if scheduler is None:
        assert geometry is not None
        chosen = {"policy": more.pop("policy", "dynamic"), "cap": more.pop("cap", 8)}
        split = more.pop("split_backward", False)
        scheduler = Scheduler(geometry, split_backward=split, **chosen)
    geometry = scheduler.geometry
    topology = more.pop("topology", Topology((0, 1), geometry.rank, geometry.num_chunks))
    sends, links = more.pop("sends", [4]), more.pop("links", None)
    if links is None:
        assert network is not None
        links = Links(network.transport(geometry.rank), topology, 1, len(sends))
    links.consumed = more.pop("consumed", links.consumed)
    given: dict[str, Any] = {
        "runner": Arithmetic(topology), "scheduler": scheduler, "links": links,
        "recorder": NullRecorder(), "timer": TaskTimer(), "injector": None,
    }  # fmt: skip
    settings = {"number": 0, "timeout": 20.0}
    settings |= {name: more.pop(name) for name in Iteration.__dataclass_fields__ if name in more}
    return Executor(**given | more, iteration=Iteration(**settings))


def in_threads(body: Callable[[int], None], number: int, seconds: float) -> None:
    """Runs ``body(i)`` for each i below ``number`` in a thread; raises the last rank's error."""
    errors: dict[int, BaseException] = {}

    def caught(index: int) -> None:
        try:
            body(index)
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=caught, args=(i,), daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[max(errors)]
    assert not any(thread.is_alive() for thread in threads), "a rank is stuck"


def check_values(
    runners: list[Arithmetic], m: int, iterations: int = 1, groups: tuple[int, ...] = (),
    trained: int | None = None,
) -> None:  # fmt: skip
    """Every stage saw every microbatch once per iteration, in order, with the right value; of the
    iterations ``trained`` have backwards, all if that is None.
    """
    trained = iterations if trained is None else trained
    units = Geometry(1, 0, 1, m, groups=groups).backward_units
    for runner in runners:
        top = runner.topology
        for chunk in range(top.num_chunks):
            for kind in "FB":
                order = [i for k, c, i, _ in runner.log if k == kind and c == chunk]
                times = iterations if kind == "F" else trained
                assert order == list(range(m) if kind == "F" else units) * times
            for microbatch in range(m):
                value = float(microbatch)
                for stage in range(top.stage(chunk) + 1):
                    value = 2 * value + stage
                assert runner.results["F", chunk, microbatch] == value
                if not trained:
                    continue
                hops = top.num_stages - 1 - top.stage(chunk)
                assert runner.results["B", chunk, microbatch] == (1.0 + microbatch) * 3**hops
