"""Seeded mutations of well-formed input: values of JSON, texts, framed messages, plain bytes."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 1 << 16, 1 << 31, -(1 << 31), 1 << 63, 1 << 64, -(1 << 70),
    10**300, 0.0, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "0", "x" * 255, "x" * 257,
    "\ud800", "\0", "\n", "\N{EURO SIGN}" * 90, "nn", "float32", [], [[]], [None], [0] * 9, {},
    {"": 0}, {"a": {"b": [1]}},
)  # fmt: skip
"""Values that are put in the place of right ones."""


def odd_value(rng: random.Random) -> Any:
    """One of ``ODD``, or a number, text or nest of a random size."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice((1, -1)) * rng.getrandbits(rng.choice((7, 31, 63, 64, 200)))
    if kind == 1:
        return "".join(chr(rng.choice((rng.randrange(256), rng.randrange(0xD7FF, 0xE001))))
                       for _ in range(rng.randrange(40)))  # fmt: skip
    if kind == 2:
        value: Any = rng.choice(ODD)
        for _ in range(rng.randrange(60)):
            value = [value] if rng.random() < 0.5 else {"k": value}
        return value
    return copy.deepcopy(rng.choice(ODD))


def mutated_value(rng: random.Random, value: Any) -> Any:
    """A copy of a value of JSON with one to three changes somewhere in it."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places or rng.random() < 0.03:
            value = odd_value(rng)
            continue
        holder, key = rng.choice(places)
        way = rng.randrange(5)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            holder[rng.choice(("", "rank", "\ud800", "x", key * 2))] = odd_value(rng)
        elif way == 1:
            holder.insert(rng.randrange(len(holder) + 1), odd_value(rng))
        elif way == 2 and type(holder[key]) is int:
            holder[key] += rng.choice((-1, 1, 1 << 32, 1 << 63))
        else:
            holder[key] = odd_value(rng)
    return value


def _places(value: Any) -> Any:
    """Every (container, key or index) within a value of JSON."""
    entries: Any = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else entries:
        yield value, key
        yield from _places(inner)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes with bits flipped, cut, repeated, replaced or with more behind them."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(made) + 1)
        way = rng.randrange(6)
        if way == 0 and made:
            made[at % len(made)] ^= 1 << rng.randrange(8)
        elif way == 1:
            del made[at:]
        elif way == 2:
            made[at:at] = rng.randbytes(rng.choice((1, 2, 9, 64)))
        elif way == 3:
            made[at:at] = made[at : at + rng.randrange(40)]
        elif way == 4:
            filler = rng.choice((b"[", b'{"a":', b"9", b"\xff", b"\0", b'"', b"\\ud800"))
            made[at:at] = filler * rng.choice((1, 30, 600, 4000 // len(filler)))
        else:
            made[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, struct.pack("<Q", 1 << 63)))
    return bytes(made)


def text_of(rng: random.Random, message: Any) -> bytes:
    """A message as JSON, with changes in the value, in the bytes, or in neither."""
    way = rng.randrange(5)
    if way < 3:
        message = mutated_value(rng, message)
    body = json.dumps(message, ensure_ascii=rng.random() < 0.7).encode(errors="surrogatepass")
    return mutated_bytes(rng, body) if way > 2 else body


def framed(rng: random.Random, body: bytes) -> bytes:
    """A body behind its length; at times another length, a note's first byte, or more behind it."""
    length = len(body)
    if rng.random() < 0.1:
        length = rng.choice((0, 1, length - 1, length + 1, 4096, 4097, rng.getrandbits(16)))
    frame = struct.pack("<H", length & 0xFFFF) + body
    if rng.random() < 0.1:
        frame = frame[:2] + bytes([rng.randrange(8)]) + frame[rng.choice((2, 3)) :]
    if rng.random() < 0.1:
        frame = mutated_bytes(rng, frame)
    return frame[: 1 << 16]
