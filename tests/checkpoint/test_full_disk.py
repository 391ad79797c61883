"""A disk that runs full in a save: one plain error, and the checkpoint before is still good."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.guards import saving
from tests.loop.several import corpus
from tests.runtime.launcher import REPOSITORY, Finished, start, wait
from tests.small_disk import small_disk

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 "
    "--train-iters 50 --eval-iters 0 --transformer-impl local --device cpu "
    f"--num-workers 0 --vocab-file {REPOSITORY}/datasets_gpt/vocab.json "
    f"--merge-file {REPOSITORY}/datasets_gpt/merges.txt --log-interval 1 "
)


def run(more: str) -> Finished:
    words = f"{FLAGS} {corpus()} {more}".split()
    return wait(start(REPOSITORY / "pretrain_gpt.py", 1, words), timeout=100)[0]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for a few checkpoints."""
    with small_disk(tmp_path, 4 << 20) as path:
        yield path


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("", id="torch_dist"),
        pytest.param("--async-save", id="async", marks=pytest.mark.slow),
        pytest.param("--ckpt-format torch", id="torch", marks=pytest.mark.slow),
    ],
)
def test_a_disk_full_in_a_save_leaves_the_checkpoint_before(form: str, disk: Path) -> None:
    finished = run(f"--save {disk} --save-interval 1 {form}")
    assert finished.returncode == 1, finished.output[-4000:]
    last = int((disk / files.TRACKER).read_text())
    errors = [line for line in finished.output.splitlines() if ": error: rank " in line]
    assert len(errors) == 1
    assert f"{disk}/iter_{last + 1:07d}.unfinished: saving failed" in errors[0]
    assert re.search(r"no space left on device: \d+ of 4194304 bytes are free", errors[0])
    assert "Traceback (most recent call last):\n  File" not in finished.output
    resumed = run(f"--load {disk} --exit-interval {last + 2}")
    assert resumed.returncode == 0, resumed.output[-4000:]
    assert re.findall(r" iteration +(\d+)/", resumed.output) == [str(last + 1), str(last + 2)]


def test_only_a_full_disk_is_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=1 << 40, free=1 << 39)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=r"iter_0000007.unfinished: .*: Input/output error; "):
        _fail_to_save(tmp_path)
    usage.free = 1000
    with pytest.raises(DataError, match=r"\(no space left on device: 1000 of .* another --save\)"):
        _fail_to_save(tmp_path)


def _fail_to_save(root: Path) -> None:
    with saving(root / "not" / "there", 7):
        raise OSError("Input/output error")
