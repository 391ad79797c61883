"""RDMA links over a double of libibverbs that fails on demand, and the choice of the port."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import (
    ConfigError,
    PeerDead,
    ProtocolError,
    SetupError,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
)
from megatron.dpp.transport import TransportOptions
from megatron.dpp.transport.joining import PeerLink
from megatron.dpp.transport.native import load_native
from megatron.dpp.transport.options import RdmaOptions
from megatron.dpp.transport.rdma_ports import Node, choose_place, find_places
from tests.transport.conftest import Trouble
from tests.transport.kinds import (
    PATIENCE,
    REPOSITORY,
    carries,
    fake_verbs,
    opened,
    pair,
    take_next,
    until_arrived,
    until_failure,
)

MIB = 1 << 20


@pytest.mark.parametrize("depth", [1, 3])
def test_large_messages_over_several_queue_pairs(depth: int) -> None:
    # More than a link's buffers hold at once, in pieces that no slot size divides.
    sizes = [5 * MIB + 4, 100, 9 * MIB, 4 * MIB - 4, 4 * MIB, 0, 7 * MIB + 12]
    sent = [torch.arange(size // 4, dtype=torch.int32) * 7 + size for size in sizes]
    with opened("rdma", pair(9 * MIB, depth), workload=1 << 18, checksum=True) as (a, b):
        for index, tensor in enumerate(sent):
            a.put(0, tensor, iteration=0, microbatch=index)
            b.put(0, tensor, iteration=0, microbatch=index)
        for index, tensor in enumerate(sent):
            assert torch.equal(take_next(b, 0, index).tensor, tensor)
            assert torch.equal(take_next(a, 0, index).tensor, tensor)
        a.flush(PATIENCE)
        b.flush(PATIENCE)


def test_pieces_are_no_larger_than_the_port_carries(trouble: Trouble) -> None:
    trouble("max-message", 100_000)
    tensor = torch.arange(MIB // 4, dtype=torch.int32)
    with opened("rdma", pair(MIB)) as (a, b):
        a.put(0, tensor, iteration=0, microbatch=0)
        assert torch.equal(take_next(b, 0, 0).tensor, tensor)


def test_a_credit_that_waits_for_sends_follows_when_they_have_completed(trouble: Trouble) -> None:
    out, back = pair(depth=8)[0], pair(depth=1)[2]
    with opened("rdma", [out, back]) as (a, b):
        b.put(0, torch.ones(3), iteration=0, microbatch=0)
        until_arrived(a)
        trouble("hold-sends", 1)
        for index in range(out.depth):
            a.put(0, torch.ones(3), iteration=0, microbatch=index)
        a.flush(PATIENCE)
        assert a.take(0).microbatch == 0
        trouble("hold-sends", 0)
        carries(b, a, 1)


GONE = "cannot be reached over RDMA any more: transport retry counter exceeded"


@pytest.mark.parametrize("spared", [0, 1, 2])  # writes before the one that fails
@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (12, PeerDead, GONE),
        (13, PeerDead, "RNR retry counter exceeded"),
        (10, ProtocolError, "refused an RDMA write: remote access error"),
        (4, SetupError, "failed: some error"),
    ],
)
def test_an_error_completion_is_named_on_both_sides(
    trouble: Trouble, status: int, error: type[TransportError], text: str, spared: int
) -> None:
    with opened("rdma", pair(9 * MIB if spared else MIB)) as (a, b):
        trouble("spare-writes", spared)
        trouble("error-status", status)
        a.put(0, torch.ones(9 * MIB // 4 if spared else 10), iteration=0, microbatch=3)
        seen, told = until_failure(a), until_failure(b)
        with pytest.raises(TransportError):
            b.take(0)
    assert type(seen) is error and type(told) is error
    assert text in str(seen) and "fake0 port 1" in str(seen) and "rank 1 (pid" in str(seen)
    assert text in str(told) and "reported by rank 0" in str(told)


def until_events_are_read(number: int = 1) -> None:
    """Until both ranks know of the port, as they do before a send runs out of its retries."""
    deadline = time.monotonic() + PATIENCE
    while fake_verbs().fake_verbs_seen(b"events-read") < 2 * number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("status", [2, 12])  # soft-RoCE's own error, and the usual one
def test_a_port_that_goes_down_is_named(trouble: Trouble, status: int) -> None:
    with opened("rdma", pair()) as (a, _):
        trouble("port-down", 1)
        until_events_are_read()
        trouble("error-status", status)
        a.put(0, torch.ones(10), iteration=0, microbatch=0)
        seen = until_failure(a)
    assert type(seen) is PeerDead and "which is down: cable or switch" in str(seen)


def test_a_failure_inside_take_is_kept_and_told(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, b):
        a.put(0, torch.ones(3), iteration=0, microbatch=7)
        until_arrived(b)
        trouble("fail-post", 1)
        with pytest.raises(PeerDead, match="Cannot allocate memory") as caught:
            b.take(0)
        for call in (b.poll, lambda: b.take(0)):
            with pytest.raises(PeerDead, match="Cannot allocate memory"):
                call()
        told = until_failure(a)
    assert str(caught.value).startswith("rank 1: ")
    assert "reported by rank 1" in str(told)


def test_lost_completions_end_in_a_deadline_that_names_the_message(trouble: Trouble) -> None:
    with opened("rdma", pair()) as (a, b):
        trouble("drop-completions", 1)
        a.put(1, torch.ones(10), iteration=4, microbatch=2)
        assert not b.wait(0.3)
        assert b.poll()[1] == 0
        overdue = b.overdue(1, 0.3, iteration=4, microbatch=2)
    assert isinstance(overdue, TransferTimeout)
    assert "microbatch 2 of iteration 4 (forward of chunk 1, rank 0 -> 1)" in str(overdue)


def test_errors_name_the_kind_that_a_link_has_fallen_back_to(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[socket.socket] = []
    original = PeerLink.receive

    def receive(self: PeerLink, *most: Any) -> tuple[dict[str, Any], list[int]]:
        if self.rank == 1 and not kept:
            kept.append(self.sock.dup())
        return original(self, *most)

    monkeypatch.setattr(PeerLink, "receive", receive)
    trouble("fail-registration", 100)
    with opened("auto", pair()) as (a, _), kept[0] as control:
        control.sendall(b"\0\0\x63")  # a note of no known kind
        error = until_failure(a)
    assert re.search(r"rank 1 \(pid \d+ on .*, tcp\) sent a note of kind 99", str(error)), error


@pytest.mark.parametrize("says", ["\U0001f600" * 5000, '"' * 5000, "\udcff \n" * 2000])
@pytest.mark.parametrize("both", [False, True])
def test_a_fault_of_any_letters_fits_into_a_set_up_message(
    says: str, both: bool, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = load_native().RdmaLink, list[object]()

    def refuse(*given: Any, **options: Any) -> Any:
        made.append(None)
        if both or len(made) == 1:
            raise SetupError("no way: " + says)
        return make(*given, **options)

    monkeypatch.setattr(load_native(), "RdmaLink", refuse)
    with opened("auto", pair()) as (a, b):
        links = [end.links()[0] for end in (a, b)]
    for link in links:
        assert link.kind == "tcp" and "[rdma: rank " in link.reason and "no way: " in link.reason
        assert len(link.reason) < 1000 and "\n" not in link.reason


def test_more_slots_than_an_immediate_can_tell_apart_are_refused() -> None:
    channels = pair(8, depth=(1 << 14) + 1)
    text = "channels of up to 16385 slots on one RDMA link; at most 2048 of 16384 are possible"
    with pytest.raises(SetupError, match=text), opened("rdma", channels, setup_timeout=5.0):
        pass


def test_a_queue_pair_that_times_out_once_is_moved_again(trouble: Trouble) -> None:
    trouble("fail-connection", 2)
    with opened("rdma", pair()) as (a, b):
        carries(a, b)


def test_queue_pairs_get_what_the_flags_say() -> None:
    wanted = {"traffic_class": 96, "service_level": 3, "pkey_index": 1, "timeout": 18, "retries": 5}
    with opened("rdma", pair(), rdma=RdmaOptions(devices="fake0:1", **wanted)) as (a, b):
        reason = a.links()[0].reason
        carries(a, b)
    said = "GID index 2, traffic class 96, service level 3, partition key 1, time-out 18, retries 5"
    assert reason.endswith(f"; fake0 port 1, RoCE v2, {said}")


def test_a_card_that_does_not_tell_its_settings_has_a_link(trouble: Trouble) -> None:
    trouble("fail-query", 1)
    with opened("rdma", pair()) as (a, b):
        reasons = sorted(end.links()[0].reason for end in (a, b))
        carries(a, b)
    assert reasons[0].endswith("retries 7")
    assert reasons[1].endswith("querying a queue pair of fake0: Invalid argument (errno 22)")


@pytest.mark.parametrize(("asked", "apart"), [("auto", False), ("off", False), ("on", True)])
def test_the_notice_of_large_data_goes_apart_where_packets_are_reordered(
    trouble: Trouble, asked: str, apart: bool
) -> None:
    trouble("reset", 0)
    options = RdmaOptions(adaptive_routing=asked)
    sizes = (0, 8000, 8193, 100_000, 5 * MIB)
    with opened("rdma", pair(5 * MIB), rdma=options) as (a, b):
        assert ("adaptive routing" in a.links()[0].reason) is apart
        for turn in range(20):
            sent = torch.full((sizes[turn % 5],), turn, dtype=torch.uint8)
            for end, other in ((a, b), (b, a)):  # both give credit while they send
                end.put(0, sent, iteration=0, microbatch=turn)
                assert torch.equal(take_next(other, 0, turn).tensor, sent)
        a.flush(PATIENCE)
    most = fake_verbs().fake_verbs_seen(b"most-with-immediate")
    assert (most < 8192 + 200) if apart else (most > MIB), most


def test_gpudirect_without_a_gpu_is_refused_when_it_is_asked_for() -> None:
    settings = {"gpudirect": "on", "setup_timeout": 5.0}
    with (
        pytest.raises(TransportUnavailable, match=r"rank \d has no GPU of NVIDIA"),
        opened("rdma", pair(), **settings),
    ):
        pass
    with pytest.raises(ConfigError, match="gpudirect is yes; expected one of auto, on, off"):
        TransportOptions(gpudirect="yes")


def test_the_declarations_are_those_of_the_header() -> None:
    if shutil.which("g++") is None or not Path("/usr/include/infiniband/verbs.h").is_file():
        pytest.skip("no <infiniband/verbs.h> to compare with")
    source = str(REPOSITORY / "csrc/tests/verbs_abi.cc")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{REPOSITORY / 'csrc'}", source]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert compiled.returncode == 0, compiled.stderr


def test_a_device_that_cannot_be_opened_does_not_hide_the_others(trouble: Trouble) -> None:
    trouble("other-device", 1)
    with opened("rdma", pair()) as (a, b):
        carries(a, b)
    places, why = find_places(load_native(), "10.0.0.5", TransportOptions(), torch.device("cpu"))
    assert places == []
    assert "no RDMA port has the address 10.0.0.5 (there are fake0 port 1; opening RDMA" in why
    assert "opening RDMA device fake1: Operation not permitted" in why
    assert choose_place([], "10.0.0.5", Node(refused=[why])) == (None, why)
