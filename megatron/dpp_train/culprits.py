"""Names who is to blame for errors of libraries that name nobody: a rank, a worker, a limit.

gloo, PyTorch's stores and its data loaders report a connection, a key or a time. Each rank writes
its process into the job's store when it joins; :func:`find` looks there, and at this host.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import multiprocessing.connection
import os
import platform
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megatron.dpp.errors import one_line
from megatron.dpp.processes import how_ended, stopped

_KEY, _ENDED = "dpp/process", "dpp/ended"
_SHARED_MEMORY = "/dev/shm"
_ASK_SECONDS = 2.0
"""Short, as the store may be lost, too."""
_ENDS_SECONDS, _NAP_SECONDS = 1.0, 0.1
"""A killed process closes its connections a moment before it has ended."""
_LONGEST = 300
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", re.DOTALL)
_NO_ROOM = re.compile(r"unable to \w+ .*(?:shared memory|file </torch_).*|.*\(shm\).*", re.DOTALL)
_NO_MEMORY = re.compile(r"can't allocate memory|Cannot allocate memory|std::bad_alloc")
_NO_THREAD = re.compile(
    r"(\[Errno 11\] )?Resource temporarily unavailable|can't start new thread"
)  # of C++, of fork and of Python, and no socket's
_FEW_THREADS = 4096


def tell_end(host: str, port: int, text: str) -> None:
    """Tell the ranks of all nodes how one has ended, by the store of a torchrun on several; the
    first word stays."""
    _within(_ASK_SECONDS, lambda: _store_at(host, port).compare_set(_ENDED, "", text))


def told_end() -> str:
    """The text that :func:`tell_end` left; empty without one, or on a single node."""
    found: list[str] = []
    if _has_several_nodes():
        _within(_ASK_SECONDS, lambda: found.append(_told(_job_store())))
    return "".join(found)


@contextlib.contextmanager
def watching_ends(
    end: Callable[[str], object], *, between: float = 2.0, grace: float = 10.0
) -> Iterator[None]:
    """Around work of a rank that may wait long for one on another node. PyTorch waits in C++, so
    ``end`` is called in a thread. One rank of a node watches.

    Args:
        end: gets the text of :func:`told_end` if the block goes on ``grace`` seconds after it came;
            this rank's own error says more.
        between: seconds between two looks.
    """
    over = threading.Event()
    if not _has_several_nodes() or os.environ.get("LOCAL_RANK") != "0":
        yield
        return

    def watch() -> None:
        try:
            store = _job_store()
            while not over.wait(between):
                if (told := _told(store)) and not over.wait(grace):
                    end(told)
        except RuntimeError:  # the store is gone, which PyTorch notices itself
            return

    threading.Thread(target=watch, name="dpp-ends", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _has_several_nodes() -> bool:
    here, ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and here != ranks


def _store_at(host: str, port: int) -> Any:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_ASK_SECONDS))


def _job_store() -> Any:
    return _store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _told(store: Any) -> str:
    return store.get(_ENDED).decode(errors="replace") if store.check([_ENDED]) else ""


def announce(store: Any, rank: int) -> None:
    """Tell the other ranks which process this is."""
    store.set(f"{_KEY}/{rank}", f"{os.getpid()} {platform.node()}")


def find(error: BaseException) -> str:
    """The text of the error to show instead; empty where ``error`` may speak for itself."""
    said = one_line(error, _LONGEST)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) or _errno(error):
        return f"out of memory: {said}{limits()}"
    if _NO_THREAD.fullmatch(str(error)):
        return f"a thread or process cannot be started: {said}{limits()}"
    if "Too many open files" in str(error):
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{said}; this process may open {files} files (ulimit -n)"
    if text := of_worker(error):
        return text
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in said):
        said = re.sub(r"^\[\S*gloo\S*\] ", "", said).partition(". This is typically")[0]
        return f"a collective failed ({said}){of_ranks()}"
    return ""


def _errno(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def limits() -> str:
    """Text about the limits on the memory that a process may map, and on few threads of its user;
    empty without one."""
    text = ""
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    if memory != resource.RLIM_INFINITY:
        text += f"; this process may map {memory >> 10} KiB (ulimit -v)"
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if 0 <= threads < _FEW_THREADS:
        text += f"; this user may have {threads} threads (ulimit -u)"
    with contextlib.suppress(OSError):
        most = Path("/sys/fs/cgroup/pids.max").read_text(encoding="ascii").strip()
        if most.isdecimal() and int(most) < _FEW_THREADS:
            text += f"; this container may have {most} threads (--pids-limit)"
    return text


def of_worker(error: BaseException) -> str:
    """The text for an error of a data loader about its workers; empty for any other."""
    text = str(error)
    found = _WORKER.search(text)
    if found is None:
        return f"{_full()}: {one_line(error, _LONGEST)}" if _NO_ROOM.fullmatch(text) else ""
    who = f"a data loader's worker (process {found[1].strip()})"
    how = one_line(Exception(found[2].partition(". ")[0]), _LONGEST).rstrip(".")
    if "Bus error" in how and (paths := cut_short()):
        return f"{who} {how}: {', '.join(paths)} was cut short while it was read"
    if "Bus error" in how or "shared memory" in text:
        return f"{who} {how}: {_full()}"
    if "Killed" in how:
        how += ": by hand, or by the kernel where memory ran out (dmesg)"
    return f"{who} {how}"


def cut_short() -> list[str]:
    """The files that this process has mapped and that have got shorter since: who reads what is
    gone of them ends by SIGBUS."""
    found: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        place, mode, offset, _, inode, *path = line.split(maxsplit=5)
        if not (path and path[0].startswith("/") and "r" in mode):
            continue
        begin, end = (int(each, 16) for each in place.split("-"))
        with contextlib.suppress(OSError):
            now = os.stat(path[0])
            last_page = int(offset, 16) + end - begin - mmap.PAGESIZE
            if now.st_ino == int(inode) and now.st_size <= last_page:
                found[path[0]] = None
    return list(found)


def late(seconds: float) -> str:
    """Text about a data loader whose workers have given nothing for so long."""
    names = stopped(os.getpid())
    verb = "is" if len(names) == 1 else "are"
    why = f"{', '.join(names)} {verb} stopped (SIGSTOP or a debugger)" if names else "too slow"
    return (
        f"the data loader's workers gave nothing for {seconds:g} s "
        f"(--distributed-timeout-minutes): {why}"
    )


def ended(workers: Sequence[Any], patience: float) -> str:
    """Text about those of a loader's processes that have ended, for at most ``patience`` seconds of
    waiting for the first; empty without one."""
    if not workers:
        return ""
    by_sentinel = {worker.sentinel: worker for worker in workers}
    gone = [by_sentinel[each] for each in multiprocessing.connection.wait(by_sentinel, patience)]
    for worker in gone:
        worker.join(patience)  # its pipe closes a moment before it can be waited for
    named = [f"process {worker.pid} {how_ended(worker.exitcode)}" for worker in gone]
    return f"a data loader's worker is gone: {', '.join(named)}" if named else ""


def _full() -> str:
    room = os.statvfs(_SHARED_MEMORY)
    free, total = (blocks * room.f_frsize / 2**20 for blocks in (room.f_bavail, room.f_blocks))
    return (
        f"{_SHARED_MEMORY}, which hands over their microbatches, is full ({free:.1f} of "
        f"{total:.1f} MiB are free now): --num-workers 0 needs none of it; in a container "
        "--shm-size=1g makes it larger"
    )


def of_ranks(store: Any = None, rank: int = -1, world_size: int = 0) -> str:
    """Text about ranks that have not come, have ended or are stopped, to append to an error.

    Args:
        store: the job's; that of the default process group where it is None.
    """
    if store is None:
        if not dist.is_initialized():
            return ""
        store = dist.distributed_c10d._get_default_store()
        rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[str] = []
    others = set(range(world_size)) - {rank}
    end = time.monotonic() + _ENDS_SECONDS

    def look() -> None:
        while others and not found:
            found.extend(filter(None, (_state(store, other) for other in others)))
            if not found and (told := told_end()):
                found.append(told)
            if time.monotonic() > end:
                return
            time.sleep(0.0 if found else _NAP_SECONDS)

    if not _within(_ASK_SECONDS, look):
        found.append("the store of rank 0 does not answer")
    return f": {'; '.join(found)}" if found else ""


def _state(store: Any, rank: int) -> str:
    """The fault of a rank; empty if it runs, or is on another host."""
    key = f"{_KEY}/{rank}"
    if not store.check([key]):
        return f"rank {rank} has not come"
    pid, _, host = store.get(key).decode().partition(" ")
    if host != platform.node():
        return ""
    if not _runs(int(pid)):
        return f"rank {rank} (process {pid}) has ended"
    if names := stopped(int(pid)):
        verb = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} of rank {rank} {verb} stopped (SIGSTOP or a debugger)"
    return ""


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, OSError):
        return False


def _within(seconds: float, look: Callable[[], None]) -> bool:
    """True if ``look`` came to its end: the store may fail or hang with the host that was lost."""
    ended = threading.Event()

    def attempt() -> None:
        try:
            look()
        except RuntimeError:  # the store's own
            return
        ended.set()

    threading.Thread(target=attempt, name="dpp-culprits", daemon=True).start()
    return ended.wait(seconds)
