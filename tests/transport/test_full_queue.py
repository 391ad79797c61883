"""Puts that wait because as many as may be are pending on their channel, or for a flush."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.transport import Transport
from tests.transport.kinds import PATIENCE, close_and_wait, opened, pair, take_next

SMALL, LARGE = 100, 1 << 19  # bytes; only the large ones are copied without the interpreter's lock
MAX_PENDING = 2


def fill(transport: Transport, size: int) -> int:
    """Puts until the next one has to wait; how many there were."""
    count = 2 + MAX_PENDING
    for index in range(count):
        transport.put(0, torch.ones(size, dtype=torch.uint8), iteration=0, microbatch=index)
    return count


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_other_threads_run_while_a_put_waits(size: int) -> None:
    with opened("shm", pair(LARGE), max_pending=MAX_PENDING, timeout=5.0) as (a, b):
        count = fill(a, size)

        def take_one() -> None:
            time.sleep(0.2)  # until the put below waits
            take_next(b, 0, 0)

        other = threading.Thread(target=take_one)
        other.start()
        a.put(0, torch.ones(size, dtype=torch.uint8), iteration=0, microbatch=count)
        other.join(PATIENCE)
        for index in range(1, count + 1):
            assert take_next(b, 0, index).microbatch == index


def test_an_interrupt_is_heard_while_a_put_waits() -> None:
    class Interrupt(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with opened("shm", pair(), max_pending=MAX_PENDING, timeout=5.0) as (a, _):
            count = fill(a, SMALL)
            with pytest.raises(Interrupt):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                a.put(0, torch.ones(SMALL), iteration=0, microbatch=count)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_put_that_waits_too_long_is_a_failure() -> None:
    with opened("shm", pair(), max_pending=MAX_PENDING, timeout=0.3) as (a, _):
        count = fill(a, SMALL)
        with pytest.raises(TransferTimeout, match="2 puts wait for credit on forward of chunk 0"):
            a.put(0, torch.ones(SMALL), iteration=0, microbatch=count)
        with pytest.raises(TransferTimeout, match="rank 1 is alive but takes nothing"):
            a.poll()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_receiver_that_has_left_is_not_called_alive(kind: str) -> None:
    with opened(kind, pair(), max_pending=MAX_PENDING, timeout=0.3) as (a, b):
        close_and_wait(b, a)
        while a.pending() < MAX_PENDING:
            a.put(0, torch.ones(SMALL), iteration=0, microbatch=0)
        with pytest.raises(
            PeerDead, match=r"none left for 0\.1 s: rank 1 has closed its transport"
        ):
            a.flush(0.1)
        with pytest.raises(PeerDead, match=r"wait for credit on .*; rank 1 has closed its transpo"):
            a.put(0, torch.ones(SMALL), iteration=0, microbatch=0)
