"""The contract of all kinds, tested with each kind that this machine has."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from megatron.dpp.errors import TransferTimeout, TransportUnavailable
from megatron.dpp.transport import ChannelSpec, Direction
from tests.transport.kinds import (
    KINDS,
    NIXL,
    NIXL_KIND,
    PATIENCE,
    carries,
    opened,
    pair,
    take_next,
)

pytestmark = pytest.mark.parametrize(
    "kind", [NIXL_KIND if kind == NIXL else kind for kind in KINDS]
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def test_messages_arrive_whole_in_order_with_their_labels(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(), (0,), (1,), (7, 3), (2, 0, 5), (64, 64)]
    sent = [
        (torch.rand(shape, generator=generator) * 4 - 2).to(dtype)
        for shape in shapes
        for dtype in DTYPES
    ]
    with opened(kind, pair(), checksum=kind != "fake") as (a, b):
        for index, tensor in enumerate(sent):
            a.put(0, tensor, iteration=5, microbatch=index, part=index % 3, num_parts=3)
        for index, tensor in enumerate(sent):
            message = take_next(b, 0, index)
            assert torch.equal(message.tensor, tensor)
            assert message.tensor.dtype == tensor.dtype
            assert message[1:5] == (5, index, index % 3, 3)
            assert 0 < message.sent_ns <= message.arrived_ns
        a.flush(PATIENCE)


def test_puts_beyond_the_depth_stay_pending_and_lose_nothing(kind: str) -> None:
    with opened(kind, pair(depth=1)) as (a, b):
        for index in range(6):
            a.put(0, torch.full((100,), float(index)), iteration=0, microbatch=index)
        with pytest.raises(TransferTimeout, match="pending"):
            a.flush(0.05)
        assert a.pending() >= 4
        assert a.pending_bytes() == 400 * a.pending()
        for index in range(6):
            assert float(take_next(b, 0, index).tensor[0]) == index
        a.flush(PATIENCE)
        assert a.pending() == a.pending_bytes() == 0


def test_a_full_channel_does_not_hold_up_another(kind: str) -> None:
    with opened(kind, pair(depth=1)) as (a, b):
        for index in range(4):
            a.put(0, torch.zeros(10), iteration=0, microbatch=index)
        for index in range(4):
            a.put(1, torch.ones(10), iteration=0, microbatch=index)
            assert float(take_next(b, 1, index).tensor[0]) == 1.0
        carries(b, a)


def test_the_caller_may_drop_a_tensor_after_put(kind: str) -> None:
    with opened(kind, pair(depth=1)) as (a, b):
        for index in range(8):
            tensor = torch.full((4096,), float(index))
            a.put(0, tensor, iteration=0, microbatch=index)
            tensor.data = torch.empty(1)  # what megatron-core does with a stage's output
            del tensor
            torch.full((4096,), -1.0)  # would be given the freed memory
        for index in range(8):
            assert bool((take_next(b, 0, index).tensor == index).all())


def test_a_taken_tensor_is_not_touched_by_later_messages(kind: str) -> None:
    with opened(kind, pair(depth=1)) as (a, b):
        taken = []
        for index in range(3):
            a.put(0, torch.full((1000,), float(index)), iteration=0, microbatch=index)
            taken.append(take_next(b, 0, index).tensor)
        assert [float(tensor.mean()) for tensor in taken] == [0.0, 1.0, 2.0]


def test_wrong_use_is_refused_without_harm(kind: str) -> None:
    with opened(kind, pair(slot_bytes=64)) as (a, b):
        with pytest.raises(ValueError, match="slots have 64"):
            a.put(0, torch.zeros(17), iteration=0, microbatch=0)
        with pytest.raises(ValueError, match="contiguous"):
            a.put(0, torch.zeros(4, 4).t()[:, 1:], iteration=0, microbatch=0)
        b.poll()
        with pytest.raises(IndexError, match=r"rank 1.*nothing has arrived"):
            b.take(0)
        a.put(0, torch.ones(16), iteration=0, microbatch=9)
        assert take_next(b, 0, 0).microbatch == 9


def test_wait_ends_with_an_arrival_and_not_without_one(kind: str) -> None:
    with opened(kind, pair()) as (a, b):
        b.poll()
        while b.wait(0.02):  # set-up may ring once
            b.poll()
        timer = threading.Timer(0.05, lambda: a.put(0, torch.ones(3), iteration=0, microbatch=0))
        timer.start()
        while b.poll()[0] == 0:
            assert b.wait(PATIENCE)
        timer.join()


def test_wait_ends_when_a_pending_put_leaves(kind: str) -> None:
    with opened(kind, pair(depth=1)) as (a, b):
        for index in range(4):
            a.put(0, torch.ones(3), iteration=0, microbatch=index)
        a.poll()
        while a.wait(0.02):  # the first ones leave
            a.poll()
        take_next(b, 0, 0)
        assert a.wait(PATIENCE)


def test_closing_twice_is_fine_and_ends_all_use(kind: str) -> None:
    with opened(kind, pair()) as (a, b):
        closers = [threading.Thread(target=transport.close) for transport in (a, b)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(PATIENCE)
        a.close()
        with pytest.raises(TransportUnavailable, match="closed"):
            a.put(0, torch.ones(1), iteration=0, microbatch=0)
        with pytest.raises(TransportUnavailable, match="closed"):
            b.poll()


def test_links_name_peer_kind_and_reason(kind: str) -> None:
    with opened(kind, pair()) as (a, b):
        for transport, peer in ((a, 1), (b, 0)):
            (link,) = transport.links()
            assert (link.peer, link.kind) == (peer, kind)
            assert "asked for" in link.reason


def test_a_peer_that_left_is_told_from_a_slow_one(kind: str) -> None:
    with opened(kind, pair()) as (a, b):
        error = b.overdue(0, 2.0, iteration=3, microbatch=4)
        assert isinstance(error, TransferTimeout)
        assert "microbatch 4 of iteration 3" in str(error)
        assert "rank 0 is alive" in str(error)
        closer = threading.Thread(target=a.close)
        closer.start()
        deadline = time.monotonic() + PATIENCE
        while not b.departed(0) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert "has closed" in str(b.overdue(0, 2.0, iteration=3, microbatch=4))
        b.close()
        closer.join(PATIENCE)


def test_a_peer_has_left_only_when_all_that_it_sent_has_arrived(kind: str) -> None:
    large = torch.ones(1 << 20)
    channels = pair(slot_bytes=large.nbytes, depth=3)
    with opened(kind, channels) as (a, b):
        for index in range(2):
            for channel in range(2):
                a.put(channel, large, iteration=0, microbatch=index)
        a.flush(PATIENCE)
        closer = threading.Thread(target=a.close)
        closer.start()
        deadline = time.monotonic() + PATIENCE
        while not b.departed(0) and time.monotonic() < deadline:
            time.sleep(0)
        assert list(b.poll()) == [2, 2]
        b.close()
        closer.join(PATIENCE)


def test_large_puts_arrive_although_their_sender_closes_while_they_are_pending(kind: str) -> None:
    """More of them than there are slots, and each larger than what a kernel keeps."""
    sent = torch.arange(8 << 20).to(torch.uint8)
    with opened(kind, pair(slot_bytes=sent.nbytes)) as (a, b):
        for index in range(3):
            a.put(0, sent + index, iteration=0, microbatch=index)
        closer = threading.Thread(target=a.close)
        closer.start()
        for index in range(3):
            assert torch.equal(take_next(b, 0, index).tensor, sent + index)
        closer.join(PATIENCE)
        assert not closer.is_alive()


@pytest.mark.parametrize("seed", range(2))
def test_random_order_between_channels_loses_and_reorders_nothing(kind: str, seed: int) -> None:
    ring = [
        ChannelSpec(rank, (rank + 1) % 3, chunk, Direction.FORWARD, 1 << 15, 1 + chunk)
        for rank in range(3)
        for chunk in range(2)
    ]
    num_messages = 20
    errors: list[BaseException] = []

    def drive(transport, chance: random.Random) -> None:  # type: ignore[no-untyped-def]
        put, taken = [0, 0], [0, 0]
        try:
            while put != [num_messages] * 2 or taken != [num_messages] * 2:
                arrived = transport.poll()
                channel = chance.randrange(2)
                if put[channel] < num_messages and chance.random() < 0.6:
                    size = chance.randrange(1, 1 << 12)
                    number = put[channel]
                    tensor = torch.full((size,), float(1000 * channel + number))
                    transport.put(channel, tensor, iteration=size, microbatch=number)
                    put[channel] += 1
                elif arrived[channel] > taken[channel]:
                    message = transport.take(channel)
                    expected = 1000 * transport.incoming[channel].chunk + taken[channel]
                    assert message.microbatch == taken[channel]
                    assert message.tensor.shape == (message.iteration,)
                    assert bool((message.tensor == expected).all())
                    taken[channel] += 1
                elif list(arrived) == taken and put == [num_messages] * 2:
                    assert transport.wait(PATIENCE)
            transport.flush(PATIENCE)
        except BaseException as error:
            errors.append(error)

    with opened(kind, ring) as transports:
        threads = [
            threading.Thread(target=drive, args=(transport, random.Random(10 * seed + rank)))
            for rank, transport in enumerate(transports)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)


def test_the_board_gives_all_members_one_order(kind: str) -> None:
    with opened(kind, pair(), counters=2) as (leader, follower):
        assert leader.board is not None and follower.board is not None
        leader.board.post([3, 1])
        follower.board.post([2, 5])
        leader.poll()  # before each look, so that a later change ends the wait
        while list(leader.board.common()) != [2, 1]:
            assert leader.wait(PATIENCE)
            leader.poll()
        follower.poll()
        words = [7, 0, (1 << 63) - 1]
        for word in words:
            leader.board.append(word)
        read: list[int] = []
        while len(read) < len(words):
            follower.poll()
            word = follower.board.next()
            if word is None:
                assert follower.wait(PATIENCE)
            else:
                read.append(word)
        assert (read, follower.board.next()) == (words, None)
        with pytest.raises(ValueError, match="outside"):
            leader.board.append(1 << 63)
