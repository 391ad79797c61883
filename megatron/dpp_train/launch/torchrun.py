"""torchrun with one line instead of its traceback when a node is missing, a rank fails, or Ctrl-C
is pressed, without the folder that it leaves in the temporary directory, and with an end for
processes that are stopped.

``python -m megatron.dpp_train.launch.torchrun`` takes torchrun's arguments.
"""

from __future__ import annotations

import sys

try:
    import contextlib
    import itertools
    import logging
    import os
    import platform
    import shlex
    import signal
    import socket
    import tempfile
    import threading
    from datetime import timedelta
    from pathlib import Path
    from typing import Any

    import torch.distributed
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.elastic.rendezvous import (
        c10d_rendezvous_backend,
        static_tcp_rendezvous,
    )
    from torch.distributed.run import main

    from megatron.dpp.errors import FAILED, INTERRUPTED, DataError, print_error
    from megatron.dpp.hosts import LOOPBACK
    from megatron.dpp.locks import scratch_directory
    from megatron.dpp_train import culprits
    from megatron.dpp_train.checkpoint.files import find
    from megatron.dpp_train.launch.log_copy import LogWatch
    from megatron.dpp_train.launch.stopped import StoppedWatch
except KeyboardInterrupt:  # Ctrl-C at any time is no traceback
    sys.exit(130)

_SIGHUP_IS_IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
_SAID_HERE = ("api", "errors.error_handler")
"""PyTorch's loggers whose lines about a rank that failed repeat the one printed here."""
_GRACE_S = 5.0
"""Time for PyTorch's own error, which names the nodes that are missing, and between the first
failures of ranks: torchrun's own SIGKILL comes later."""


class LocalStore(TCPStore):
    """A store whose server, whatever its ``host_name``, listens on the loopback address alone."""

    def __init__(self, host_name: str, port: int = 0, *rest: Any, **options: Any) -> None:
        server = options.get("is_master", rest[1] if len(rest) > 1 else False)
        if server:
            listener = socket.create_server((LOOPBACK, port), backlog=2048)
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # the store's from here on
            # before PyTorch 2.8 only the server without libuv takes a socket
            options.setdefault("use_libuv", torch.__version__ >= "2.8")
        super().__init__(LOOPBACK, port, *rest, **options)


class _TimedStore(TCPStore):
    """A store that ends the process where its server does not answer in time: something else may
    listen on its port, and PyTorch then waits for ever."""

    def __init__(self, host: str, port: int, *rest: Any, **options: Any) -> None:
        seconds = next(each for each in rest if isinstance(each, timedelta)).total_seconds()
        late = threading.Timer(seconds + _GRACE_S, _end, (host, port, seconds))
        late.daemon = True
        late.start()
        try:
            super().__init__(host, port, *rest, **options)
        finally:
            late.cancel()


def _end(host: str, port: int, seconds: float) -> None:
    print_error(
        f"{host}:{port} accepts connections and does not answer within "
        f"WAIT_SECONDS={seconds:.0f}: another program listens there; name another MASTER_PORT"
    )
    os._exit(FAILED)


def _stay_on_this_host() -> None:
    """Bind the stores of a run on one node to the loopback address."""
    c10d_rendezvous_backend.TCPStore = LocalStore  # type: ignore[attr-defined]
    torch.distributed.TCPStore = LocalStore  # type: ignore[attr-defined]
    sys.argv[1:1] = ["--local-addr", LOOPBACK]


class _Ranks(SubprocessContext):
    """The processes of the ranks. SIGHUP stays ignored here and in them where it was before, as
    under ``nohup``: torchrun would end them by it."""

    def _start(self) -> None:
        if _SIGHUP_IS_IGNORED:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        super()._start()  # type: ignore[no-untyped-call]


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for torchrun's banner that several processes of a node get one thread each."""
    return "OMP_NUM_THREADS" not in record.getMessage()


