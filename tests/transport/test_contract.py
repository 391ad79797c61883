"""The common part of transports: deadlines of a flush, and whose fault a late message is."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransferTimeout
from megatron.dpp.transport import ChannelSpec, Direction, base
from tests.fake_network import FakeNetwork, VirtualClock

FORWARD = ChannelSpec(0, 1, 0, Direction.FORWARD, 64, 8)
BACKWARD = ChannelSpec(1, 0, 0, Direction.BACKWARD, 64, 1)


def network(*gaps: float) -> FakeNetwork:
    """Of ranks 0 and 1 on a clock of its own; messages arrive with these seconds between them."""
    moments = list(itertools.accumulate(gaps))
    return FakeNetwork(
        [FORWARD, BACKWARD], clock=VirtualClock(), stepping=True,
        delay=lambda chance, spec, index: moments[index],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gaps", "seconds", "fails_at", "left"),
    [
        ((), 0.0, None, 0),
        ((5.0,), 3.0, 3.0, 1),
        ((2.0, 2.0, 2.0), 2.5, None, 0),  # every put that leaves gives a flush its time again
        ((2.0, 3.0), 2.5, 4.5, 1),
    ],
)
def test_a_flush_ends_where_no_put_has_left_for_its_time(
    gaps: tuple[float, ...], seconds: float, fails_at: float | None, left: int
) -> None:
    made = network(*gaps)
    one = made.transport(0)
    for index in range(len(gaps)):
        one.put(0, torch.ones(1), iteration=0, microbatch=index)
    if fails_at is None:
        one.flush(seconds)
        assert made.now() == sum(gaps)
        return
    text = f"rank 0: {left} puts are pending, and none left for {seconds:g} s; their receivers are"
    with pytest.raises(TransferTimeout, match=text):
        one.flush(seconds)
    assert made.now() == fails_at


def test_a_late_message_is_its_senders() -> None:
    made = network()
    one, other = made.transport(0), made.transport(1)
    text = "rank 0: microbatch 4 of iteration 9 (backward of chunk 0, rank 1 -> 0) has not arrived"
    late = one.overdue(0, 1.5, iteration=9, microbatch=4)
    assert type(late) is TransferTimeout and str(late).startswith(f"{text} after 1.5 s; rank 1 is")
    other.close()
    late = one.overdue(0, 1.5, iteration=9, microbatch=4)
    assert type(late) is PeerDead and "rank 1 has closed its transport" in str(late)


def test_a_failure_that_shows_in_a_second_explains_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made = network()
    one, wait = made.transport(0), made.transport(0).wait
    monkeypatch.setattr(base.time, "monotonic", made.now)
    one.raise_failure()
    assert 1.0 <= made.now() < 1.1, "there is none"

    def die(seconds: float) -> bool:
        made.kill(1)
        return wait(seconds)

    monkeypatch.setattr(one, "wait", die)
    with pytest.raises(PeerDead, match="rank 1 died"):
        one.raise_failure()


@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_a_block_that_fails_gives_up_before_it_closes(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, calls = network().transport(0), list[str]()
    monkeypatch.setattr(one, "abort", calls.append)
    monkeypatch.setattr(one, "close", lambda: calls.append("close"))
    if error is None:
        with one as entered:
            assert entered is one
    else:
        with pytest.raises(KeyError), one:
            raise error
    assert calls == [*(["KeyError: 'x'"] if error else []), "close"]
