"""Measures transports over a C library that test_wire.py makes slow, or short of buffers.

Arguments: the extension module, the library with the faults (which LD_PRELOAD names).
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import threading
import time
from typing import Any

from tests.transport import raw


def small_put_behind_a_large_send(library: Any, faults: ctypes.CDLL) -> float:
    """Seconds of a small put while the progress thread is in the middle of a large send."""
    large, small = (ctypes.c_ubyte * (32 << 20))(), (ctypes.c_ubyte * 64)()
    channels = [raw.channel(0, 32 << 20), raw.channel(1, 64)]
    with raw.alone(library, 0, channels, connections=1) as sender:
        assert sender.put(0, large)  # more than the kernel takes
        faults.slow_large_sends(1500)
        raw.receive(sender.data[0], 8 << 20)  # room: the progress thread goes on
        time.sleep(0.2)
        start = time.monotonic()
        sender.put(1, small)
        seconds = time.monotonic() - start
        faults.slow_large_sends(0)
    return seconds


def pending_after_a_send_for_the_other(library: Any, faults: ctypes.CDLL) -> int:
    """Puts that stay pending although this thread sent them, in the progress thread's place."""
    small, large = (ctypes.c_ubyte * 64)(), (ctypes.c_ubyte * (300 << 10))()
    channels = [raw.channel(0, 64, 1), raw.channel(1, 300 << 10)]
    with raw.alone(library, 0, channels, connections=1) as sender:
        sender.put(0, small)
        assert sender.put(0, small, 1)  # no credit
        faults.slow_large_sends(1000)
        giving = threading.Timer(0.3, sender.control.sendall, [raw.credit(0, 1)])
        giving.start()
        sender.put(1, large)  # meanwhile the other message is queued behind it
        faults.slow_large_sends(0)
        giving.join()
        deadline = time.monotonic() + 3.0
        while sender.native.pending() and time.monotonic() < deadline:
            time.sleep(0.01)
        pending: int = sender.native.pending()
    return pending


def arrived_despite_shortages(library: Any, faults: ctypes.CDLL) -> int:
    """Messages that arrive where the first credit finds no buffer in the kernel, three times."""
    small, channels = (ctypes.c_ubyte * 64)(), [raw.channel(0, 64, 1)]
    control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    data = raw.tcp_pair()
    ends = [raw.start(library, rank, channels, [control[rank], data[rank]]) for rank in range(2)]
    sender, receiver = (raw.Rank(end, control[0], []) for end in ends)
    for microbatch in range(2):
        sender.put(0, small, microbatch)
    while receiver.native.poll(1) == [0]:
        receiver.native.wait(0.1)
    faults.short_of_buffers(3)
    receiver.take(0)
    deadline = time.monotonic() + 5.0
    while (arrived := receiver.native.poll(1)[0]) < 2 and time.monotonic() < deadline:
        receiver.native.wait(0.1)
    for end in ends:
        end.close()
    return int(arrived)


def closes_while_notes_come(library: Any, faults: ctypes.CDLL) -> bool:
    """True if a transport closes although its peer's notes never end."""
    with raw.alone(library, 0, [raw.channel(0, 64)]) as sender:
        faults.endless_notes(1)
        sender.control.sendall(raw.credit(0, 0))
        time.sleep(0.1)
        closing = threading.Thread(target=sender.native.close)
        closing.start()
        closing.join(10.0)
        closed = not closing.is_alive()
        faults.endless_notes(0)
        closing.join()
    return closed


def main() -> None:
    library, faults = raw.load(sys.argv[1]), ctypes.CDLL(sys.argv[2])
    found = {
        "small put": small_put_behind_a_large_send(library, faults),
        "pending": pending_after_a_send_for_the_other(library, faults),
        "arrived": arrived_despite_shortages(library, faults),
        "shortages left": faults.shortages_left(),
        "closes": closes_while_notes_come(library, faults),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
