"""Errors of libraries that name nobody: which process, limit or file system is to blame."""

from __future__ import annotations

import argparse
import contextlib
import errno
import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed import DistStoreError, HashStore, TCPStore

from megatron.dpp.errors import DataError
from megatron.dpp.processes import stopped
from megatron.dpp.transport import ChannelSpec, Direction, LinkInfo
from megatron.dpp.transport.fake import FakeNetwork
from megatron.dpp_train import culprits
from megatron.dpp_train.checkpoint.guards import saving
from megatron.dpp_train.checkpoint.writers import bound_writers
from megatron.dpp_train.data.workers import Loader
from tests.failing_disk import fork
from tests.runtime.launcher import REPOSITORY

PATIENCE = 60.0


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A stopped process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            yield process
        finally:
            process.kill()


def test_stopped_processes_of_a_tree_are_named() -> None:
    with sleeper() as process:
        name = f"process {process.pid} (sleep)"
        assert name in stopped(os.getpid()) and stopped(process.pid) == [name]
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert stopped(process.pid) == []


def test_no_process_is_named_where_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a rank the error hid that of the run."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        assert stopped(os.getpid()) == []


def test_ranks_that_have_not_come_have_ended_or_are_stopped_are_named() -> None:
    store = HashStore()
    assert culprits.of_ranks(store, 0, 1) == ""
    culprits.announce(store, 0)
    with subprocess.Popen(["true"]) as gone, sleeper() as process:
        gone.wait()
        store.set("dpp/process/1", f"{process.pid} {platform.node()}")
        store.set("dpp/process/2", f"{gone.pid} {platform.node()}")
        store.set("dpp/process/3", f"{gone.pid} another host")
        said = culprits.of_ranks(store, 0, 5)
        assert f"process {process.pid} (sleep) of rank 1 is stopped (SIGSTOP" in said
    assert f"rank 2 (process {gone.pid}) has ended" in said
    assert "rank 4 has not come" in said and "rank 3" not in said and "rank 0" not in said


def test_a_store_that_does_not_answer_is_no_wait_without_end() -> None:
    class Lost:
        def check(self, _: list[str]) -> bool:
            raise DistStoreError("gone")

    assert culprits.of_ranks(Lost(), 1, 2) == ": the store of rank 0 does not answer"


@pytest.fixture
def job_store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a torchrun on two nodes, of which this is local rank 0 of one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return store


def test_a_rank_that_ended_on_another_node_is_named(job_store: TCPStore) -> None:
    """No rank sees processes of other hosts, and gloo names an address."""
    store = HashStore()
    for rank in range(2):
        store.set(f"dpp/process/{rank}", "1 another host")
    assert culprits.told_end() == culprits.of_ranks(store, 0, 2) == ""
    culprits.tell_end("127.0.0.1", job_store.port, "rank 1 (process 5 on b) ended by SIGKILL")
    culprits.tell_end("127.0.0.1", job_store.port, "rank 0 (process 7 on a) ended with code 1")
    assert culprits.of_ranks(store, 0, 2) == ": rank 1 (process 5 on b) ended by SIGKILL"


def test_a_rank_that_waits_for_one_that_ended_gives_up(job_store: TCPStore) -> None:
    """It waited for ten minutes for one that was killed before it had joined."""
    told, came = [], threading.Event()

    def end(text: str) -> None:
        told.append(text)
        came.set()

    with culprits.watching_ends(end, between=0.01, grace=0.01):
        culprits.tell_end("127.0.0.1", job_store.port, "rank 1 ended")
        assert came.wait(PATIENCE)
    assert set(told) == {"rank 1 ended"}
    with culprits.watching_ends(end, between=0.01, grace=PATIENCE):
        number = len(told)
    time.sleep(0.05)
    assert len(told) == number, "its own error came in time"


def test_a_stall_names_the_stopped_process_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that one of the peers was stopped or stuck, or slow."""
    channel = ChannelSpec(1, 0, 0, Direction.FORWARD, 64)
    transport = FakeNetwork([channel]).transport(0)
    with sleeper() as process:
        link = LinkInfo(1, "shm", "", process.pid)
        monkeypatch.setattr(transport, "links", lambda: [link])
        error = transport.overdue(0, 5.0, iteration=1, microbatch=2)
    assert f"; process {process.pid} (sleep) of rank 1 is stopped (SIGSTOP" in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that data",
         "worker (process 12) is killed by signal: Bus error: /dev/shm, which hands"),
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", "Killed: by hand, or by"),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly",
         "a data loader's worker (process 12, 13) exited unexpectedly"),
        ("unable to write to file </torch_12_3_0>: No space left on device (28)",
         "--num-workers 0 needs none of it; in a container --shm-size=1g makes it larger: unable"),
        ("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you",
         "out of memory: [enforce fail"),
        ("std::bad_alloc", "out of memory: std::bad_alloc"),
        ("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9. This is "
         "typically caused by a crash", "a collective failed (Connection closed by peer [127."),
        ("shape '[2]' is invalid for input of size 3", ""),
    ],
)  # fmt: skip
def test_errors_of_pytorch_are_told_in_this_projects_words(text: str, said: str) -> None:
    found = culprits.find(RuntimeError(text))
    assert said in found if said else found == ""


def test_a_limit_of_open_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was a traceback, the other a failed collective."""
    monkeypatch.setattr(culprits.resource, "getrlimit", lambda _: (64, 64))
    for error in (OSError(24, "Too many open files"), RuntimeError("[gloo] Too many open files")):
        assert "; this process may open 64 files (ulimit -n)" in culprits.find(error)


