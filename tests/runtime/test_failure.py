"""Messages of a schedule that ends with an error, over the fake network."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistError, HashStore

from megatron.dpp.errors import ConfigError, PeerDead, TransportError, from_json, said, setting
from megatron.dpp.runtime import failure
from megatron.dpp.runtime.base import PipelineSchedule
from megatron.dpp.runtime.topology import Topology
from megatron.dpp.transport.base import Transport
from tests.fake_network import FakeNetwork


class Opened(PipelineSchedule):
    """Rank 0 of two; a call or an optimizer after it fails as ``network`` does."""

    injected_seconds = 0.0

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.network = FakeNetwork(list(Topology((0, 1), 0, 1).channels([64], [64], 2)))
        self.transport = self.network.transport(0)
        self.peer = self.network.transport(1)
        self.closed = False

    def __call__(self, **keywords: Any) -> list[Any]:
        return []

    def close(self) -> None:
        self.closed = True

    def _links(self) -> Transport:
        return self.transport


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.dpp.transport.base.EXPLAIN_SECONDS", 0.01)
    monkeypatch.setattr(failure, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(failure, "REPORT_SECONDS", 60.0)  # the store of a test answers


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """The store of a job in which this is rank 0."""
    store = HashStore()
    job = SimpleNamespace(
        is_initialized=lambda: True, get_rank=lambda: 0, DistError=DistError,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
    )  # fmt: skip
    monkeypatch.setattr(failure, "dist", job)
    return store


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5044: "
    "Connection reset by peer. This is typically caused by a remote worker hanging. GLHF!"
)


def test_a_collective_that_fails_as_a_rank_died_names_the_rank() -> None:
    with pytest.raises(PeerDead, match="rank 1 died"), Opened() as schedule:
        schedule()
        schedule.network.kill(1)
        raise RuntimeError("Connection reset by peer")  # gloo, in the optimizer
    assert schedule.closed


def test_a_rank_of_another_replica_is_named_by_its_neighbour(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "ASK_SECONDS", 60.0)
    store.set("dpp/failure", "rank 3 (pid 7, shm) died: its socket was closed (says rank 1)")
    told = (
        r"rank 0: rank 3 \(pid 7, shm\) died: its socket was closed \(says rank 1\); "
        r"met here as RuntimeError: \[/.*\] Read error \[127.0.0.1\]:5044: Connection reset by peer"
    )
    with pytest.raises(PeerDead, match=told), Opened():
        raise RuntimeError(GLOO)


class _Lost:
    def check(self, *given: Any) -> bool:
        raise DistError("Broken pipe")

    compare_set = check


def told(store: HashStore) -> str:
    found = store.get("dpp/failure").decode() if store.check(["dpp/failure"]) else ""
    return str(from_json(found))


def test_a_rank_tells_the_others_why_it_ends(store: HashStore) -> None:
    with pytest.raises(RuntimeError), Opened():
        raise RuntimeError(GLOO)
    assert not told(store), "a collective's error is no cause"
    with pytest.raises(PeerDead), Opened() as schedule:
        schedule.network.kill(1)
        raise RuntimeError(GLOO)
    first = told(store)
    assert first == "rank 1 died (a fault asked for by the test) (says rank 0)"
    with pytest.raises(KeyError), Opened():
        raise KeyError("attention_mask")
    assert told(store) == first


def test_a_stopped_torchrun_and_its_stopped_ranks_are_named(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the error of an overdue message, and in that of a collective."""
    with subprocess.Popen(["sleep", "600"]) as torchrun:
        monkeypatch.setattr("os.getppid", lambda: torchrun.pid)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        torchrun.send_signal(signal.SIGSTOP)
        named = rf"process {torchrun.pid} \(sleep\) is stopped on \S+ \(SIGSTOP or a debugger"
        os.waitpid(torchrun.pid, os.WUNTRACED)
        try:
            with pytest.raises(TransportError, match=f"rank 0: {named}.*Read error"), Opened():
                raise RuntimeError(GLOO)
            overdue = Opened().transport.overdue(0, 1.0, iteration=0, microbatch=0)
            assert re.search(named, str(overdue))
        finally:
            torchrun.kill()