def run() -> int:
    """Runs torchrun; 1 when the nodes do not meet in time or a rank fails, 128 plus the number of
    a signal that ended it."""
    logging.getLogger("torch.distributed.run").addFilter(_is_worth_a_line)
    unraisable = sys.unraisablehook
    sys.unraisablehook = lambda args: None if _is_of_the_end(args.exc_value) else unraisable(args)
    for name in _SAID_HERE:
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(
            logging.CRITICAL
        )
    torch.distributed.elastic.multiprocessing.SubprocessContext = _Ranks  # type: ignore[misc]
    try:
        with contextlib.ExitStack() as stack:
            try:
                scratch = scratch_directory(Path(tempfile.gettempdir()), "torchrun_")
                folder = stack.enter_context(scratch)
            except (OSError, DataError) as error:
                return print_error(
                    f"the temporary directory cannot be used ({error}): make room in it, or name "
                    "another as TMPDIR"
                )
            os.environ.setdefault("PET_LOG_DIR", str(folder))  # as --log-dir, which wins
            if "--standalone" in sys.argv:
                _stay_on_this_host()
            else:
                static_tcp_rendezvous.TCPStore = _TimedStore  # type: ignore[attr-defined,assignment]
            main()
    except DistStoreError as error:
        return print_error(
            f"not all nodes came ({str(error).rstrip('.')}): start run_worker_*.sh with the "
            "same NUM_NODES and MASTER_PORT on every other node within WAIT_SECONDS, and check "
            "that MASTER_ADDR and the port can be reached from there"
        )
    except DistNetworkError as error:
        why = str(error).rstrip(".")
        remedy = "check MASTER_ADDR, MASTER_PORT and the firewall"
        if "EADDRINUSE" in why:
            remedy = "another run has this port; name another MASTER_PORT, or on one node none"
        return print_error(f"the processes cannot meet ({why}): {remedy}")
    except ChildFailedError as error:
        return _end_of_rank(error)
    except SignalException as error:
        gone = f"ended by {error.sigval.name}; its processes are gone"
        return _say(gone + how_to_go_on(), 128 + error.sigval)
    except KeyboardInterrupt:  # before there are processes
        return _say("ended by SIGINT" + how_to_go_on(), INTERRUPTED)
    except RuntimeError as error:
        if not _is_of_the_end(error):
            raise
        return _say("ended by SIGINT" + how_to_go_on(), INTERRUPTED)
    return 0


def _master(words: list[str]) -> tuple[str, int]:
    """Host and port of the store, which torchrun's arguments name."""
    values = dict(itertools.pairwise(words))
    return values["--master_addr"], int(values["--master_port"])


def _end_of_rank(error: ChildFailedError) -> int:
    """Says which rank of this node ended first, also to those of other nodes."""
    rank, failure = first_failure(error)
    how = f"with exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGBUS:
        how += " (a file that it had mapped was cut short, or a disk or /dev/shm is full)"
    elif failure.exitcode in (-signal.SIGABRT, -signal.SIGSEGV):
        how += culprits.limits()  # C++ code may have no words for it
    told: Any = failure.message  # what the rank gave ``tell_torchrun``, in a dictionary
    if isinstance(told, dict) and told["extraInfo"].get("printed") is False:
        print(told["message"], file=sys.stderr, flush=True)
    if "--master_addr" in sys.argv:
        ended = f"rank {rank} (process {failure.pid} on {platform.node()}) ended {how}"
        culprits.tell_end(*_master(sys.argv), ended)
    return print_error(f"rank {rank} (process {failure.pid}) ended first, {how}: see above why")


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Rank and failure that came first. One that a signal ended is seen a moment later than another
    of whose error it was the cause, which torchrun then ends by SIGTERM."""
    rank, failure = error.get_first_failure()
    for other, each in error.failures.items():
        is_cause = each.exitcode < 0 and each.exitcode != -signal.SIGTERM
        if is_cause and each.timestamp <= failure.timestamp + _GRACE_S:
            return other, each
    return rank, failure


def how_to_go_on() -> str:
    """The whole checkpoint that an ended run leaves, and the command that goes on from it."""
    save, again = os.environ.get("DPP_SAVE"), os.environ.get("DPP_GO_ON")
    if again is None:
        return ""  # a torchrun of one's own
    try:
        found = find(save or None)
    except DataError as error:
        return f"; {error}"
    if found is None:
        return "; there is no checkpoint to go on from (--save DIR, --save-interval N)"
    return (
        f"; the checkpoint of iteration {found.iteration} is in {save}, to go on: {again} "
        f"{shlex.quote(str(save))}"
    )


def _is_of_the_end(error: BaseException | None) -> bool:
    """True for what threads of PyTorch raise when a signal ends them."""
    return "cannot join current thread" in str(error)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    with LogWatch(), StoppedWatch():
        code = run()
    sys.exit(code)
