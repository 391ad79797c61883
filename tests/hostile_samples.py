"""Further files of strangers for ``tests.test_hostile_files``, and the doors that read them: whole
runs for a report and for a plan, recordings that are replayed, families, rows, prompts."""

from __future__ import annotations

import functools
import gzip
import importlib
import importlib.util
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.dpp_train.cost.run_costs import costs_of_run
from megatron.dpp_train.data.words import data_words
from megatron.dpp_train.families.registry import find_families
from megatron.dpp_train.generate.prompts import json_lines, read_texts
from megatron.dpp_train.options import run_file
from megatron.dpp_train.tokenizers import build_tokenizer

from megatron.dpp.errors import DppError
from megatron.dpp.report.building import build_report
from megatron.dpp.report.pictures.page import page
from megatron.dpp.report.report_command import build_parser
from megatron.dpp.report.run_files import read_training
from megatron.dpp.schedule import Geometry
from megatron.dpp.schedule.recording import DecisionRecorder, Recording
from megatron.dpp_train.data.chat_lines import read_chat
from megatron.dpp_train.data.json_lines import BadLine, parse_line, text_of
from megatron.dpp_train.data.rows import files_of, open_rows
from tests.report.synthetic import Run, write

Contents = dict[str, Callable[[], bytes]]
Sample = tuple[Contents, Callable[[Path], object]]
_FAMILY = b"""
from megatron.dpp_train.families.known.llama import FAMILY as LLAMA
import dataclasses
FAMILY = dataclasses.replace(LLAMA, name="own")
"""
_CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
_STATE = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "x"}
_METRICS = b"".join(
    json.dumps({
        "iteration": i, "train_iters": 9, "loss": 1.5, "grad_norm": 1.0, "ms": 2.5, "tokens": 7,
        "lr": 1e-3, "time": 1.5,
    }).encode() + b"\n"
    for i in range(1, 9)
)  # fmt: skip
_TRACED = "benchmark-data-0-pipeline-0-tensor-0.json"
_SPLITS = {"train": ["1", "a"], "valid": ["b"], "test": None}


def _trace(groups: tuple[int, ...]) -> Contents:
    """The files of a run of two ranks."""

    def made() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as place:
            folder = write(Run(ranks=2, microbatches=4, groups=groups), Path(place))
            return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    files = made()
    return {name: functools.partial(files.get, name) for name in files}


def _report(folder: Path) -> None:
    parser = build_parser("report")
    report, _ = build_report(parser.parse_args([str(folder)]))
    page(report)
    json.dumps(report.numbers())


def _shown(folder: Path) -> None:
    training = read_training(folder)
    assert training.home == folder
    _report(folder)


def _recording() -> bytes:
    with tempfile.TemporaryDirectory() as place:
        geometry = Geometry(1, 0, 1, 2)
        with DecisionRecorder(f"{place}/order", geometry) as recorder:
            recorder.write(geometry, (), split_backward=True, sizes=[1, 2])
        header, line = (Path(place) / "order.rank0").read_text().splitlines()
    own = json.loads(line) | {"actions": "0F0 0B0 0W0 0F1 0B1 0W1"}
    return f"{header}\n{json.dumps(own)}\n".encode()


def _replayed(folder: Path) -> None:
    found = Recording.load(str(folder / "order"), 0)
    found.backward(0)
    found.replay(0, Geometry(1, 0, 1, 2), split_backward=True)


def _zipped() -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write((json.dumps(_CHAT).encode() + b"\n") * 3)
    return packed.getvalue()


def _rows(path: Path) -> None:
    """As ``preprocess`` reads them."""
    for file in files_of(path):
        for line, _ in open_rows(file).lines:
            try:
                document = parse_line(line)
                read_chat(document) if "messages" in document else text_of(document, "text")
            except BadLine as error:
                raise DppError(str(error)) from error


def _rows_of(path: Path) -> None:
    for line, _ in open_rows(path).lines:
        parse_line(line)


def _words(folder: Path) -> None:
    none = dict.fromkeys(("data_args_path", "data_path"))
    path = str(folder / "splits.json")
    data_words(SimpleNamespace(**none, per_split_data_args_path=path))  # type: ignore[arg-type]