def test_an_error_of_nccl_has_a_cause_and_is_none(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DistError("NCCL error: remote process exited")
    with pytest.raises(DistError), Opened():
        raise error
    assert not told(store)
    monkeypatch.setattr(failure, "ASK_SECONDS", 60.0)
    store.set("dpp/failure", "rank 3 died (says rank 1)")
    with pytest.raises(PeerDead, match=r"rank 3 died .*; met here as DistError: NCCL"), Opened():
        raise error


def test_the_cause_is_told_without_what_it_meant_here() -> None:
    here = "; the oldest missing message here is 3"
    error = PeerDead(f"rank 0: rank 1 (pid 7) died{here}; met here as RuntimeError: reset")
    error.cause = f"rank 0: rank 1 (pid 7) died{here}"
    assert failure.reason(error) == "rank 1 (pid 7) died"
    own = PeerDead("rank 0: a message was lost")
    assert failure.reason(own) == "rank 0: a message was lost", "no other rank is named"


KEPT: list[tuple[BaseException, str, str | None, bool]] = [
    # an error that stays as it is, what the store says before, what neighbours are told, and if all
    # ranks are told of it by the store
    (RuntimeError("of a host"), "", "RuntimeError: of a host", True),
    (RuntimeError(GLOO), "", f"RuntimeError: {GLOO}", False),  # a collective's is no cause
    (torch.OutOfMemoryError("2 GiB"), "rank 3 gave up", "OutOfMemoryError: 2 GiB", False),
    (KeyError("attention_mask"), "", "KeyError: 'attention_mask'", True),
    (SystemExit(None), "", None, False),
    (SystemExit(0), "", None, False),
    (SystemExit(1), "", "SystemExit: 1", True),
    (SystemExit("no"), "", "SystemExit: no", True),
    (ValueError("x" * 700 + "\nmore"), "", "ValueError: " + "x" * 600, True),
    (PeerDead("rank 0: rank 3 died (says rank 1)"), "", "rank 3 died", False),
]


@pytest.mark.parametrize(("error", "before", "heard", "tells"), KEPT)
def test_an_error_that_nobody_explains_stays_and_neighbours_hear_of_it_at_once(
    store: HashStore, error: BaseException, before: str, heard: str | None, tells: bool
) -> None:
    """Before the links are closed: they would wait for its messages until --dpp-timeout."""
    if before:
        store.set("dpp/failure", before)
    words: list[tuple[str, bool]] = []
    with pytest.raises(type(error)) as caught, Opened() as schedule:
        schedule.transport.abort = lambda why: words.append((why, schedule.closed))  # type: ignore[method-assign]
        raise error
    assert caught.value is error and schedule.closed
    assert len(words) == (heard is not None)
    assert all(why.startswith(heard or "") and not closed for why, closed in words), words
    assert told(store) == (f"rank 0 gave up: {heard}" if tells else before)
    failure.dist.distributed_c10d._get_default_store = lambda: _Lost()  # type: ignore[attr-defined]
    with pytest.raises(type(error)) as caught, Opened():
        raise error
    assert caught.value is error, "a lost store leaves it, too"


def test_a_cause_crosses_with_the_settings_that_it_names(store: HashStore) -> None:
    slots, long = setting("slots", 0), "as the cap holds too few chunk activations, " * 5
    with pytest.raises(ConfigError), Opened():
        raise ConfigError(f"{long}{slots}: no", slots)
    text = f"rank 0 gave up: ConfigError: {long}DppConfig(slots=0): no"
    assert told(store) == text and failure.ask() == text
    assert said(failure.ask(), lambda given: given.name) == text.replace(str(slots), "slots")
    with pytest.raises(PeerDead) as raised, Opened():
        raise RuntimeError(GLOO)
    assert said(raised.value, lambda given: "--slots").startswith(
        f"rank 0: rank 0 gave up: ConfigError: {long}--slots: no; met here as RuntimeError"
    )


def test_a_store_that_never_answers_keeps_no_process_alive() -> None:
    answered, before = threading.Event(), set(threading.enumerate())
    # Not a daemon: a thread that it starts would be one, too, without being told so.
    rank = threading.Thread(target=failure.within, args=(0.01, answered.wait), daemon=False)
    rank.start()
    try:
        rank.join(20)
        assert not rank.is_alive(), "it waits for the store no longer than it was told"
        (asking,) = set(threading.enumerate()) - before
        assert asking.name == "dpp-failure"
        assert asking.daemon
    finally:
        answered.set()
    asking.join(30)


def test_a_question_to_the_store_ends_without_an_answer(store: HashStore) -> None:
    """No thread goes on asking."""
    before = set(threading.enumerate())
    assert failure.ask() is None
    for asking in set(threading.enumerate()) - before:
        asking.join(20)
        assert not asking.is_alive()
