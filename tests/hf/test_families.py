"""Each family is on its page, and the page's example is a family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.dpp_train.hf import flags_of, to_hf, to_megatron
from megatron.dpp_train.hf.families import find_families, known
from megatron.dpp_train.hf.forms import NAMES
from tests.conftest import REPOSITORY
from tests.hf import tiny

PAGE = (REPOSITORY / "docs" / "families.md").read_text(encoding="utf-8")


def test_the_page_names_each_family_and_each_form() -> None:
    table = PAGE.partition("## Figures")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", table, re.MULTILINE))
    del rows["model_type"]
    assert set(rows) == set(find_families())
    for name, family in find_families().items():
        forms = {*family.flags, *family.fields.values()} & set(NAMES)
        assert all(f"`{form}`" in rows[name] for form in forms), name


def test_the_file_of_the_page_describes_its_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "arcee.py").write_text(text)
    monkeypatch.setattr(known, "__path__", [*known.__path__, str(tmp_path)])
    find_families.cache_clear()
    folder = tmp_path / "afm"
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    sizes = {**tiny.SIZES, "hidden_act": "relu2", "pad_token_id": None, "rope_parameters": rope}
    model = transformers.ArceeForCausalLM(transformers.ArceeConfig(**sizes))
    model.save_pretrained(folder)
    try:
        assert "--squared-relu" in flags_of(folder)
        to_megatron(folder, tmp_path / "ours")
        to_hf(tmp_path / "ours", tmp_path / "back")
    finally:
        find_families.cache_clear()
    before, after = (tiny.load(each).state_dict() for each in (folder, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)
