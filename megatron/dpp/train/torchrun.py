"""torchrun with one line instead of its traceback when a node is missing, a rank fails, or Ctrl-C
is pressed, and without the folder that it leaves in the temporary directory.

``python -m megatron.dpp.train.torchrun`` takes torchrun's arguments.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.run import main

_FAILED = 1
_LOOPBACK = "127.0.0.1"


class _LocalStore(TCPStore):
    """A store whose server, whatever its ``host_name``, listens on the loopback address alone."""

    def __init__(self, host_name: str, port: int = 0, *rest: Any, **options: Any) -> None:
        server = options.get("is_master", rest[1] if len(rest) > 1 else False)
        if server:
            listener = socket.create_server((_LOOPBACK, port), backlog=2048)
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # the store's from here on
        super().__init__(_LOOPBACK, port, *rest, **options)


def _stay_on_this_host() -> None:
    """Bind the stores of a run on one node to the loopback address."""
    c10d_rendezvous_backend.TCPStore = _LocalStore  # type: ignore[attr-defined]
    torch.distributed.TCPStore = _LocalStore  # type: ignore[attr-defined]
    sys.argv[1:1] = ["--local-addr", _LOOPBACK]


def run() -> int:
    """Runs torchrun; 1 when the nodes do not meet in time or a rank fails, 128 plus the number of
    a signal that ended it."""
    try:
        with tempfile.TemporaryDirectory(prefix="torchrun_", ignore_cleanup_errors=True) as folder:
            os.environ.setdefault("PET_LOG_DIR", folder)  # as --log-dir, which wins
            if "--standalone" in sys.argv:
                _stay_on_this_host()
            main()
    except DistStoreError as error:
        return _say(
            f"error: not all nodes came ({str(error).rstrip('.')}): start run_worker_*.sh with the "
            "same NUM_NODES and MASTER_PORT on every other node within WAIT_SECONDS, and check "
            "that MASTER_ADDR and the port can be reached from there"
        )
    except DistNetworkError as error:
        why = str(error).rstrip(".")
        remedy = "check MASTER_ADDR, MASTER_PORT and the firewall"
        if "EADDRINUSE" in why:
            remedy = "another run has this port; name another MASTER_PORT, or on one node none"
        return _say(f"error: the processes cannot meet ({why}): {remedy}")
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"with exit code {failure.exitcode}"
        if failure.exitcode < 0:
            how = f"by {failure.signal_name()}"
        return _say(f"error: rank {rank} (process {failure.pid}) ended first, {how}: see above why")
    except SignalException as error:
        return _say(f"ended by {error.sigval.name}; its processes are gone", 128 + error.sigval)
    except KeyboardInterrupt:  # before there are processes
        return _say("ended by SIGINT", 130)
    return 0


def _say(text: str, code: int = _FAILED) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(run())
