"""Flipped bits and hostile content in every file that a start reads.

Each is read, or is one error of this project; nothing else comes out of a reader, and none goes on
for ever. ``python -m tests.test_hostile_files 400`` counts what becomes of that many of each kind.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import random
import signal
import struct
import sys
import tempfile
import time
import zlib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.dpp_train.checkpoint import checksums, files
from megatron.dpp_train.options.yaml_file import defaults_from_yaml
from megatron.dpp_train.tokenizers import build_tokenizer
from megatron.dpp_train.tokenizers.template_files import find_templates
from megatron.dpp_train.tokenizers.templates import ChatTemplate

from megatron.dpp.errors import DppError
from megatron.dpp.index_files import check_index, read_lengths
from megatron.dpp.report.reader import read_events, read_header
from megatron.dpp.report.run_files import read_metrics
from megatron.dpp.schedule.recording import Recording
from megatron.dpp.sim.lengths import read_costs
from megatron.dpp.sim.measured import load_costs
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.hf.weights import find_weights, loaded_bytes
from tests.hostile_samples import FURTHER

_LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip
_TENSORS = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}
_SUMS = {"x": "0 0"}
_VOCABULARY = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
_TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token }}\n{% endfor %}"
_HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**15, 10**400, float("inf"), float("nan"), "", "x" * 5000, "\u00b2",
    "a\0b", "../../x", [], {}, [None], [[1]], {"x": {}}, ["llama"], "\ud800",
)  # fmt: skip
_CONTENTS = (
    b"", b"\0" * 100, b"[" * 100_000, b'{"a":' * 100_000, b"{}", b"[]", b"null", b"1", b"1e400",
    b"9" * 5000, b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"\n" * 10_000, "\u00b2".encode(),
    b"a: &a [*a]", b"a: [" * 1000, b"a: 2024-13-45", b"{{ 1 / 0 }}", b"{% if %}", b"x" * 100_000,
)  # fmt: skip


def _safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(24)


def _index() -> bytes:
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    return head + struct.pack("<2i2q3q", 3, 2, 0, 12, 0, 1, 2)


def _metadata() -> bytes:
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    places = {MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, 8)}
    return pickle.dumps(Metadata({}, None, places))


def _render(folder: Path) -> None:
    from megatron.dpp_train.tokenizers.templates import TemplateRefusal

    text = find_templates(str(folder / "template.jinja"), None)["default"]
    try:
        chat = [{"role": "user", "content": "x"}]
        ChatTemplate(text, {"eos_token": "</s>"}).render(chat, ask=True)
    except TemplateRefusal as error:
        raise DppError(str(error)) from error


def _checkpoint(folder: Path) -> None:
    found = files.find_named(folder)
    assert found is not None
    files.check_whole(found, 1, 1)
    sums = checksums.read(found.path)
    if sums is not None:
        checksums.check(found.path, sums, list(sums))


def _tracked(folder: Path) -> None:
    (folder / "iter_0000010").mkdir()
    files.find(str(folder))


def _settings(folder: Path) -> None:
    parser = ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--data-path", nargs="*")
    defaults_from_yaml(str(folder / "settings.yaml"), parser)


def _trace(folder: Path) -> None:
    list(read_events(read_header(folder / "trace.json")))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_STAGE = {"F": [1.0], "B": [1.0], "W": [0.0]}
_TIMES = {
    "format": "dpp-costs", "version": 1, "num_ranks": 1, "num_chunks": 1, "stages": [_STAGE],
    "hops": [],
}  # fmt: skip
_HEADER = {
    "name": "megatron-dpp-trace", "ph": "M", "pid": 0, "tid": 0, "ts": 0,
    "args": {
        "schema": 1, "data": 0, "pipeline": 0, "tensor": 0, "data_size": 1, "pipeline_size": 1,
        "tensor_size": 1, "num_chunks": 1, "schedule": "dpp", "rank": 0, "device": "cpu",
        "host": "h", "process": 1, "clock": "c", "run": "", "start_ns": 1, "start_unix_ns": 1,
    },
}  # fmt: skip
_OWN = f"{zlib.crc32(json.dumps(_SUMS).encode()):08x}"
SAMPLES: dict[str, tuple[dict[str, Callable[[], bytes]], Callable[[Path], object]]] = {
    "config.json": ({"config.json": lambda: _json(_LLAMA)}, read_config),
    "model.safetensors": (
        {"model.safetensors": lambda: _safetensors(_json(_TENSORS))},
        lambda folder: loaded_bytes(folder, 2),
    ),
    "model.safetensors.index.json": (
        {
            "model.safetensors.index.json": lambda: _json(
                {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
            ),
            "x.safetensors": lambda: _safetensors(_json(_TENSORS)),
        },
        find_weights,
    ),
    "vocab.json": (
        {"vocab.json": lambda: _json(_VOCABULARY), "merges.txt": lambda: b"#version: 0.2\na b\n"},
        lambda folder: build_tokenizer(
            "GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "merges.txt")
        ),
    ),
    "tokenizer_config.json": (
        {"tokenizer_config.json": lambda: _json({"chat_template": _TEMPLATE, "eos_token": "</s>"})},
        lambda folder: find_templates("default", str(folder)),
    ),
    "template.jinja": ({"template.jinja": _TEMPLATE.encode}, _render),
    "settings.yaml": (
        {"settings.yaml": lambda: b"lr: 1.0e-4\nmodel:\n  num_layers: 4\ndata-path: [a, b]\n"},
        _settings,
    ),
    ".metadata": (
        {
            ".metadata": _metadata,
            "common.pt": lambda: b"",
            "metadata.json": lambda: b"{}",
            "__0_0.distcp": lambda: bytes(8),
        },
        _checkpoint,
    ),
    "latest_checkpointed_iteration.txt": (
        {"latest_checkpointed_iteration.txt": lambda: b"10"},
        _tracked,
    ),
    "checksums.json": (
        {"checksums.json": lambda: _json({"crc32": _SUMS, "own": _OWN})},
        checksums.read,
    ),
    "corpus.idx": (
        {"corpus.idx": _index, "corpus.bin": lambda: bytes(20)},
        lambda folder: (check_index(str(folder / "corpus")), read_lengths(str(folder / "corpus"))),
    ),
    "costs.json": (
        {
            "costs.json": lambda: _json(
                {"fixed": 1.0, "per_token": [1, 2, 3], "per_square": [1, 2, 3]}
            )
        },
        lambda folder: read_costs(str(folder / "costs.json")),
    ),
    "times.json": (
        {"times.json": lambda: _json(_TIMES)},
        lambda folder: load_costs(folder / "times.json"),
    ),
    "order.rank0": (
        {"order.rank0": lambda: b'{"format": "dpp-schedule", "version": 1}\n{"iteration": 0}\n'},
        lambda folder: Recording.load(str(folder / "order"), 0),
    ),
    "metrics.jsonl": (
        {"metrics.jsonl": lambda: b'{"iteration": 1, "loss": 1.5}\n{"iteration": 2, "loss": 1}\n'},
        lambda folder: read_metrics(folder / "metrics.jsonl"),
    ),
    "trace.json": ({"trace.json": lambda: b"[\n" + _json(_HEADER) + b",\n]\n"}, _trace),
}
"""File -> the files of a folder that is whole, and the reader of that folder."""
SAMPLES |= FURTHER


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
    if len(before) == 8 and len(lines) == 1:
        return _safetensors(_json(value))
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
    wrong = [each for each in turns(40, 1) if each[2] not in ("refused", "accepted")]
    assert not wrong, "\n".join(map(str, wrong))


if __name__ == "__main__":
    _begin, _counts = time.monotonic(), collections.Counter[tuple[str, str, str]]()
    for _kind, _name, _found in turns(int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])):
        _counts[_kind, _found.split(":")[0], _name] += 1
        if _found not in ("refused", "accepted"):
            print(_kind, _name, _found, flush=True)
    for (_kind, _found, _name), _count in sorted(_counts.items()):
        print(f"{_kind:8s} {_found:12s} {_name:34s} {_count}")
    _kinds = collections.Counter[tuple[str, str]]()
    for (_kind, _found, _), _count in _counts.items():
        _kinds[_kind, _found] += _count
    print(dict(_kinds), f"{time.monotonic() - _begin:.0f} s")
