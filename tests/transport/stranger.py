"""A program that bothers a rank's listener until it is killed: ``stranger.py ADDRESS flood|drip``.

ADDRESS is ``HOST:PORT``, or the name of an abstract unix socket. It prints a line as soon as the
rank has its first connections. ``--user UID`` makes it another user's. It needs no PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import encodings.idna  # noqa: F401  another user may not be able to read it later
import os
import socket
import time
from collections.abc import Iterator

DRIPPING = 40
"""Connections that send one byte at a time."""
HELLOS = (b"", b"\xff", b"\x00\x00", b"\xff\xff", b"\x02\x00{}", b"\x0a\x00not json!!")
_KEPT = 20
_LONGEST = 60.0


def _reach(address: str) -> socket.socket:
    host, colon, port = address.rpartition(":")
    if colon:
        return socket.create_connection((host, int(port)), timeout=0.1)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    try:
        made.connect("\0" + address)
    except OSError:
        made.close()
        raise
    return made


def flood(address: str) -> Iterator[None]:
    """Connect, say something wrong or nothing, and hang up some connections later."""
    kept: list[socket.socket] = []
    while True:
        for hello in HELLOS:
            with contextlib.suppress(OSError):
                kept.append(_reach(address))
                kept[-1].send(hello)
            if len(kept) > _KEPT:
                kept.pop(0).close()
            time.sleep(0.0005)
        yield


def drip(address: str) -> Iterator[None]:
    """Keep ``DRIPPING`` connections, which send one byte after the other."""
    places: list[socket.socket | None] = [None] * DRIPPING
    while True:
        for index, place in enumerate(places):
            try:
                places[index] = place or _reach(address)
                places[index].send(b"\x05")  # type: ignore[union-attr]
            except BlockingIOError:
                pass
            except OSError:
                if place is not None:
                    place.close()
                places[index] = None
        yield
        time.sleep(0.005)


def main() -> None:
    """Bother the rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("how", choices=("flood", "drip"))
    parser.add_argument("--user", type=int)
    args = parser.parse_args()
    if args.user is not None:
        os.setuid(args.user)
    rounds = flood(args.address) if args.how == "flood" else drip(args.address)
    until = time.monotonic() + _LONGEST
    next(rounds)
    print("ready", flush=True)
    while time.monotonic() < until:
        next(rounds)


if __name__ == "__main__":
    main()
