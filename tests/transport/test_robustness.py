"""Odd texts, calls after the end, interrupts, and what a spin does with its core."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import PeerDead, TransportUnavailable
from megatron.dpp.transport import open as opening
from megatron.dpp.transport.native import load_native
from tests.transport.kinds import PATIENCE, Library, Wrapped, opened, pair, take_next


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
            for _ in range(100):
                b.poll()
                b.wait(PATIENCE / 100)
        assert "\N{EURO SIGN}" in made[1].failure()  # as the thread that ends a process reads it


def test_an_error_that_is_no_text_still_closes_the_transport() -> None:
    undecodable = os.fsdecode(b"/data/\xff\xfe")
    with opened("shm", pair()) as (a, b):
        with pytest.raises(FileNotFoundError), a:
            raise FileNotFoundError(undecodable)
        with pytest.raises(TransportUnavailable, match="closed"):
            a.poll()
        with pytest.raises(PeerDead, match=r"FileNotFoundError: /data/"):
            for _ in range(100):
                b.poll()
                b.wait(PATIENCE / 100)


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


YIELDS = """
#include <atomic>
#include <unistd.h>
static std::atomic<int> calls;
extern "C" int sched_yield() { ++calls; return KEPT ? usleep(KEPT) : 0; }
extern "C" int num_yields() { return calls; }
"""
WAITS = """
import ctypes, importlib.util, resource, sys, time
specification = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(specification)  # without PyTorch, which takes seconds
specification.loader.exec_module(native)
settings = dict(timeout=1.0, checksum=False, max_pending=2, spin=sys.argv[3] == "spin")
transport = native.Transport(rank=0, incoming=[], outgoing=[], **settings)
library, turns, start = ctypes.CDLL(sys.argv[2]), int(sys.argv[4]), time.monotonic()
sleeps = lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
before = sleeps()
for turn in range(1 << 30):  # a busy machine may take the core away for a whole spin
    transport.poll(0)
    transport.wait(0.001)
    enough = library.num_yields() or not settings["spin"]
    if time.monotonic() > start + 30 or (turn >= turns and enough):
        break
print(library.num_yields(), time.monotonic() - start, sleeps() - before)
transport.close()
"""


def yields_while_waiting(
    folder: Path, how: str, *, kept_us: int, turns: int
) -> tuple[int, float, int]:
    """Times that waits give their core to another process, which keeps it; the seconds; and times
    that waits leave it until something wakes them."""
    library = folder / "yields.so"
    command = ["g++", f"-DKEPT={kept_us}", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=YIELDS, text=True, check=True, timeout=PATIENCE)
    done = subprocess.run(
        [sys.executable, "-c", WAITS, load_native().__file__, str(library), how, str(turns)],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    yields, seconds, sleeps = done.stdout.split()
    return int(yields), float(seconds), int(sleeps)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ to build the counting call with"
)


@needs_compiler
@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_a_spin_gives_its_core_to_others(how: str, tmp_path: Path) -> None:
    yields, _, sleeps = yields_while_waiting(tmp_path, how, kept_us=0, turns=20)
    assert (yields > 0) == (how == "spin") and sleeps > 0


@needs_compiler
def test_waits_beside_a_busy_process_sleep_at_once(tmp_path: Path) -> None:
    yields, seconds, _ = yields_while_waiting(tmp_path, "spin", kept_us=1000, turns=60)
    assert 1 <= yields <= 1 + seconds / 0.25  # a spin tries again every quarter of a second


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
