"""Several small runs in one start of processes: importing PyTorch takes longer than they do."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.parity.runs import Result, read
from tests.runtime.launcher import run_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--eval-iters 0 --transformer-impl local --device cpu "
    "--num-workers 0 --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 100 "
)
SPLIT = "--split 8,1,1"


def train_each(
    folder: Path,
    num_ranks: int,
    runs: dict[str, str],
    data: str | None = None,
    timeout: float = 120,
    *,
    with_engine: bool = False,
) -> dict[str, Result]:
    """The runs in the order of ``runs``, which gives each one's flags beyond ``FLAGS`` and
    ``data`` (default: a small corpus); ``DIR`` in them is ``folder``, whose file ``output`` has
    what they say. ``with_engine`` puts the stand-in for Transformer Engine into the environment."""
    if data is None:
        data = f"--data-path {_write_tokens(folder / 'tokens')} {SPLIT}"
    lines = [
        f"{FLAGS} {data} {more} --metrics-file DIR/{name}.jsonl".replace("DIR", str(folder)).split()
        for name, more in runs.items()
    ]
    path = folder / "command_lines.json"
    path.write_text(json.dumps(lines))
    worker = Path(__file__).with_name("runs_worker.py")
    words = [str(path), *["with-engine"] * with_engine]
    before = "libraries" if with_engine else "job"
    said = run_ranks(worker, num_ranks, words, timeout=timeout, preload=before)
    (folder / "output").write_text(said)
    return {name: read(folder / f"{name}.jsonl") for name in runs}


@functools.cache
def tokens() -> Path:
    """The prefix of a small corpus, which the tests of a session share."""
    folder = tempfile.mkdtemp(prefix="dpp-corpus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _write_tokens(Path(folder) / "tokens")


def corpus() -> str:
    """Flags of the small corpus."""
    return f"--data-path {tokens()} {SPLIT}"


def _write_tokens(prefix: Path) -> Path:
    """A corpus of 100 documents in a moment, which megatron-core's mock data takes long for."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in range(100):
        builder.add_document((torch.arange(40) * document + document) % 100, [40])
    builder.finalize(f"{prefix}.idx")
    return prefix
