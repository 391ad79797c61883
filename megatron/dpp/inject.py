"""Injected delays: slow tasks, slow ranks, slow links, for measurements and tests.

A specification such as ``jitter:0.3,transient:2x:20%,slow-link:0-1:5ms`` (``DppConfig.inject``)
becomes an :class:`Injector`, which gives the factor by which a task takes longer and the seconds by
which a message is late. Both are pure functions of the seed and of the task or message, so all
schedules meet the same delays. A message is known by its number on its channel; dynamic schedules
have a channel per chunk and static ones one for all, so their draws differ.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron.dpp.errors import ConfigError, setting

_FORMS = (
    "jitter:SIGMA, transient:2x:20%, slow-rank:RANK:FACTOR, slow-link:A-B:5ms, lengths:SIGMA, "
    "head:FACTOR, delay:5ms (uniform up to), message-delay:5ms (uniform up to)"
)
_BURST_WORK = 6.0
"""Mean length of a transient, in forwards of a whole rank."""


@dataclass(frozen=True)
class Task:
    """A task as the injected delays see it.

    ``begin`` and ``cost`` are in forwards of a whole rank: the work that the rank did before this
    task in this iteration, and the task's own. So a slow period covers the same share of the work
    whether a schedule cuts it into few tasks or many.
    """

    iteration: int
    kind: str
    chunk: int
    microbatch: int
    begin: float = 0.0
    cost: float = 0.0


class Injector:
    """The delays of one rank's tasks and messages.

    Args:
        specification: comma-separated list of the forms above.
        rank, num_ranks: place in the pipeline and its size.
        seed: the same seed gives the same delays.
        num_chunks: of each rank; the head is on the last one of the last rank.

    Raises:
        ConfigError: an unknown form, or a rank outside the pipeline.
    """

    def __init__(
        self, specification: str, rank: int, num_ranks: int, seed: int = 0, *, num_chunks: int = 1
    ) -> None:
        self._rank, self._num_ranks, self._seed = rank, num_ranks, seed
        self._num_chunks = num_chunks
        self._factors: list[Callable[[Task], float]] = []
        self._delays: list[Callable[[Task], float]] = []
        self._links: dict[tuple[int, int], float] = {}
        self._message_delay = 0.0
        for item in specification.split(","):
            self._add(item.strip())

    def factor(self, task: Task) -> float:
        """The factor by which a task takes longer, at least 1.0."""
        return max(1.0, math.prod(rule(task) for rule in self._factors))

    def seconds(self, task: Task) -> float:
        """The seconds by which a task takes longer, whatever its own duration."""
        return sum(rule(task) for rule in self._delays)

    def message_seconds(self, source: int, destination: int, number: int) -> float:
        """Seconds by which the ``number``-th message from one rank of the pipeline to another is
        late.
        """
        late = self._links.get((min(source, destination), max(source, destination)), 0.0)
        if self._message_delay:
            late += self._message_delay * self._draw(source, destination, number).random()
        return late

    @property
    def delays_messages(self) -> bool:
        """True if any message can be late."""
        return bool(self._links) or self._message_delay > 0.0

    def _add(self, item: str) -> None:
        try:
            match item.split(":"):
                case ["jitter", sigma]:
                    self._factors.append(_spread(_number(sigma), partial(self._of_task, salt=1)))
                case ["lengths", sigma]:
                    self._factors.append(_spread(_number(sigma), self._of_microbatch))
                case ["transient", factor, share]:
                    self._factors.append(self._transient(_factor(factor), _share(share)))
                case ["slow-rank", number, factor]:
                    slower = _factor(factor)
                    if self._in_pipeline(int(number)) == self._rank:
                        self._factors.append(lambda task: slower)
                case ["slow-link", ends, late]:
                    self._links[self._link(ends)] = _seconds(late)
                case ["head", factor]:
                    heavier, last = _factor(factor), self._num_chunks - 1
                    if self._rank == self._num_ranks - 1:
                        self._factors.append(lambda task: heavier if task.chunk == last else 1.0)
                case ["delay", late]:
                    most = _seconds(late)
                    self._delays.append(lambda task: most * self._of_task(task, salt=4).random())
                case ["message-delay", late]:
                    self._message_delay = _seconds(late)
                case _:
                    raise ValueError("unknown form")
        except ValueError as error:
            inject = setting("inject", item)
            raise ConfigError(f"{inject}: {error}; expected {_FORMS}", inject) from error

    def _transient(self, factor: float, share: float) -> Callable[[Task], float]:
        def rule(task: Task) -> float:
            slow = self._slow_work(task.iteration, share, task.begin, task.begin + task.cost)
            return 1.0 + (factor - 1.0) * slow / task.cost if task.cost else 1.0

        return rule

    def _slow_work(self, iteration: int, share: float, begin: float, end: float) -> float:
        """The part of the work from ``begin`` to ``end`` in this rank's slow periods."""
        draw = self._draw(iteration, 2)
        slow = draw.random() < share
        healthy_work = _BURST_WORK * (1.0 - share) / share
        position, covered = 0.0, 0.0
        while position < end:
            length = draw.expovariate(1.0 / (_BURST_WORK if slow else healthy_work))
            if slow:
                covered += max(0.0, min(end, position + length) - max(begin, position))
            position, slow = position + length, not slow
        return covered

    def _link(self, ends: str) -> tuple[int, int]:
        """Two ranks that share a link, the lower one first."""
        a, b = sorted(self._in_pipeline(int(number)) for number in ends.split("-"))
        if b != a + 1 and not (self._num_chunks > 1 and a == 0 < b == self._num_ranks - 1):
            raise ValueError(
                f"pipeline ranks {a} and {b} share no link: those with neighbouring numbers do, "
                f"and with several chunks 0 and {self._num_ranks - 1}"
            )
        return a, b

    def _in_pipeline(self, rank: int) -> int:
        if not 0 <= rank < self._num_ranks:
            raise ValueError(
                f"pipeline rank {rank} is outside the pipeline of {self._num_ranks} ranks"
            )
        return rank

    def _of_task(self, task: Task, *, salt: int) -> random.Random:
        code = "FBW".index(task.kind)
        return self._draw(task.iteration, code, task.chunk, task.microbatch, salt)

    def _of_microbatch(self, task: Task) -> random.Random:
        return _generator(self._seed, task.iteration, task.microbatch, 3)

    def _draw(self, *key: int) -> random.Random:
        return _generator(self._seed, self._rank, *key)


def _generator(*key: int) -> random.Random:
    # A seed may be any 64 bits: PyTorch's own initial one has no sign.
    packed = struct.pack(f"<{len(key)}Q", *(number & (1 << 64) - 1 for number in key))
    return random.Random(hashlib.blake2b(packed, digest_size=8).digest())


def _spread(sigma: float, draw: Callable[[Task], random.Random]) -> Callable[[Task], float]:
    """A log-normal factor with mean 1."""
    return lambda task: math.exp(sigma * draw(task).gauss(0.0, 1.0) - sigma * sigma / 2)


def _number(text: str) -> float:
    number = float(text)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{text} is no number from 0 up")
    return number


def _factor(text: str) -> float:
    factor = _number(text.rstrip("x"))
    if factor < 1.0:
        raise ValueError(f"factor {text} is below 1, and nothing gets faster")
    return factor


def _share(text: str) -> float:
    share = _number(text.rstrip("%")) / 100
    if not 0.0 < share < 1.0:
        raise ValueError("the share must be 1% to 99%")
    return share


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(us|ms|s)", text)
    if match is None:
        raise ValueError(f"{text} is no time")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
