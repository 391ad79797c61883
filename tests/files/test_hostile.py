"""Flipped bits and hostile content in every file that a start reads.

Each is read, or is one error of this project; nothing else comes out of a reader, and none goes on
for ever.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DppError
from megatron.dpp.files.index_files import check_index, read_lengths
from megatron.dpp.report.reader import read_events, read_header
from megatron.dpp.report.run_files import read_metrics, read_state
from megatron.dpp.schedule.recording import Recording
from megatron.dpp_train.hf.folder import read_model
from megatron.dpp_train.text_files import read_json

_LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**15, 10**400, float("inf"), float("nan"), "", "x" * 5000, "\u00b2",
    "a\0b", "../../x", [], {}, [None], [[1]], {"x": {}}, ["llama"], "\ud800",
)  # fmt: skip
_CONTENTS = (
    b"", b"\0" * 100, b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"[]", b"null", b"1", b"1e400",
    b"9" * 5000, b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"\n" * 10_000, "\u00b2".encode(),
    b"a: &a [*a]", b"a: [" * 1000, b"a: 2024-13-45", b"{{ 1 / 0 }}", b"{% if %}", b"x" * 100_000,
)  # fmt: skip


def _index() -> bytes:
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    return head + struct.pack("<2i2q3q", 3, 2, 0, 12, 0, 1, 2)


def _trace(folder: Path) -> None:
    list(read_events(read_header(folder / "trace.json")))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_HEADER = {
    "name": "megatron-dpp-trace", "ph": "M", "pid": 0, "tid": 0, "ts": 0,
    "args": {
        "schema": 1, "data": 0, "pipeline": 0, "tensor": 0, "data_size": 1, "pipeline_size": 1,
        "tensor_size": 1, "num_chunks": 1, "schedule": "dpp", "rank": 0, "device": "cpu",
        "host": "h", "process": 1, "clock": "c", "run": "", "start_ns": 1, "start_unix_ns": 1,
    },
}  # fmt: skip
SAMPLES: dict[str, tuple[dict[str, Callable[[], bytes]], Callable[[Path], object]]] = {
    "config.json": ({"config.json": lambda: _json(_LLAMA)}, read_model),
    "settings.json": (
        {"settings.json": lambda: _json({"lr": 1e-4, "model": {"num_layers": 4}, "data": ["a"]})},
        lambda folder: read_json(folder / "settings.json"),
    ),
    "corpus.idx": (
        {"corpus.idx": _index, "corpus.bin": lambda: bytes(20)},
        lambda folder: (check_index(str(folder / "corpus")), read_lengths(str(folder / "corpus"))),
    ),
    "order.rank0": (
        {"order.rank0": lambda: b'{"format": "dpp-schedule", "version": 1}\n{"iteration": 0}\n'},
        lambda folder: Recording.load(str(folder / "order"), 0),
    ),
    "metrics.jsonl": (
        {"metrics.jsonl": lambda: b'{"iteration": 1, "loss": 1.5}\n{"iteration": 2, "loss": 1}\n'},
        lambda folder: read_metrics(folder / "metrics.jsonl"),
    ),
    "state.json": ({"state.json": lambda: b'{"state": "running", "time": 1.5}'}, read_state),
    "trace.json": ({"trace.json": lambda: b"[\n" + _json(_HEADER) + b",\n]\n"}, _trace),
}
"""File -> the files of a folder that is whole, and the reader of that folder."""


def flipped(content: bytes, draw: random.Random) -> bytes:
    """The content with one bit of another value."""
    place = draw.randrange(len(content) * 8)
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def hostile(content: bytes, draw: random.Random) -> bytes:
    """A hostile content: of any kind, cut short, or the good one with a hostile value."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.choice(_CONTENTS)
    if kind == 1:
        return content[: draw.randrange(len(content))] + draw.randbytes(draw.randrange(20))
    lines = content.split(b"\n")
    of_json = [number for number, line in enumerate(lines) if b"{" in line] or [0]
    number = draw.choice(of_json)
    before, _, text = lines[number].partition(b"{")
    text = text.rstrip(b"\0,]" if before.strip() else b"\0,")
    try:
        value = json.loads(b"{" + text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not value:
        return content.replace(draw.choice(content.split() or [b" "]), draw.choice(_CONTENTS), 1)
    outer, key = value, draw.choice(list(value))
    while isinstance(outer[key], dict) and outer[key] and draw.random() < 0.7:
        outer = outer[key]
        key = draw.choice(list(outer))
    outer[key] = draw.choice(_HOSTILE)
    comma = b"," if lines[number].endswith(b",") else b""
    lines[number] = before + _json(value) + comma
    return b"\n".join(lines)


def outcome(name: str, change: Callable[[bytes], bytes]) -> str:
    """The fate of a changed file: ``refused``, ``accepted``, or how the reader failed."""
    contents, read = SAMPLES[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for each, content in contents.items():
            changed = change(content()) if each == name.split()[-1] else content()
            (folder / each).write_bytes(changed)
        try:
            with deadline(20):
                read(folder)
        except DppError as error:
            text = str(error).replace(place, "")
            return "refused" if "\n" not in text and len(text) < 1000 else f"long: {text[:200]}"
        except TimeoutError:
            return "without end"
        except Exception as error:
            return f"raw: {type(error).__name__}: {str(error)[:200]}"
    return "accepted"


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Ends a block in the main thread by TimeoutError. A template's own budget ends before."""

    def over(*_: object) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, over)
    before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def turns(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Kind of change, file and outcome of ``count`` changes of each kind."""
    draw = random.Random(seed)
    for change in (flipped, hostile):
        for number in range(count):
            name = list(SAMPLES)[number % len(SAMPLES)]
            found = outcome(name, functools.partial(change, draw=draw))
            yield change.__name__, name, found


@pytest.mark.parametrize("name", SAMPLES)
def test_a_whole_file_is_read(name: str) -> None:
    assert outcome(name, lambda content: content) == "accepted"


def test_what_is_broken_or_hostile_is_one_error_or_read() -> None:
    wrong = [each for each in turns(120, 1) if each[2] not in ("refused", "accepted")]
    assert not wrong, "\n".join(map(str, wrong))