def test_a_bus_error_names_a_mapped_file_that_was_cut_short(tmp_path: Path) -> None:
    """It spoke of a full /dev/shm, with all of it free."""
    path, page = tmp_path / "tokens.bin", mmap.PAGESIZE
    path.write_bytes(bytes(3 * page))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        os.truncate(path, 2 * page + 1)
        assert not culprits.cut_short()
        os.truncate(path, 2 * page)
        error = RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. It is")
        assert f"Bus error: {path} was cut short while it was read" in culprits.find(error)


def test_a_limit_of_addresses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprits.resource, "getrlimit", lambda _: (4 << 30, 4 << 30))
    found = culprits.find(OSError(12, "Cannot allocate memory"))
    assert "; this process may map 4194304 KiB (ulimit -v)" in found
    assert culprits.find(MemoryError()).startswith("out of memory: MemoryError; ")


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index)


def loader(minutes: float) -> Any:
    args: Any = argparse.Namespace(
        num_workers=1, device="cpu", seed=1, distributed_timeout_minutes=minutes,
        exit_signal_handler=False, mmap_bin_files=True,
    )  # fmt: skip
    return iter(Loader(args, Numbers()))


def error_of(minutes: float, number: int, report: Path) -> tuple[int, str]:
    """A loader's worker that gets a signal, and the error of its rank, which is a fork: PyTorch
    raises there wherever it is."""

    def work() -> None:
        batches, said = loader(minutes), ""
        next(batches)
        (worker,) = _children("pt_data_worker")
        os.kill(worker, number)
        try:
            for _ in batches:
                pass
        except (DataError, RuntimeError) as error:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            said = str(error) if isinstance(error, DataError) else culprits.find(error)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)  # PyTorch waits long for one that is stopped
        report.write_text(f"{worker} {said}")

    assert fork(work) == 0
    worker, _, said = report.read_text().partition(" ")
    return int(worker), said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_killed_worker_of_a_loader_is_named(number: int, tmp_path: Path) -> None:
    """To a rank that was fetching a batch from it, the error was `No such file or directory`."""
    worker, said = error_of(1.0, number, tmp_path / "report")
    assert f"process {worker}" in said and "a data loader's worker" in said


def test_a_stopped_worker_of_a_loader_is_named_in_time(tmp_path: Path) -> None:
    """The rank waited for it without end."""
    worker, said = error_of(1.0 / 60.0, signal.SIGSTOP, tmp_path / "report")
    assert f"process {worker} (pt_data_worker) is stopped" in said


def _children(name: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = path.read_text().rpartition(")")
            if head.endswith(f"({name}") and int(rest.split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def test_a_killed_manager_of_the_writers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the save was `EOFError:`."""
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    with bound_writers(in_background=True):
        results = filesystem_async._get_write_results_queue()
    manager = results._manager._process
    os.kill(manager.pid, signal.SIGKILL)
    manager.join(PATIENCE)
    said = f"saving failed: process {manager.pid}, which manages .* results, ended by SIGKILL; the"
    with pytest.raises(DataError, match=said), saving(tmp_path, 3):
        results.get_nowait()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        BlockingIOError(11, "Resource temporarily unavailable"),
    ],
    ids=["C++", "Python", "fork"],
)
def test_too_many_threads_name_the_limit(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ulimit -u`` and ``docker --pids-limit``: a traceback of megatron-core's groups."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (120, 120))
    found = culprits.find(error)
    assert found.startswith(f"a thread or process cannot be started: {error}; ")
    assert "; this user may have 120 threads (ulimit -u)" in found


PRINTS = """
import os, signal, sys, time
from megatron.dpp_train.launch.log_copy import LogWatch
with LogWatch():
    print("before", flush=True)
    while "before" not in open(sys.argv[1]).read():
        time.sleep(0.01)
    os.kill(int(sys.argv[2]), signal.SIGKILL)
    for number in range(1000):
        print("after", number, flush=True)
    print("last", file=sys.stderr)
"""
COPIES = """
import json, os, sys
from pathlib import Path
from megatron.dpp_train.launch.log_copy import copy_output
watch = copy_output(Path(sys.argv[1]))
pid = str(json.loads(next(iter(watch.values())))["pid"])
os.execve(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[1], pid], os.environ | watch)
"""


def test_the_output_goes_on_when_the_process_that_copies_it_is_killed(tmp_path: Path) -> None:
    """Ranks ended by their next line, and nobody could say so."""
    log = tmp_path / "train.log"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COPIES, str(log), PRINTS], capture_output=True, text=True,
        cwd=REPOSITORY, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, (done.stderr, time.monotonic() - start)
    expected = ["before", *(f"after {number}" for number in range(1000))]
    assert done.stdout.splitlines() == expected
    said = f"which copied the output into {log}, was ended by SIGKILL; torchrun goes on with it"
    assert said in done.stderr and done.stderr.endswith("last\n")
    assert log.read_text().splitlines()[:-1] == expected
