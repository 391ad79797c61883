"""The folder of a fine-tuned model has the tokenizer, template and end of answers of its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.generate.model_source import Source, tokenizer_of
from megatron.dpp_train.hf.run_files import end_ids, keep_run_files
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.tokenizers import HuggingFaceTokenizer, template_files
from tests.hf import tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ada."}]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer with a token that ends a turn, which is not that at the end of a text."""
    folder = tmp_path / "tokenizer"
    tiny.add_tokenizer(folder, ["Who is Ada?"], 290)
    content = json.loads((folder / "tokenizer.json").read_text())
    free = len(content["model"]["vocab"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": free, "content": "<|turn|>"})
    content["truncation"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def started_from(tokenizer: Path, **ends: Any) -> Path:
    """A model's folder with the files of a tokenizer."""
    folder = tokenizer.with_name("model")
    shutil.copytree(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    if ends:
        (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def settings(tokenizer: Path, **more: Any) -> Settings:
    given = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    return Settings.of({**given, "sft": True, "sft_tokenizer_prompt_format": "auto", **more})


MADE = {"eos_token_id": [1, 2], "top_p": 0.5, "_from_model_config": True}


@pytest.mark.parametrize("ends", [{}, MADE], ids=["none", "two"])
def test_a_template_of_the_run_goes_with_the_model(ends: dict[str, Any], tokenizer: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    folder = started_from(tokenizer, **ends)
    file = tokenizer.with_name("own.jinja")
    file.write_text(TEMPLATE)
    assert keep_run_files(settings(tokenizer, sft_tokenizer_prompt_format=str(file)), folder) == ()
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, tokenize=False)
    assert text == "[user]Who?<|turn|>\n[assistant]Ada.<|turn|>\n"
    turn = HuggingFaceTokenizer(str(tokenizer)).vocab["<|turn|>"]
    wanted = [*ends.get("eos_token_id", [1]), turn]
    found = GenerationConfig.from_pretrained(folder)
    assert found.eos_token_id == end_ids(folder) == wanted
    assert "_from_model_config" not in (folder / "generation_config.json").read_text()
    assert found.top_p == ends.get("top_p", found.top_p)


def test_a_model_without_a_template_keeps_the_plain_one(tokenizer: Path) -> None:
    config = tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    folder = started_from(tokenizer)
    assert keep_run_files(settings(tokenizer), folder) == ()
    assert template_files.templates_beside(folder) == {"default": template_files.PLAIN}
    assert end_ids(folder) == [1]  # <|end|>, which ends a text, too
    assert not (folder / "generation_config.json").exists()


def test_the_tokenizer_and_both_templates_are_those_of_the_run(tokenizer: Path) -> None:
    folder = started_from(tokenizer)
    (folder / "tokenizer.json").write_text("{}")
    tools = tokenizer / template_files.TOOL_FILE
    tools.parent.mkdir()
    tools.write_text("tools")
    (tokenizer / template_files.FILE).write_text(TEMPLATE)
    assert keep_run_files(settings(tokenizer), folder) == ()
    for name in ("tokenizer.json", template_files.FILE, template_files.TOOL_FILE):
        assert (folder / name).read_bytes() == (tokenizer / name).read_bytes()


def test_a_run_on_texts_leaves_template_and_ends_alone(tokenizer: Path) -> None:
    folder = started_from(tokenizer)
    before = sorted(folder.iterdir()), (folder / "tokenizer_config.json").read_text()
    assert keep_run_files(settings(tokenizer, sft=False), folder) == ()
    assert (sorted(folder.iterdir()), (folder / "tokenizer_config.json").read_text()) == before


def test_a_template_that_is_gone_is_a_note(tokenizer: Path) -> None:
    folder = started_from(tokenizer)
    before = sorted(folder.iterdir())
    gone = settings(tokenizer, sft_tokenizer_prompt_format="gone.jinja")
    (note,) = keep_run_files(gone, folder)
    assert "gone.jinja" in note and "not the run's" in note
    assert sorted(folder.iterdir()) == before


def test_a_tokenizer_that_has_changed_since_the_run_began_is_not_the_runs(tokenizer: Path) -> None:
    folder = started_from(tokenizer)
    run = settings(tokenizer, tokenizer_tokens=HuggingFaceTokenizer(str(tokenizer)).tokens())
    assert keep_run_files(run, folder) == ()
    run = settings(tokenizer, tokenizer_tokens="9:0")
    (note,) = keep_run_files(run, folder)
    assert "has other tokens now than when the run began" in note
    source = Source(path=folder, found=None, saved=run, folder=None, config=None)
    with pytest.raises(DataError, match="has other tokens now than when the run began"):
        tokenizer_of(source, None)
