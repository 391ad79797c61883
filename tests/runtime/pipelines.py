"""Pipelines over the fake network, one thread per rank.

The tasks are arithmetic: stage s maps x to 2 x + s, and each backward triples the gradient. A
message that is lost, doubled or swapped changes the numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from megatron.dpp.runtime.agreement import decider_for
from megatron.dpp.runtime.executor import Executor, Iteration
from megatron.dpp.runtime.links import Links
from megatron.dpp.runtime.mail import Tensors
from megatron.dpp.runtime.timer import HostTimer
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.schedule import Geometry, Scheduler, parse_cap
from megatron.dpp.trace import NullRecorder
from tests.fake_network import FakeNetwork


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
    late: float = 0.0
    """Seconds that a forward takes."""
    log: list[tuple[str, int, int, int]] = field(default_factory=list)
    results: dict[tuple[str, int, int], float] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    complete_after: list[int] = field(default_factory=list)
    """Of each entry of ``complete``, the number of tasks in ``log`` by then."""

    def forward(self, chunk: int, microbatch: int, received: Tensors | None) -> Tensors:
        self.log.append(("F", chunk, microbatch, 0))
        time.sleep(self.late)
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
        self.log.append(("B", chunk, microbatch, 0))
        value = self.same(received, self.sends)
        value = torch.tensor([1.0 + microbatch]) if value is None else value
        self.results["B", chunk, microbatch] = value.item()
        return self.spread(3 * value, self.receives) if self.topology.stage(chunk) else None

    def weight(self, chunk: int, microbatch: int, piece: int) -> None:
        self.log.append(("W", chunk, microbatch, piece))

    def chunk_complete(self, chunk: int) -> None:
        self.complete.append(chunk)
        self.complete_after.append(len(self.log))


class StartsLater(HostTimer):
    """A device that is seen to start a task launched ahead at the second look."""

    _looks = 0

    def begin(self, *, ahead: bool = False) -> None:
        super().begin(ahead=ahead)
        self._looks = 2 if ahead else 0

    def waiting(self) -> bool:
        self._looks -= 1
        return self._looks > 0


def run_pipeline(
    p: int, v: int, m: int, *, policy: str = "dynamic", cap: str = "auto", split: bool = True,
    delay: float = 0.0, seed: int = 0, timeout: float = 20.0, iterations: int = 1,
    network: FakeNetwork | None = None, members: int = 1, tensors: int = 1, ahead: bool = False,
    forward_only: bool = False, late: float = 0.0, evaluations: Collection[int] = (),
    pieces: Sequence[int] | None = None, sizes: Sequence[Sequence[int]] | None = None,
) -> list[Arithmetic]:  # fmt: skip
    """Runs every rank of a pipeline in a thread of its own; ``members`` ranks share each stage.

    The last stage's forwards take ``late`` seconds. ``evaluations`` are the iterations without
    backwards. ``pieces`` has the number of pieces of each chunk's weight gradient. ``sizes`` has
    the bytes of each tensor that a rank's stages send.
    """
    topologies = [
        Topology(tuple(range(t, p * members, members)), r, v)
        for r in range(p)
        for t in range(members)
    ]
    sends = sizes or [[4] * tensors] * p
    rooms = [(sends[top.rank - 1], sends[top.rank]) for top in topologies]
    opened = [top.channels(*room, 2) for top, room in zip(topologies, rooms, strict=True)]
    specs = {s: None for channels in opened for s in channels.specs}
    network = network or FakeNetwork(list(specs), seed=seed, delay=delay, ahead=ahead)
    runners = [
        Arithmetic(top, *room, late * (top.rank == p - 1))
        for top, room in zip(topologies, rooms, strict=True)
    ]

    def body(index: int) -> None:
        top, runner, channels = topologies[index], runners[index], opened[index]
        first = index - index % members
        board = range(first, first + members) if members > 1 else None
        transport = network.transport(
            index, board_ranks=board, board_counters=2 * channels.num_incoming
        )
        links = Links(transport, channels)
        w_pieces = tuple(pieces or (2,) * v) if split else None
        for iteration in range(iterations):
            evaluates = forward_only or iteration in evaluations
            geometry = Geometry(p, top.rank, v, m, w_pieces=w_pieces, forward_only=evaluates)
            cap_chunks = parse_cap(cap, geometry).chunks
            scheduler = Scheduler(geometry, policy=policy, cap=cap_chunks, split_backward=split)
            decider = decider_for(scheduler, channels.receiving, transport.board)
            decider.start(links.consumed)
            Executor(
                runner=runner,
                decider=decider,
                links=links,
                recorder=NullRecorder(),
                timer=StartsLater(),
                injector=None,
                iteration=Iteration(split_backward=split, number=iteration, timeout=timeout),
            ).run()
            links.consume(geometry)
            assert scheduler.peak_held <= cap_chunks

    in_threads(body, len(runners), timeout + 10)
    return runners


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
    runners: list[Arithmetic], m: int, iterations: int = 1, groups: tuple[int, ...] = ()
) -> None:
    """Every stage saw every microbatch once per iteration, in order, with the right value."""
    units = Geometry(1, 0, 1, m, groups=groups).backward_units
    for runner in runners:
        top = runner.topology
        for chunk in range(top.num_chunks):
            for kind in "FB":
                order = [i for k, c, i, _ in runner.log if k == kind and c == chunk]
                assert order == list(range(m) if kind == "F" else units) * iterations
            for microbatch in range(m):
                value = float(microbatch)
                for stage in range(top.stage(chunk) + 1):
                    value = 2 * value + stage
                assert runner.results["F", chunk, microbatch] == value
                hops = top.num_stages - 1 - top.stage(chunk)
                assert runner.results["B", chunk, microbatch] == (1.0 + microbatch) * 3**hops
