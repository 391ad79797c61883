"""Families are found in this package, in installed packages, and in a file of a user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf import flags_of
from megatron.dpp_train.hf.convert_command import main as convert
from megatron.dpp_train.hf.families import find_families
from megatron.dpp_train.hf.fields import read_config
from megatron.dpp_train.hf.forms import NAMES
from tests.conftest import REPOSITORY
from tests.hf import tiny

FILE = """
from dataclasses import replace
from megatron.dpp_train.hf.families.known.llama import LLAMA

FAMILY = replace(LLAMA, name="{name}")
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
    assert flags_of(folder, family_file=file)[:2] == ["--swiglu", "--disable-bias-linear"]
    with pytest.raises(DataError, match=r"'my_llama' is not supported; .*--family-file"):
        read_config(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected FAMILY to be a Family, not None"),
        ("FAMILY = 7", "expected FAMILY to be a Family, not 7"),
        ("x = 1\nFAMILY = y", "NameError in line 2: name 'y' is not defined"),
        ("FAMILY = (", "SyntaxError in line .*: '\\(' was never closed"),
    ],
)
def test_a_file_without_a_family_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "own.py", text)
    with pytest.raises(DataError, match=rf"--family-file {file}: {said}"):
        find_families(file)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.py: no such file"):
        find_families(tmp_path / "none.py")


PAGE = (REPOSITORY / "docs" / "families.md").read_text(encoding="utf-8")


def test_the_page_names_each_family_and_each_form() -> None:
    table = PAGE.partition("## Figures")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", table, re.MULTILINE))
    del rows["model_type"]
    assert set(rows) == set(find_families())
    for name, family in find_families().items():
        forms = {*family.flags, *family.fields.values()} & set(NAMES)
        assert all(f"`{form}`" in rows[name] for form in forms), name


def test_the_file_of_the_page_describes_its_family(tmp_path: Path) -> None:
    import transformers

    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    file, folder = write(tmp_path / "arcee.py", text), tmp_path / "afm"
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {**tiny.SIZES, "hidden_act": "relu2", "pad_token_id": None, "rope_parameters": rope}
    model = transformers.ArceeForCausalLM(transformers.ArceeConfig(**sizes))
    model.save_pretrained(folder)
    assert "--squared-relu" in flags_of(folder, family_file=file)
    for source, target in ((folder, tmp_path / "ours"), (tmp_path / "ours", tmp_path / "back")):
        assert convert([str(source), str(target), "--family-file", str(file)]) == 0
    before, after = (tiny.load(each).state_dict() for each in (folder, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)
