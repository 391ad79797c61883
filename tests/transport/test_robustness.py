"""Odd texts, calls after the end, interrupts, and memory that is used again."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransportUnavailable
from megatron.dpp.transport import open as opening
from tests.transport.kinds import (
    PATIENCE,
    Library,
    Wrapped,
    opened,
    pair,
    take_next,
    until_failure,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("shift", range(3))
def test_a_long_text_is_not_cut_in_a_character(
    kind: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, Any] = {}
    library = Library(lambda native, rank: made.setdefault(rank, native))
    monkeypatch.setattr(opening, "load_native", lambda: library)
    reason = "x" * shift + "\N{EURO SIGN}" * 2000
    with opened(kind, pair()) as (a, b):
        a.abort(reason)
        with pytest.raises(PeerDead, match=r"rank 0 gave up: x*\N{EURO SIGN}+ .reported by rank 0"):
            raise until_failure(b)
        assert "\N{EURO SIGN}" in made[1].failure()  # as the thread that ends a process reads it


def test_an_error_that_is_no_text_still_closes_the_transport() -> None:
    undecodable = os.fsdecode(b"/data/\xff\xfe")
    with opened("shm", pair()) as (a, b):
        with pytest.raises(FileNotFoundError), a:
            raise FileNotFoundError(undecodable)
        with pytest.raises(TransportUnavailable, match="closed"):
            a.poll()
        with pytest.raises(PeerDead, match=r"FileNotFoundError: /data/"):
            raise until_failure(b)


def test_closing_follows_an_abort_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reason: str) -> None:
        raise RuntimeError(reason)

    with opened("shm", pair()) as (a, _):
        monkeypatch.setattr(a, "abort", fail)
        with pytest.raises(RuntimeError, match="KeyError"), a:
            raise KeyError("x")
        with pytest.raises(TransportUnavailable, match="closed"):
            a.poll()


def test_a_board_after_close_is_an_error() -> None:
    with opened("shm", pair(), counters=2) as (a, b):
        a.close()
        b.close()
        calls = [lambda: a.board.post([1, 2]), a.board.common, lambda: a.board.append(1)]  # type: ignore[union-attr]
        for call in [*calls, b.board.next]:  # type: ignore[union-attr]
            with pytest.raises(TransportUnavailable, match="the transport is closed"):
                call()


def test_an_interrupt_after_a_put_frees_no_tensor_that_is_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[int, Wrapped] = {}

    def interrupted(native: Any, rank: int) -> Wrapped:
        return made.setdefault(rank, Wrapped(native, "", KeyboardInterrupt(), after=True))

    library = Library(interrupted)
    monkeypatch.setattr(opening, "load_native", lambda: library)
    with opened("shm", pair(depth=1)) as (a, b):
        a.put(0, torch.zeros(4), iteration=0, microbatch=0)  # fills the only slot
        made[0].fails = "put"  # Ctrl-C right behind it
        with pytest.raises(KeyboardInterrupt):
            a.put(0, torch.ones(4), iteration=0, microbatch=1)
        made[0].fails = ""
        a.poll()
        assert a.pending_bytes() == 16
        a.put(0, torch.full((4,), 2.0), iteration=0, microbatch=2)
        for index in range(3):
            assert take_next(b, 0, index).tensor.tolist() == [float(index)] * 4
        a.flush(PATIENCE)
        assert a.pending_bytes() == 0


def test_very_large_tensors_over_shm_reuse_memory() -> None:
    sent = [torch.full((33 << 20,), index, dtype=torch.uint8) for index in range(6)]
    with opened("shm", pair(sent[0].nbytes, depth=1), checksum=True) as (a, b):
        held, faults = [], 0
        for index, tensor in enumerate(sent):
            a.put(0, tensor, iteration=0, microbatch=index)
            while b.poll()[0] == index:
                assert b.wait(PATIENCE)
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            message = b.take(0)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
            if index < 2:
                held.append(message.tensor)
            del message
    assert faults < 10  # the pages are there; 33 MiB have at least 16
    for tensor, expected in zip(held, sent, strict=False):
        assert torch.equal(tensor, expected)
