"""``train --tokenizer``: what each choice stands for, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy
import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.data import vocabulary
from megatron.dpp_train.data.vocabulary import sample_vocabulary, tokenizer_flags
from megatron.dpp_train.launch.main import plan
from megatron.dpp_train.launch.start import describe_tokens, prepare, run_preparation
from megatron.dpp_train.tokenizers import build_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"text": f"the quick brown fox, number {n} of them"}) for n in range(50)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_text_without_a_tokenizer_is_refused_with_the_choices(text: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(["--procs", "2", "--data", str(text)])
    for choice in ("gpt2", "DIR_OR_FILE", "train:32000", "sample"):
        assert f"--tokenizer {choice}" in str(refused.value)


def test_a_tokenizer_is_trained_once_and_used(text: Path) -> None:
    flags = tokenizer_flags("gpt", "train:280", text)
    vocab = Path(flags["--vocab-file"])
    assert vocab.parent.parent == text.parent and len(json.loads(vocab.read_text())) == 280
    written = vocab.stat().st_mtime_ns
    assert tokenizer_flags("gpt", "train:280", text) == flags
    assert vocab.stat().st_mtime_ns == written
    trained = build_tokenizer("GPT2BPETokenizer", *flags.values())
    said = "the quick brown fox \u00fc"
    assert trained.detokenize(trained.tokenize(said)) == said
    data = prepare("gpt", str(text), {}, tokenizer="train:280")
    assert data.preparation is not None
    run_preparation([sys.executable, *data.preparation])
    assert describe_tokens(data.flags).endswith("0 of them unknown; vocabulary of 280")


def test_a_corpus_that_changed_gets_a_tokenizer_of_its_own(text: Path) -> None:
    flags = tokenizer_flags("gpt", "train:257", text)
    os.utime(text, (1, 1))
    assert tokenizer_flags("gpt", "train:257", text) != flags
    assert tokenizer_flags("gpt", "train:258", text) != flags


def test_gpt2_is_the_pair_with_all_its_tokens(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (text.parent / "merges.txt").touch()
    for count in (50256, 50257):
        (text.parent / "vocab.json").write_text(json.dumps({str(n): n for n in range(count)}))
        if count == 50257:
            assert tokenizer_flags("gpt", "gpt2", text)["--vocab-file"].endswith("vocab.json")
            continue
        with pytest.raises(DataError, match=r"\(50,257 tokens\) are in none of"):
            tokenizer_flags("gpt", "gpt2", text)


def test_numbers_of_a_vocabulary_are_those_of_a_command_line(tmp_path: Path) -> None:
    numpy.arange(4, dtype="u2").tofile(tmp_path / "mine.bin")
    data = {"--data-path": str(tmp_path / "mine")}
    null = {"--tokenizer-type": "NullTokenizer", "--vocab-size": "20"}
    assert describe_tokens({**data, **null}).endswith("vocabulary of 21")
    plain = describe_tokens({**data, **sample_vocabulary("bert")})
    more = describe_tokens({**data, **sample_vocabulary("bert"), "--vocab-extra-ids": "5"})
    assert int(more.split()[-1]) == int(plain.split()[-1]) + 5


def test_a_tokenizer_that_cannot_be_written_is_refused(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Exception("No space left on device")  # plain, as the package raises it

    monkeypatch.setattr("tokenizers.ByteLevelBPETokenizer.save_model", fail)
    with pytest.raises(DataError, match=r"train:280: .*cannot be written: No space left"):
        tokenizer_flags("gpt", "train:280", text)


def test_files_of_ones_own_are_taken(text: Path, tmp_path: Path) -> None:
    """A directory with ``tokenizer.json`` and a pair means the former: Qwen's pair lacks tokens."""
    from tokenizers import ByteLevelBPETokenizer

    pair = tokenizer_flags("gpt", "train:280", text)
    folder = Path(pair["--vocab-file"]).parent
    for choice in (folder, folder / "vocab.json"):
        assert tokenizer_flags("gpt", str(choice), text) == pair
    whole = ByteLevelBPETokenizer(*pair.values())
    whole.add_special_tokens(["<|endoftext|>"])
    whole.save(str(folder / "tokenizer.json"))
    named = {"--tokenizer-type": "HuggingFaceTokenizer"}
    named["--tokenizer-model"] = str(folder / "tokenizer.json")
    for choice in (folder, folder / "tokenizer.json"):
        assert tokenizer_flags("gpt", str(choice), text) == named
    assert tokenizer_flags("gpt", str(folder / "vocab.json"), text) == pair
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=named["--tokenizer-model"])
    older = build_tokenizer("GPT2BPETokenizer", *pair.values())
    said = "the quick brown fox, number 12345"
    assert ours.tokenize(said) == older.tokenize(said) and ours.eod == older.eod


def test_choices_that_cannot_work_are_refused(text: Path, tmp_path: Path) -> None:
    for choice, error in (("train:7", "at least 257"), ("train:x", "expected train:N")):
        with pytest.raises(ConfigError, match=error):
            tokenizer_flags("gpt", choice, text)
    with pytest.raises(ConfigError, match="BERT needs"):
        tokenizer_flags("bert", "train:280", text)
    with pytest.raises(DataError, match="no such file or directory"):
        tokenizer_flags("gpt", str(tmp_path / "none"), text)


def test_of_a_large_corpus_a_tokenizer_sees_a_part_of_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten gigabytes took hours. The drawn lines are the same ones each time."""
    text = tmp_path / "large.jsonl"
    words = [f"{number:03d}" * 3 for number in range(400)]
    text.write_text("".join(json.dumps({"text": f" {word}" * 3}) + "\n" for word in words))
    monkeypatch.setattr(vocabulary, "_MOST_TEXT", text.stat().st_size // 4)
    files = []
    for folder in ("one", "two"):
        copy = tmp_path / folder / text.name
        copy.parent.mkdir()
        copy.write_bytes(text.read_bytes())
        files.append(tokenizer_flags("gpt", "train:2000", copy)["--vocab-file"])
    assert "25.0% of the lines of " in capsys.readouterr().out
    one, two = (json.loads(Path(file).read_text()) for file in files)
    assert one == two
    whole = sum(f"\u0120{word}" in one for word in words)
    assert 60 < whole < 140
