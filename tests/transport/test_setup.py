"""Ranks that fail while their links are joined; channels and descriptors of a set-up."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, ProtocolError, SetupError, TransportError, VersionMismatch
from megatron.dpp.transport import ChannelSpec, Direction
from megatron.dpp.transport import open as opening
from megatron.dpp.transport.joining import PeerLink
from tests.transport.kinds import PATIENCE, Library, Wrapped, opened, take_next
from tests.transport.meeting import errors_of, num_open

REASON = "123 bytes of shared memory: Cannot allocate memory"
GAVE_UP = f"rank 1 gave up: SetupError: {REASON}"


def call_of_cxx(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Rank 1 fails in a call of the extension."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        def wrap(native: Any, rank: int) -> Any:
            return Wrapped(native, name, SetupError(REASON)) if rank == 1 else native

        library = Library(wrap)
        monkeypatch.setattr(opening, "load_native", lambda: library)

    return patch


def its_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails before it offers its channels."""
    original = PeerLink.send

    def send(self: PeerLink, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.rank == 1 and "channels" in message:
            raise SetupError(REASON)
        original(self, message, fds)

    monkeypatch.setattr(PeerLink, "send", send)


def a_kinds_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails at the first message of a kind."""
    original = PeerLink.receive

    def fail(self: PeerLink, *most: Any) -> Any:
        message, fds = original(self, *most)
        if self.rank == 1 and ({"handle", "rdma"} & set(message) or len(fds) == 2):
            for fd in fds:
                os.close(fd)
            raise SetupError(REASON)
        return message, fds

    monkeypatch.setattr(PeerLink, "receive", fail)


@pytest.mark.parametrize(
    ("kind", "fails", "error", "says"),
    [
        *((kind, call_of_cxx("start"), PeerDead, GAVE_UP) for kind in ("shm", "tcp")),
        # Before it knows rank 0 as a peer it can only hang up.
        *((kind, call_of_cxx("add_peer"), SetupError, "rank 1") for kind in ("shm", "tcp")),
        *((kind, its_offer, SetupError, GAVE_UP) for kind in ("shm", "tcp")),
        *((kind, a_kinds_message, SetupError, f"rank 1 ended: {GAVE_UP}")
          for kind in ("cuda_ipc", "staged", "rdma")),
    ],
)  # fmt: skip
def test_a_peer_that_fails_in_a_step_of_the_set_up_is_named(
    kind: str, fails: Callable[[pytest.MonkeyPatch], None], error: type[TransportError], says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fails(monkeypatch)
    # Rank 1's error may keep its socket here, so that rank 0 waits as long as it may.
    found = errors_of(kind, 1.0 if says == "rank 1" else PATIENCE)
    assert str(found[1]) == REASON
    assert type(found[0]) is error and str(found[0]).startswith("rank 0: "), found
    assert says in str(found[0])


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc", "staged"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_message_with_too_few_descriptors_is_refused(
    kind: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, sent = PeerLink.send, []

    def send(self: PeerLink, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.rank == 0 and fds:
            sent.append(fds)
        original(self, message, () if self.rank == 0 and len(sent) == nth else fds)

    monkeypatch.setattr(PeerLink, "send", send)
    error = errors_of(kind)[1]
    assert type(error) is ProtocolError
    assert re.search(r"rank 1: rank 0 sent 0 descriptors, expected \d", str(error))


def test_a_link_that_gets_no_descriptor_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(opening.os, "dup", fail)
        errors = errors_of("shm")
    before = num_open()
    assert type(errors[0]) is type(errors[1]) is SetupError
    assert any("Too many open files (ulimit -n)" in str(error) for error in errors.values()), errors
    del errors
    assert num_open() <= before


# Channels -----------------------------------------------------------------------------------------

MANY = [ChannelSpec(0, 1, chunk, Direction.FORWARD, 64, 1) for chunk in range(2049)]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_link_may_have_thousands_of_channels(kind: str) -> None:
    """250 were too many for a set-up message, whose length the error gave."""
    with opened(kind, MANY) as (sender, receiver):
        sender.put(2048, torch.ones(4), iteration=0, microbatch=0)
        assert take_next(receiver, 2048, 0).tensor.tolist() == [1.0] * 4


def test_both_ends_list_the_channels_of_a_link_in_one_order() -> None:
    link = [
        ChannelSpec(0, 1, 1, Direction.FORWARD, 10, 2),
        ChannelSpec(0, 1, 0, Direction.BACKWARD, 30, 4),
        ChannelSpec(0, 1, 0, Direction.FORWARD, 40, 5),
    ]
    assert errors_of("shm", channels=(link, link[::-1]), seconds=0.01) == {0: None, 1: None}


@pytest.mark.parametrize("many", [False, True])
def test_a_channel_that_differs_is_noticed(many: bool) -> None:
    mine = MANY if many else MANY[:2]
    theirs = [*mine[:-1], dataclasses.replace(mine[-1], depth=2)]
    found = errors_of("shm", channels=(mine, theirs), seconds=1.0)
    assert any(type(error) is VersionMismatch for error in found.values()), found
    assert any(
        re.search(r"on the channels \[\[?2049, " if many else r"\[1, 0, 64, 1\]", str(error))
        for error in found.values()
    ), found


@pytest.mark.parametrize("kind", ["shm", "tcp", "rdma"])
def test_different_settings_are_named_before_any_message(kind: str) -> None:
    found = errors_of(kind, options=({"checksum": True}, {"checksum": False}))
    for error in found.values():
        assert type(error) is VersionMismatch and "checksum is" in str(error)
