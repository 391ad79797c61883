"""``generate`` gives transformers' answers for folders and checkpoints; hostile files end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train import hf
from megatron.dpp_train.data.tokenizer import of_transformers
from megatron.dpp_train.hf import prompts
from megatron.dpp_train.hf.generate_command import main
from tests.hf import tiny

BOMB = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(45) %}{% set ns.a=[ns.a,ns.a] %}"
    "{% set ns.b=[ns.b,ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
LONG = (
    "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    tiny.add_tokenizer(folder, ["Who is Ada? A baker."], 290)
    return tiny.make("llama", folder, vocab_size=290, eos_token_id=7)


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    hf.to_megatron(model, model.parent / "ours")
    return model.parent / "ours"


def greedy(model: Path, ids: list[int], most: int, ends: tuple[int, ...]) -> list[int]:
    """The likeliest tokens, by whole forwards."""
    network, found = tiny.load(model), list(ids)
    for _ in range(most):
        with torch.no_grad():
            found.append(int(network(torch.tensor([found])).logits[0, -1].argmax()))
        if found[-1] in ends:
            break
    return found[len(ids) :]


def lines(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_checkpoint_answers_as_its_folder_and_as_transformers(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = ["Who is Ada?", "A baker"]
    (tmp_path / "texts.txt").write_text("\n".join(questions))
    chats = [{"messages": [{"role": "user", "content": each}]} for each in questions]
    chats[0]["messages"].append({"role": "assistant", "content": "gone"})
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    tokenizer = of_transformers(model)
    for flag, file, asked in (
        ("--prompts", "texts.txt", [tokenizer(each)["input_ids"] for each in questions]),
        (
            "--chat",
            "chats.jsonl",
            [tokenizer.encode(f"<|start|>user\n{q}<|end|><|start|>assistant\n") for q in questions],
        ),
    ):
        words = (flag, tmp_path / file, "--max-new-tokens", 12)
        found = lines(capsys, model, *words)
        assert found == lines(capsys, checkpoint, *words)
        for line, ids in zip(found, asked, strict=True):
            wanted = greedy(model, ids, 12, (1, 7))
            stopped = wanted[-1] in (1, 7)
            assert line["finish"] == ("stop" if stopped else "length")
            assert line["tokens"] == len(wanted) - stopped
    assert found[0]["messages"][0]["content"] == questions[0]
    assert len(found[0]["messages"]) == 2


@pytest.mark.slow
def test_draws_follow_the_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompt", "Ada", "--prompt", "Who", "--temperature", 2, "--top-k", 50)
    one, again = (lines(capsys, model, *words, "--seed", seed) for seed in (1, 1))
    other = lines(capsys, model, *words, "--seed", 2)
    assert one == again != other
    assert lines(capsys, model, *words[2:], "--prompt", "Ada", "--seed", 1)[0] == one[1]


def test_wrong_input_is_one_line(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "hf" / "tokenizer.json").unlink()
    (bare / "hf" / "tokenizer_config.json").unlink()
    (tmp_path / "bad.jsonl").write_text('{"x": 1}')
    (tmp_path / "bomb.jinja").write_text("{{ messages[0].x.y }}")
    for said, *words in (
        ("--max-new-tokens 0: must be at least 1", model, "--prompt", "x", "--max-new-tokens", 0),
        ("--top-p 2.0: must be above 0", model, "--prompt", "x", "--top-p", 2),
        ("a prompt is empty", model, "--prompt", " "),
        ("No such file", model, "--prompts", tmp_path / "none.jsonl"),
        ("expected an object with a text or messages", model, "--prompts", tmp_path / "bad.jsonl"),
        ("64 positions", model, "--prompt", "x " * 90),
        ("no checkpoint of Megatron is there", tmp_path, "--prompt", "x"),
        ("its tokenizer is not known", bare, "--prompt", "x"),
        ("UndefinedError", model, "--chat", "x", "--chat-template", tmp_path / "bomb.jinja"),
    ):
        capsys.readouterr()
        assert main([str(word) for word in words]) in (1, 2), said
        error = capsys.readouterr().err.splitlines()
        assert said in error[-1]
        assert len([line for line in error if "error" in line]) == 1


@pytest.mark.parametrize("template", [BOMB, pytest.param(LONG, marks=pytest.mark.slow)])
def test_a_hostile_template_ends(
    template: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that no signal of Python interrupts, and more memory than there is."""
    monkeypatch.setattr(prompts, "SECONDS", 1.0)
    with pytest.raises(DataError, match=f"more memory|{model}"):
        prompts.encode(model, [[{"role": "user", "content": "x"}]], template)


def test_a_model_tuned_on_chats_names_the_end_of_an_answer(model: Path, tmp_path: Path) -> None:
    """Its tokenizer is that of the run."""
    from megatron.dpp_train.hf import convert

    run = tmp_path / "run"
    tiny.add_tokenizer(run, ["A baker."], 285)
    hf.to_megatron(model, tmp_path / "ours")
    target = tmp_path / "target"
    shutil.copytree(model, target)
    values = {"tokenizer_model": str(run), "data_path": ["1", "x_chat_document"]}
    assert convert.keep_tokenizer(type("Args", (), values), target) == ()
    assert (target / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    ends = json.loads((target / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [7, 1]
    assert prompts.encode(model, [], "{{ messages[1].content }}") == ([], None)
