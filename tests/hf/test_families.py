"""Families are found in this package, in installed packages, and in a file of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.dpp_train.families import ENTRY_POINTS, find_families
from megatron.dpp_train.families.left_out import LEFT_OUT
from megatron.dpp_train.launch.flags import model_flags

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf import read_config

FILE = """
from dataclasses import replace
from megatron.dpp_train.families.known import llama

FAMILY = replace(llama.FAMILY, name="{name}")
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def folder_of(path: Path, name: str) -> Path:
    sizes = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
        "max_position_embeddings": 16,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": name, **sizes}))
    return path


def test_each_family_has_the_name_of_its_module() -> None:
    found = find_families()
    assert len(found) >= 7
    assert all(name == family.name for name, family in found.items())


def test_a_file_adds_a_family(tmp_path: Path) -> None:
    file = write(tmp_path / "own.py", FILE.format(name="my_llama"))
    folder = folder_of(tmp_path / "model", "my_llama")
    assert "my_llama" in find_families(file)
    assert read_config(folder, file).family.name == "my_llama"
    assert model_flags(str(folder), str(file))["--num-layers"] == 2
    with pytest.raises(DataError, match=r"'my_llama' is not supported; .*--family-file"):
        read_config(folder)


def test_an_installed_package_adds_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "others_family.py", FILE.format(name="others"))
    info = tmp_path / "others-1.dist-info"
    info.mkdir()
    write(info / "METADATA", "Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    points = write(info / "entry_points.txt", f"[{ENTRY_POINTS}]\nothers = others_family\n")
    monkeypatch.syspath_prepend(tmp_path)
    find_families.cache_clear()
    try:
        assert find_families()["others"].class_name == "LlamaForCausalLM"
        points.write_text(f"[{ENTRY_POINTS}]\nothers = nowhere\n")
        find_families.cache_clear()
        with pytest.raises(DataError, match=r"entry point others = nowhere .*No module named"):
            find_families()
    finally:
        find_families.cache_clear()
        points.unlink()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected FAMILY to be a Family, not None"),
        ("FAMILY = 7", "expected FAMILY to be a Family, not 7"),
        ("x = 1\nFAMILY = y", "NameError in line 2: name 'y' is not defined"),
        ("FAMILY = (", "SyntaxError in line 1: '\\(' was never closed"),
    ],
)
def test_a_file_without_a_family_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "own.py", text)
    with pytest.raises(DataError, match=rf"--family-file {file}: {said}"):
        find_families(file)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.py: no such file"):
        find_families(tmp_path / "none.py")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_family_that_is_left_out_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"model_type '{name}' is left out: "):
        read_config(folder_of(tmp_path / "model", name))
    assert name not in find_families()
