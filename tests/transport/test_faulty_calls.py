"""Transports over calls of the system that are slow, interrupted, or short of something."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from megatron.dpp.transport.native import load_native
from tests.transport import raw
from tests.transport.kinds import REPOSITORY, build_double
from tests.transport.test_memory_room import MIB, SECOND, group


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of ``faulty_worker.py``."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the faulty calls with")
    folder = tmp_path_factory.mktemp("faults")
    library = build_double("faulty_calls.cc", folder / "faulty_calls.so")
    full = folder / "sys/fs/cgroup"
    group(full, SECOND, str(64 * MIB), 64 * MIB)
    for name in ("max", "current"):
        (full / f"memory.swap.{name}").write_text("0")
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.transport.faulty_worker", load_native().__file__,
         str(library), str(folder)],
        env=os.environ | {"LD_PRELOAD": str(library)}, cwd=REPOSITORY,
        capture_output=True, text=True, timeout=6 * raw.PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_small_put_does_not_wait_behind_a_large_send(found: dict[str, Any]) -> None:
    assert found["small put"] < 0.5  # the large send is in the kernel for 1.5 s


def test_a_thread_that_sends_for_the_other_wakes_it(found: dict[str, Any]) -> None:
    assert found["pending"] == 0


def test_a_credit_that_finds_no_buffer_is_sent_later(found: dict[str, Any]) -> None:
    assert found["arrived"] == 2 and found["shortages left"] == 0


def test_a_peer_whose_notes_never_end_does_not_keep_a_transport_open(found: dict[str, Any]) -> None:
    assert found["closes"]


def test_a_spin_gives_its_core_to_others_and_sleeps_beside_a_busy_one(
    found: dict[str, Any],
) -> None:
    for how in ("spin", "sleep"):
        yields, _, sleeps = found[how]
        assert (yields > 0) == (how == "spin") and sleeps > 0, how
    yields, seconds, _ = found["busy"]
    assert 1 <= yields <= 1 + seconds / 0.25  # a spin tries again every quarter of a second


def test_the_pages_of_tcp_slots_exist_from_the_start(found: dict[str, Any]) -> None:
    assert min(found["pages"]) >= 16 * MIB  # two slots, also before Linux 5.14


def test_a_full_group_refuses_slots_but_no_small_block(found: dict[str, Any]) -> None:
    refused, small = found["full group"]
    assert "only 0 bytes are left, as the limit of" in refused and small == ""
    assert "(lower DppConfig(slots=...); docker's option memory)" in refused
