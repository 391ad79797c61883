"""Peers that die, leave, lie or are strangers, with real processes and kill -9."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.dpp.errors import (
    PeerDead,
    ProtocolError,
    TransportError,
    UsedAfterFork,
)
from megatron.dpp.transport import ChannelSpec, handshake, native, open_transport
from megatron.dpp.transport.meet import Meeting
from megatron.dpp.transport.native import Abandon
from tests.shared_memory import none_left
from tests.transport.kinds import (
    GPU_KINDS,
    IN_PROCESS_KINDS,
    NATIVE_KINDS,
    NIXL,
    NIXL_KIND,
    PATIENCE,
    carries,
    fake_verbs,
    forked,
    inheritance_kept,
    of_rank,
    open_from_file,
    opened,
    pair,
    prepared,
    take_next,
    until_failure,
)
from tests.transport.meeting import descriptors_and_threads, leaked, num_open

HEADER_BYTES = 144  # without the padding to whole cache lines


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_hello(kind: str, path: str, results: Any) -> None:
    Meeting.connect = lambda *_: die()  # type: ignore[method-assign,assignment]
    open_from_file(kind, pair(), 1, path)


def die_in_handshake(kind: str, path: str, results: Any) -> None:
    handshake.Guest.answer = lambda *_: die()  # type: ignore[method-assign,assignment,return-value]
    open_from_file(kind, pair(), 1, path)


def die_after_puts(kind: str, path: str, results: Any) -> None:
    transport = open_from_file(kind, pair(), 1, path)
    for index in range(10):  # most of them stay pending
        transport.put(0, torch.ones(100), iteration=0, microbatch=index)
    die()


def die_in_close(kind: str, path: str, results: Any) -> None:
    transport = open_from_file(kind, pair(), 1, path)
    threading.Timer(0.001, die).start()
    transport.close()
    time.sleep(PATIENCE)


OPENING = (die_before_hello, die_in_handshake)
Stage = Callable[[str, str, Any], None]


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        *((stage, kind) for stage in OPENING for kind in NATIVE_KINDS),
        *((stage, kind) for stage in (die_after_puts, die_in_close)
          for kind in (*NATIVE_KINDS, *GPU_KINDS)),
        pytest.param(die_after_puts, NIXL, marks=pytest.mark.nixl),
        pytest.param(die_in_close, NIXL, marks=pytest.mark.nixl),
    ],
)  # fmt: skip
def test_a_peer_killed_at_any_stage_is_noticed_and_named(
    stage: Stage, kind: str, tmp_path: Path
) -> None:
    def body(rank: int, path: str, results: Any) -> None:
        if rank == 1:
            stage(kind, path, results)
            return
        try:
            patience = 1.0 if stage in OPENING else PATIENCE
            transport = open_from_file(kind, pair(), 0, path, setup_timeout=patience)
            transport.poll()  # first, so that a later change ends the wait
            while not transport.departed(1):
                transport.wait(PATIENCE)
                transport.poll()
            transport.close()
            results.put(("left in good order", ""))
        except TransportError as error:
            results.put((type(error).__name__, str(error)))

    with none_left(), prepared(kind), forked(2, body, tmp_path) as (_, results):
        name, text = results.get(timeout=PATIENCE)
    expected = {"SetupError", "AuthError"} if stage in OPENING else {"PeerDead"}
    if stage is die_in_close:
        expected = {"PeerDead", "left in good order"}
    assert name in expected, text
    assert name == "left in good order" or "rank 1" in text


@pytest.mark.parametrize("kind", (*IN_PROCESS_KINDS, NIXL_KIND))
def test_a_forked_child_must_not_use_its_parents_transport(kind: str) -> None:
    with opened(kind, pair()) as (a, b), inheritance_kept():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                a.poll()
            except UsedAfterFork:
                a.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        carries(a, b)  # the parent's is unharmed


@pytest.mark.parametrize("kind", (*IN_PROCESS_KINDS, NIXL_KIND))
def test_a_rank_that_gives_up_says_why(kind: str) -> None:
    with opened(kind, pair()) as (a, b):
        with pytest.raises(ZeroDivisionError), a:
            raise ZeroDivisionError("of all things")
        with pytest.raises(PeerDead, match="rank 0 gave up: ZeroDivisionError: of all things"):
            raise until_failure(b)


def corrupt_slots(offset: int, change: bytes) -> None:
    """Overwrite the same place in every block of slots of this process."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if "memfd:dpp-slots" in name:
            os.pwrite(int(fd), change, offset)


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_header_ends_the_link_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    channel = pair()[:1]
    with opened("shm", channel) as (a, b):
        a.put(0, torch.ones(4, 4), iteration=0, microbatch=0)
        assert b.poll()[0] == 1
        # One page of control words, then the header of slot 0; its last bytes are its own sum.
        corrupt_slots(4096 + chance.randrange(HEADER_BYTES - 8), chance.randbytes(8))
        with pytest.raises(ProtocolError, match="broken header on forward of chunk 0"):
            b.take(0)
        with pytest.raises(ProtocolError, match="rank 0"):
            b.poll()
        with pytest.raises(ProtocolError, match="reported by rank 1"):
            while a.wait(PATIENCE):
                a.poll()


