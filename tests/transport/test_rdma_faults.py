"""Faults of an RDMA path over the double of libibverbs: each ends in time and names the peer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, ProtocolError, TransportError, TransportUnavailable
from megatron.dpp.transport.joining import PeerLink
from tests.transport.conftest import Trouble
from tests.transport.kinds import PATIENCE, fake_verbs, opened, pair, take_next
from tests.transport.test_rdma import until_failure

MIB = 1 << 20
SOON = {"setup_timeout": 6.0}
GONE = "cannot be reached over RDMA any more: transport retry counter exceeded"
REFUSED = f"(refused an RDMA write: remote access error|{GONE})"
"""Or the refused rank's queue pair, which is then in the error state, answers no more."""
Offer = dict[str, Any]


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (12, PeerDead, GONE),
        (10, ProtocolError, "refused an RDMA write: remote access error"),
    ],
)
@pytest.mark.parametrize("spared", [1, 2])
def test_an_error_between_the_pieces_of_a_message(
    trouble: Trouble, status: int, error: type[TransportError], text: str, spared: int
) -> None:
    with opened("rdma", pair(9 * MIB)) as (a, b):
        trouble("spare-writes", spared)
        trouble("error-status", status)
        a.put(0, torch.ones(9 * MIB // 4), iteration=0, microbatch=0)
        seen, told = until_failure(a), until_failure(b)
        with pytest.raises(TransportError):
            b.take(0)
    assert type(seen) is error and type(told) is error
    assert text in str(seen) and "rank 1 (pid" in str(seen), seen
    assert text in str(told) and "reported by rank 0" in str(told), told


def test_a_queue_pair_of_the_peer_that_is_gone(trouble: Trouble) -> None:
    """Both processes live, and their control connection too."""
    with opened("rdma", pair()) as (a, b):
        a.put(0, torch.ones(10), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0
        trouble("break-pairs", 1)
        a.put(0, torch.ones(10), iteration=0, microbatch=1)
        errors = [until_failure(a), until_failure(b)]
    for rank, error in enumerate(errors):
        told = "reported by" in str(error)  # the other rank saw it first, and blames this one
        assert type(error) is PeerDead
        assert f"rank {rank if told else 1 - rank} (pid" in str(error), error
        assert "cannot be reached over RDMA any more" in str(error), error


def test_a_port_that_is_up_again_carries_messages_and_has_no_blame(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, b):
        for number, down in enumerate((1, 0)):
            trouble("port-down", down)
            deadline = time.monotonic() + PATIENCE
            while fake_verbs().fake_verbs_seen(b"events-read") < 2 * (number + 1):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        a.put(0, torch.ones(10), iteration=0, microbatch=0)
        while b.poll()[0] == 0:  # a take would send credit, which could meet the error first
            assert b.wait(PATIENCE)
        trouble("error-status", 12)
        a.put(0, torch.ones(10), iteration=0, microbatch=1)
        seen = until_failure(a)
    assert "retry counter exceeded" in str(seen) and "which is down" not in str(seen)


def test_a_region_that_is_smaller_than_the_slots_is_found_at_the_start(trouble: Trouble) -> None:
    trouble("short-regions", 2)  # the slots of both ranks
    with pytest.raises(TransportUnavailable) as caught, opened("rdma", pair(MIB), **SOON):
        pass
    assert re.search(rf"rank [01]: rank [01] \(pid .*\) {REFUSED}", str(caught.value)), caught.value
    trouble("short-regions", 2)
    with opened("auto", pair(MIB), **SOON) as (a, b):
        assert [end.links()[0].kind for end in (a, b)] == ["tcp", "tcp"]


def offers(monkeypatch: pytest.MonkeyPatch, by: int, change: Callable[[Offer], Offer]) -> None:
    """Rank ``by`` offers its end of a link with a change."""
    original = PeerLink.send

    def send(self: PeerLink, message: Offer, fds: Sequence[int] = ()) -> None:
        if self.rank == by and "rdma" in message:
            message = {"rdma": change(dict(message["rdma"]))}
        original(self, message, fds)

    monkeypatch.setattr(PeerLink, "send", send)


def stale_key(offer: Offer) -> Offer:
    return {**offer, "rkey": offer["rkey"] + 1000}


def stale_pairs(offer: Offer) -> Offer:
    return {**offer, "queue_pairs": [number + 1000 for number in offer["queue_pairs"]]}


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize(("change", "text"), [(stale_key, REFUSED), (stale_pairs, GONE)])
def test_an_offer_of_an_earlier_start_is_found_by_the_pattern(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch, change: Callable[[Offer], Offer],
    text: str, by: int,
) -> None:  # fmt: skip
    trouble("reset", 0)
    offers(monkeypatch, by, change)
    named = rf"rank [01]: rank [01] \(pid \d+ on .*\) {text}"
    with pytest.raises(TransportUnavailable, match=named), opened("rdma", pair(), **SOON):
        pass
    with opened("auto", pair(), **SOON) as (a, b):
        links = [end.links()[0] for end in (a, b)]
        a.put(0, torch.ones(3), iteration=0, microbatch=0)
        assert take_next(b, 0, 0).microbatch == 0
    assert [link.kind for link in links] == ["tcp", "tcp"]
    assert all(re.search(named, link.reason) for link in links), links


def without_packets(offer: Offer) -> Offer:
    return {name: value for name, value in offer.items() if name != "first_packets"}


def of_one_pair(offer: Offer) -> Offer:
    return {**offer, "queue_pairs": offer["queue_pairs"][:1]}


@pytest.mark.parametrize("kind", ["rdma", "auto"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_packets, "rank 0: rank 1 sent a broken RDMA offer: .*first_packets"),
        (of_one_pair, r"rank 1 \(pid .*\) sent an offer of 1 queue pairs"),
    ],
)
def test_an_offer_of_another_version_is_refused(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch, change: Callable[[Offer], Offer],
    text: str, kind: str,
) -> None:  # fmt: skip
    trouble("reset", 0)
    offers(monkeypatch, 1, change)
    with pytest.raises(ProtocolError, match=text), opened(kind, pair(), **SOON):
        pass