def _settings() -> bytes:
    from megatron.dpp_train.options.run_config import RunConfig

    return run_file._text(RunConfig(world_size=1), "gpt").encode()


def _table(form: str) -> bytes:
    """Rows as a Parquet file, or as a file of a data set that was saved to disk."""
    arrow: Any = importlib.import_module("pyarrow")
    table = arrow.table({"text": ["a", "b", None], "messages": [_CHAT["messages"]] * 3})
    packed = io.BytesIO()
    if form == "parquet":
        importlib.import_module("pyarrow.parquet").write_table(table, packed)
    else:
        with importlib.import_module("pyarrow.ipc").new_stream(packed, table.schema) as stream:
            stream.write_table(table)
    return packed.getvalue()


FURTHER: dict[str, Sample] = {
    f"a report of {_TRACED}": (_trace(()), _report),
    f"a report of slices {_TRACED}": (_trace((2, 2)), _report),
    f"a plan of {_TRACED}": (
        _trace(()),
        lambda folder: costs_of_run(str(folder), folder),
    ),
    "own.py": ({"own.py": lambda: _FAMILY}, lambda folder: find_families(folder / "own.py")),
    "a replayed order.rank0": ({"order.rank0": _recording}, _replayed),
    "chats.jsonl": (
        {"chats.jsonl": lambda: (json.dumps(_CHAT).encode() + b"\n") * 2},
        lambda folder: _rows(folder / "chats.jsonl"),
    ),
    "rows.json": (
        {"rows.json": lambda: json.dumps([{"text": "a"}, {"text": "b"}]).encode()},
        lambda folder: _rows(folder / "rows.json"),
    ),
    "chats.jsonl.gz": (
        {"chats.jsonl.gz": _zipped},
        lambda folder: _rows(folder / "chats.jsonl.gz"),
    ),
    "state.json": ({"state.json": lambda: json.dumps(_STATE).encode()}, files_of),
    "splits.json": ({"splits.json": lambda: json.dumps(_SPLITS).encode()}, _words),
    "prompts.txt": (
        {"prompts.txt": lambda: b"one\ntwo\n"},
        lambda folder: read_texts(folder / "prompts.txt"),
    ),
    "prompts.jsonl": (
        {"prompts.jsonl": lambda: json.dumps(_CHAT).encode() + b"\n"},
        lambda folder: list(json_lines(folder / "prompts.jsonl", "--chat")),
    ),
    "run.json": (
        {"run.json": _settings},
        lambda folder: run_file.read(str(folder / "run.json"), "gpt", 1),
    ),
    "vocab.txt": (
        {"vocab.txt": lambda: b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n"},
        lambda folder: build_tokenizer("BertWordPieceLowerCase", str(folder / "vocab.txt")),
    ),
    "a run's metrics.jsonl": ({"metrics.jsonl": lambda: _METRICS}, _shown),
    "a run's command": (
        {
            "metrics.jsonl": lambda: _METRICS,
            "command": lambda: b"torchrun pretrain_gpt.py --num-layers 2 --save x --lr=1e-3\n",
        },
        _shown,
    ),
    "a run's state.json": (
        {
            "metrics.jsonl": lambda: _METRICS,
            "state.json": lambda: (
                b'{"state": "finished", "by": null, "times": {"running": 1.5, "finished": 2.5}, '
                b'"host": "a", "process": 1, "process_began": 1.0}\n'
            ),
        },
        _shown,
    ),
}
"""Name -> the files of a folder that is whole, and the reader of that folder."""
_ARROW = "data-00000-of-00001.arrow"
_SAVED: Contents = {"state.json": lambda: json.dumps(_STATE).encode(), _ARROW: lambda: _table("")}
if importlib.util.find_spec("pyarrow") is not None:
    FURTHER |= {
        "rows.parquet": (
            {"rows.parquet": lambda: _table("parquet")},
            lambda folder: _rows_of(folder / "rows.parquet"),
        ),
        f"saved rows {_ARROW}": (_SAVED, _rows_of),
        "saved rows' state.json": (_SAVED, _rows_of),
        "splits of saved rows dataset_dict.json": (
            {"dataset_dict.json": lambda: b'{"splits": ["train", "test"]}'},
            lambda folder: [files_of(folder), *folder.iterdir()],
        ),
    }
