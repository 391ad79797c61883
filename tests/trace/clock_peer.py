"""One of two processes with different clocks that exchange messages over TCP and record them.

Usage: clock_peer.py RANK DIRECTORY ADDRESS PORT. Rank 0 listens, rank 1 connects.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from types import SimpleNamespace

from megatron.dpp.trace import TraceLayout, open_recorder
from tests.report.synthetic import Channel

MESSAGES = 200
_WORDS = struct.Struct("qq")


def _connect(rank: int, address: str, port: int) -> socket.socket:
    if rank == 0:
        with socket.create_server((address, port)) as server:
            return server.accept()[0]
    for _ in range(200):
        try:
            return socket.create_connection((address, port), timeout=10)
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"no connection to {address}:{port}")


def main(rank: int, directory: str, address: str, port: int) -> None:
    layout = TraceLayout(
        data=0, pipeline=rank, tensor=0, data_size=1, pipeline_size=2, tensor_size=1
    )
    there, back = Channel(rank, 1 - rank, 0, rank), Channel(1 - rank, rank, 0, 1 - rank)
    recorder = open_recorder(directory, rank=rank, layout=layout, run="peers")
    with recorder, _connect(rank, address, port) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        recorder.begin_iteration(0)
        for turn in range(2 * MESSAGES):
            number = turn // 2
            if turn % 2 == rank:
                recorder.put(there, number, 16, "tcp")
                link.sendall(_WORDS.pack(time.monotonic_ns(), number))
            else:
                sent, number = _WORDS.unpack(link.recv(_WORDS.size, socket.MSG_WAITALL))
                arrived = time.monotonic_ns()
                message = SimpleNamespace(
                    iteration=0, microbatch=number, sent_ns=sent, arrived_ns=arrived
                )
                recorder.taken(back, message)
        recorder.end_iteration()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