TAIL, HEAD = 0, 64
"""Places of a channel's counts of messages announced and released."""


def count_of(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("beyond", [1, 1 << 40])
def test_a_ring_holds_as_many_messages_as_it_has_slots(taken: int, beyond: int) -> None:
    with opened("shm", pair(depth=2)[:1]) as (a, b):
        for index in range(taken):
            a.put(0, torch.ones(4), iteration=0, microbatch=index)
            take_next(b, 0, index)
        corrupt_slots(TAIL, count_of(taken + 2))
        assert list(b.poll()) == [taken + 2]
        corrupt_slots(TAIL, count_of(taken + 2 + beyond))
        text = (
            rf"rank 0 \(pid.* announced {taken + 2 + beyond} messages .* {taken} were taken and 2"
        )
        for _ in range(2):
            with pytest.raises(ProtocolError, match=text):
                b.poll()


def test_messages_are_not_taken_back() -> None:
    with opened("shm", pair()[:1]) as (a, b):
        for index in range(2):
            a.put(0, torch.ones(4), iteration=0, microbatch=index)
        assert list(b.poll()) == [2]
        corrupt_slots(TAIL, count_of(1))
        with pytest.raises(
            ProtocolError, match=r"rank 0 .* took back messages on forward of chunk"
        ):
            b.poll()


def test_no_slot_is_released_that_was_not_sent() -> None:
    with opened("shm", pair()[:1]) as (a, _):
        a.put(0, torch.ones(4), iteration=0, microbatch=0)
        corrupt_slots(HEAD, count_of(2))
        with pytest.raises(
            ProtocolError, match=r"rank 1 .* released messages that were never sent"
        ):
            a.put(0, torch.ones(4), iteration=0, microbatch=1)


def test_a_torn_payload_is_found_by_its_checksum() -> None:
    with opened("shm", pair()[:1], checksum=True) as (a, b):
        a.put(0, torch.ones(64), iteration=0, microbatch=7)
        b.poll()
        corrupt_slots(4096 + 4096 + 100, b"\xff")
        with pytest.raises(ProtocolError, match="checksum of microbatch 7"):
            b.take(0)


def test_memory_that_cannot_be_had_is_an_error_at_set_up(tmp_path: Path) -> None:
    huge = [ChannelSpec(0, 1, 0, pair()[0].direction, 1 << 40, 2)]

    def body(rank: int, path: str, results: Any) -> None:
        try:
            open_from_file("shm", huge, rank, path)
        except TransportError as error:
            results.put((rank, type(error).__name__, str(error)))

    with forked(2, body, tmp_path) as (_, results):
        first = {r[0]: r for r in (results.get(timeout=PATIENCE) for _ in range(2))}
    assert first[1][1] == "SetupError"
    total = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    assert f"bytes of shared memory for dpp-slots: only {total} bytes are" in first[1][2]
    assert first[0][1] == "SetupError"


@pytest.mark.parametrize("kind", NATIVE_KINDS)
def test_a_limit_on_address_space_is_an_error_at_set_up(kind: str, tmp_path: Path) -> None:
    large = pair(slot_bytes=512 << 20)[:2]  # all of them received by rank 1

    def body(rank: int, path: str, results: Any) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
        try:
            open_from_file(kind, large, rank, path).close()
            results.put((rank, "no error", ""))
        except TransportError as error:
            results.put((rank, type(error).__name__, str(error)))

    with none_left(), forked(2, body, tmp_path) as (_, results):
        found = {rank: rest for rank, *rest in (results.get(timeout=PATIENCE) for _ in range(2))}
    assert found[1][0] == "SetupError", found
    assert "ulimit -v" in found[1][1]
    # Over tcp the other rank may be done with its own set-up before it can know.
    assert found[0][0] in ("SetupError", "PeerDead", "no error"), found


def objects() -> int:
    """Objects of Python in this process."""
    gc.collect()
    return len(gc.get_objects())


def test_nothing_is_left_behind_by_opening_and_closing() -> None:
    with opened("shm", pair()), opened("tcp", pair()), opened("rdma", pair()):
        pass  # also: three transports of one process at once, with equal names in different stores
    before = descriptors_and_threads()
    for kind in IN_PROCESS_KINDS * 2:
        with opened(kind, pair()) as (a, b):
            carries(a, b)
    assert num_open() <= before[0]
    del a, b
    made = objects()
    for _ in range(4):
        with opened("shm", pair()):
            pass
    assert objects() < made + 8, "each transport leaves something"
    assert max(leaked(before)) <= 0


# A rank that waits elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("halted", "why"),
    [
        ([], "a collective with the lost one?"),
        # On another host than the ranks that it keeps waiting, nobody else can name it.
        (["process 7 (python)"], "process 7 (python), which it started, is stopped"),
    ],
)
def test_a_blocked_rank_is_ended_with_the_reason(
    halted: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, statuses = threading.Event(), list[int]()

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(native, "stopped", lambda pid: halted)
    watch = Abandon(lambda: "rank 1 (pid 7 on node7, tcp) died", 0, 0.01)
    assert ended.wait(PATIENCE)
    watch.stop()
    said = "error: rank 0: rank 1 (pid 7 on node7, tcp) died. This rank has waited for something"
    assert {*statuses} == {1}
    assert f"{said} else for 0.01 s since ({why}): ended\n" in capsys.readouterr().err


def test_a_rank_that_notices_goes_on_and_a_watch_may_end_itself() -> None:
    made, asked = threading.Event(), threading.Event()

    def failure() -> str:
        assert made.wait(PATIENCE)
        if asked.is_set():
            watch.stop()
        asked.set()
        return "lost"

    for _ in range(2):
        watch = Abandon(failure, 0, PATIENCE)
        made.set()
        assert asked.wait(PATIENCE)
        watch.stop()
        watch.stop()


# Forked children, such as data loaders' workers -------------------------------------------------


def wait_for_number(path: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_child_does_not_keep_a_dead_rank_alive(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError("another PID namespace")

    monkeypatch.setattr(os, "pidfd_open", refuse)  # the end of the socket has to do

    def body(rank: int, path: str, results: Any) -> None:
        transport = open_from_file(kind, pair(), rank, path)
        if rank == 1:
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE))
                signal.pause()
            # Not through the queue, whose lock this rank may hold when it is killed.
            (tmp_path / "new").write_text(str(child))
            (tmp_path / "new").rename(tmp_path / "child")
            time.sleep(PATIENCE)
        try:
            while True:
                transport.poll()
                transport.wait(PATIENCE)
        except PeerDead as error:
            results.put(str(error))

    with forked(2, body, tmp_path) as (processes, results):
        child = wait_for_number(tmp_path / "child")
        try:
            assert processes[1].pid is not None
            os.kill(processes[1].pid, signal.SIGKILL)
            text = results.get(timeout=PATIENCE / 2)
        finally:
            os.kill(child, signal.SIGKILL)
    assert "rank 1 (pid" in text and "died" in text


def test_a_child_that_frees_what_it_inherits_leaves_the_network_card_alone() -> None:
    card, store = fake_verbs(), HashStore()

    def open_one(rank: int) -> Any:
        return open_transport(of_rank(pair(), rank), rank=rank, store=store, kind="rdma")

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(open_one, range(2)))
    before = card.fake_verbs_objects()
    assert before > 0
    with inheritance_kept():
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            ends[0].close()
            ends.clear()
            os._exit(0 if card.fake_verbs_objects() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    carries(*ends)
    for end in ends:
        end.close()
