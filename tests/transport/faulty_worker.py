"""Measures transports over calls that csrc/tests/faulty_calls.cc makes slow, short or interrupted.

Arguments: the extension module, the library with the faults (which LD_PRELOAD names), and a folder
whose files tell of a full control group. Prints what test_faulty_calls.py looks at, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import resource
import socket
import sys
import threading
import time
from typing import Any

from megatron.dpp.errors import SetupError
from tests.transport import raw

MIB = 1 << 20


def small_put_behind_a_large_send(library: Any, faults: ctypes.CDLL) -> float:
    """Seconds of a small put while the progress thread is in the middle of a large send."""
    large, small = (ctypes.c_ubyte * (32 << 20))(), (ctypes.c_ubyte * 64)()
    channels = [raw.channel(0, 32 << 20), raw.channel(1, 64)]
    with raw.alone(library, 0, channels, connections=1) as sender:
        assert sender.put(0, large)  # more than the kernel takes
        faults.fault(b"slow-sends-ms", 1500)
        raw.receive(sender.data[0], 8 << 20)  # room: the progress thread goes on
        time.sleep(0.2)
        start = time.monotonic()
        sender.put(1, small)
        seconds = time.monotonic() - start
        faults.fault(b"slow-sends-ms", 0)
    return seconds


def pending_after_a_send_for_the_other(library: Any, faults: ctypes.CDLL) -> int:
    """Puts that stay pending although this thread sent them, in the progress thread's place."""
    small, large = (ctypes.c_ubyte * 64)(), (ctypes.c_ubyte * (300 << 10))()
    channels = [raw.channel(0, 64, 1), raw.channel(1, 300 << 10)]
    with raw.alone(library, 0, channels, connections=1) as sender:
        sender.put(0, small)
        assert sender.put(0, small, 1)  # no credit
        faults.fault(b"slow-sends-ms", 1000)
        giving = threading.Timer(0.3, sender.control.sendall, [raw.credit(0, 1)])
        giving.start()
        sender.put(1, large)  # meanwhile the other message is queued behind it
        faults.fault(b"slow-sends-ms", 0)
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
    faults.fault(b"shortages", 3)
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
        faults.fault(b"endless", 1)
        sender.control.sendall(raw.credit(0, 0))
        time.sleep(0.1)
        closing = threading.Thread(target=sender.native.close)
        closing.start()
        closing.join(10.0)
        closed = not closing.is_alive()
        faults.fault(b"endless", 0)
        closing.join()
    return closed


def waits(
    library: Any, faults: ctypes.CDLL, *, spin: bool, kept_us: int, turns: int
) -> list[float]:
    """Times that waits give their core to another process, which keeps it; the seconds; and times
    that waits leave it until something wakes them."""
    settings = {"timeout": 1.0, "checksum": False, "max_pending": 2, "spin": spin}
    transport = library.Transport(rank=0, incoming=[], outgoing=[], **settings)
    faults.fault(b"kept-us", kept_us)
    faults.fault(b"yields", 0)
    before, start = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.monotonic()
    while turns > 0 or (spin and not faults.fault_left(b"yields")):
        transport.poll(0)
        transport.wait(0.001)
        turns -= 1
        if time.monotonic() > start + 30:  # a busy machine may take the core for a whole spin
            break
    sleeps = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    found = [faults.fault_left(b"yields"), time.monotonic() - start, sleeps]
    faults.fault(b"kept-us", 0)
    transport.close()
    return found


def receiver(library: Any, slot_bytes: int) -> Any:
    """A transport with two slots."""
    ends = [socket.socketpair()[0] for _ in range(2)]
    return raw.start(library, 1, [raw.channel(0, slot_bytes)], ends)


def bytes_of_slots(library: Any) -> int:
    """Memory that two slots of 8 MiB have before anything arrives."""
    before = raw.resident()
    made = receiver(library, 8 * MIB)
    found = raw.resident() - before
    made.close()
    return found


def refusal(library: Any, slot_bytes: int) -> str:
    """The error of slots for which there is no room, or ""."""
    try:
        receiver(library, slot_bytes).close()
    except SetupError as error:
        return str(error)
    return ""


def main() -> None:
    library, faults = raw.load(sys.argv[1]), ctypes.CDLL(sys.argv[2])
    found: dict[str, Any] = {"pages": [bytes_of_slots(library)]}
    faults.fault(b"old-kernel", 1)
    found["pages"].append(bytes_of_slots(library))
    faults.groups_are_below(sys.argv[3].encode())
    found["full group"] = [refusal(library, size) for size in (MIB, MIB // 4)]
    faults.groups_are_below(b"")
    faults.fault(b"interrupts", 2)
    settings = {"timeout": 1.0, "checksum": False, "max_pending": 2, "spin": False}
    library.Transport(rank=0, incoming=[], outgoing=[], **settings).close()
    found |= {
        "small put": small_put_behind_a_large_send(library, faults),
        "pending": pending_after_a_send_for_the_other(library, faults),
        "arrived": arrived_despite_shortages(library, faults),
        "shortages left": faults.fault_left(b"shortages"),
        "closes": closes_while_notes_come(library, faults),
        "sleep": waits(library, faults, spin=False, kept_us=0, turns=20),
        "spin": waits(library, faults, spin=True, kept_us=0, turns=20),
        "busy": waits(library, faults, spin=True, kept_us=1000, turns=60),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
