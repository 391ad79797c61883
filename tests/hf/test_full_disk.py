"""``convert`` and ``preprocess`` on a disk that runs full: one line, which names a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.dpp_train.data import preprocess_command as preprocess
from megatron.dpp_train.hf.convert_command import main
from tests.hf.tiny import make
from tests.small_disk import small_disk

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The tiny model needs more."""
    with small_disk(tmp_path, 64 << 10) as path:
        yield path


def test_a_conversion_says_so_in_one_line(
    disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It printed 60 lines and two tracebacks."""
    source, whole = make("llama", tmp_path / "source"), tmp_path / "whole"
    assert main([str(source), str(whole)]) == 0
    capfd.readouterr()
    for given, name in ((source, "__0_0.distcp"), (whole, "model.safetensors")):
        assert main([str(given), str(disk / "target")]) == 1
        error = capfd.readouterr().err
        assert error.startswith(f"megatron-dpp convert: error: {disk / 'target'}: {name}: ")
        assert "no space left on device: " in error and error.count("\n") == 1
        assert os.listdir(disk) == []


def test_preprocessing_names_the_file(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said `[Errno 28] No space left on device` and nothing else."""
    source = tmp_path / "text.jsonl"
    line = json.dumps({"text": " ".join(map(str, range(5000)))})
    source.write_text(f"{line}\n" * 40)
    words = ["--input", str(source), "--output-prefix", str(disk / "out"), "--workers", "1"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"]
    assert preprocess.main(words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("megatron-dpp preprocess: error: [Errno 28] No space left on device: ")
    assert str(disk) in error and "out_text_document.bin" in error
    assert os.listdir(disk) == []
