"""The checkpoint and the folder that a path names, and the memory of an engine."""

from __future__ import annotations

import json
import shutil
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.generate import by_megatron, engine
from megatron.dpp_train.generate import evaluate_command as evaluate
from megatron.dpp_train.generate import generate_command as generate
from megatron.dpp_train.generate.by_megatron import megatron_engine
from megatron.dpp_train.generate.by_transformers import TransformersEngine
from megatron.dpp_train.generate.losses import Document, total_loss
from megatron.dpp_train.generate.model_source import chat_encoder, exported, find_source
from megatron.dpp_train.hf import convert_command as convert
from megatron.dpp_train.hf.to_hf import to_hf
from megatron.dpp_train.hf.weights import loaded_bytes
from megatron.dpp_train.tokenizers import NullTokenizer
from tests.generate.test_against_transformers import opened
from tests.hf import tiny

WORDS = ("--prompt", "to", "--max-new-tokens", "6", "--device", "cpu")


def scaled(folder: Path, target: Path, factor: float) -> None:
    """A copy of a Hugging Face folder whose embedding is another."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= factor
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a release and the checkpoint of another model, which the tracker names."""
    root = tmp_path_factory.mktemp("two")
    tiny.add_tokenizer(root / "first", ["to be"], 290)
    tiny.make("llama", root / "first", vocab_size=290, bos_token_id=0, eos_token_id=1)
    scaled(root / "first", root / "second", 3.0)
    for name in ("first", "second"):
        assert convert.main([str(root / name), str(root / f"ck-{name}")]) == 0
    shutil.move(root / "ck-second" / "release", root / "ck-first" / "iter_0000005")
    (root / "ck-first" / "latest_checkpointed_iteration.txt").write_text("5")
    return root


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    capsys.readouterr()
    assert generate.main([str(word) for word in (*words, *WORDS)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_checkpoint_answers_by_any_path(
    two: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = said(capsys, two / "first"), said(capsys, two / "second")
    assert first != second
    root = two / "ck-first"
    assert said(capsys, root) == second
    assert said(capsys, root / "release") == first
    assert said(capsys, root / "release", "--engine", "transformers") == first
    (tmp_path / "link").symlink_to(root / "release")
    assert said(capsys, tmp_path / "link") == first
    shutil.copytree(root / "release", tmp_path / "renamed")
    assert said(capsys, tmp_path / "renamed", "--tokenizer", two / "first") == first
    monkeypatch.chdir(root / "iter_0000005")
    assert said(capsys, ".") == second
    to_hf(Path(), tmp_path / "export", progress=lambda _: None)
    assert said(capsys, tmp_path / "export") == second


def test_a_neighbour_is_not_the_origin(two: Path, tmp_path: Path) -> None:
    root = tmp_path / "ck"
    shutil.copytree(two / "ck-first", root)
    shutil.move(root / "hf", tmp_path / "kept")
    tiny.make("qwen2", tmp_path / "hf")  # another model's
    assert find_source(root, None, "auto").folder != tmp_path / "hf"
    shutil.copytree(tmp_path / "hf", root / "hf")
    assert find_source(root, None, "auto").config is None  # not the checkpoint's
    (root / "hf" / "config.json").write_text("{")
    assert find_source(root, None, "auto").folder is None


def test_a_router_of_sinkhorn_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.make("mixtral", tmp_path / "source")
    assert convert.main([str(source), str(tmp_path / "ours")]) == 0
    found = find_source(tmp_path / "ours", None, "auto").found
    assert found is not None
    saved = by_megatron.saved_args(found)
    values = {**vars(saved), "moe_router_load_balancing_type": "sinkhorn"}
    assert by_megatron.settings(found, "cpu", "float32").moe_router_load_balancing_type != (
        "sinkhorn"
    )
    monkeypatch.setattr(by_megatron, "saved_args", lambda found: Namespace(**values))
    args = by_megatron.settings(found, "cpu", "float32")
    assert args.moe_router_load_balancing_type == "sinkhorn"


def test_memory_of_the_last_batch_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.make("llama", tmp_path / "model")
    with opened(folder) as model:
        alive, kept = weakref.WeakSet[Any](), by_megatron.Cache

        def cache(room: int) -> Any:
            made = kept(room)
            if room:
                alive.add(made)
            return made

        monkeypatch.setattr(by_megatron, "Cache", cache)
        rooms: list[int] = []
        monkeypatch.setattr(by_megatron, "check_room", lambda *args: rooms.append(len(alive)))
        model.begin([[5, 7]], 9)
        model.begin([[5, 7]], 9)
        assert rooms == [0, 0]
        pieces = [list(range(2, 40)), [3, 4, 5]]
        whole = model.losses(pieces)
        rows: list[int] = []
        plain = by_megatron.token_losses
        monkeypatch.setattr(
            by_megatron, "token_losses",
            lambda logits, wanted: rows.append(len(wanted)) or plain(logits, wanted),
        )  # fmt: skip
        monkeypatch.setattr(by_megatron, "LOSS_ROWS", 16)
        cut = model.losses(pieces)
    assert rows == [16, 16, 8]
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("family", "groups"), [("llama", 2), ("gpt2", 4)])
def test_keys_and_values_of_all_layers_are_counted_and_padding_has_no_logits(
    family: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.make(family, tmp_path / "model")
    with megatron_engine(folder, vocabulary=50, device="cpu") as model:
        asked: list[int] = []
        monkeypatch.setattr(by_megatron, "check_room", lambda needed, *_: asked.append(needed))
        assert model.begin([[5, 7], [6]], 9).shape == (2, 50)
        assert asked == [2 * 9 * (2 * groups * 8 * 4) * 4]  # heads of 8, 4 layers, fp32


def test_a_device_that_is_there_decides_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert (engine.default_dtype("auto"), engine.default_dtype("cpu")) == (dtype, "float32")
    with pytest.raises(ConfigError, match="--device cuda: PyTorch sees no GPU here"):
        engine.default_dtype("cuda")


def test_memory_that_pytorch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    engine.check_room(150, torch.device("cuda"), "x", "y")
    with pytest.raises(ConfigError, match="has 150 free"):
        engine.check_room(151, torch.device("cuda"), "x", "y")


def test_code_of_a_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = tmp_path / "own", tmp_path / "ran"
    folder.mkdir()
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    with pytest.raises(DataError, match="transformers cannot load it"):
        TransformersEngine(folder, "cpu", None)
    assert (asked, marker.exists()) == ([], False)


def test_an_error_leaves_the_name_of_the_output_free(
    two: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out.jsonl"
    words = [str(word) for word in (two / "first", *WORDS, "--output", output)]
    with monkeypatch.context() as broken:
        broken.setattr("megatron.dpp_train.generate.answers.Chooser", _no_memory)
        assert generate.main(words) == 2
    assert list(tmp_path.iterdir()) == []
    assert generate.main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert len(output.read_text().splitlines()) == 1


def _no_memory(*args: object) -> None:
    raise ConfigError("no memory")


def test_numbers_are_no_text(two: Path) -> None:
    tokenizer = NullTokenizer(10)
    assert evaluate.text_bytes(Document([1, 2, 3]), tokenizer) == 0
    with pytest.raises(DataError, match="reads numbers, not chats"):
        chat_encoder(find_source(two / "first", None, "auto"), tokenizer, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused(value: float) -> None:
    class Broken:
        name, positions = "broken", 8

        def losses(self, pieces: list[list[int]]) -> list[torch.Tensor]:
            return [torch.tensor([1.0, value]) for _ in pieces]

    documents = [Document([1, 2, 3])]
    with pytest.raises(DataError, match=f"window of 3 tokens is {value}"):
        total_loss(Broken(), documents, window=8, stride=4, batch_size=1)  # type: ignore[arg-type]


def test_a_template_and_a_tokenizer_are_named(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("to{{ messages[0].content }}")
    few = (str(two / "first"), "--device", "cpu", "--max-new-tokens", "3")
    for words, status, error in (
        (["--chat", " be", "--chat-template", str(template)], 0, ""),
        (["--chat", "to", "--chat-template", "none"], 1, "--chat-template none: expected auto"),
        (
            ["--prompt", "to", "--tokenizer", "train:300"],
            2,
            "would train a new one; name the model's",
        ),
    ):
        capsys.readouterr()
        assert generate.main([*few, *words]) == status
        assert error in capsys.readouterr().err


def test_an_export_without_an_origin_is_refused_at_once(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "ck-first", tmp_path / "ck")
    shutil.rmtree(tmp_path / "ck" / "hf")
    source = find_source(tmp_path / "ck" / "release", None, "auto")
    with (
        pytest.raises(DataError, match="of its model is known, which an export needs"),
        exported(source),
    ):
        pass


def test_bytes_of_a_model_are_those_that_are_loaded(two: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shutil.copytree(two / "first", tmp_path / "model")
    shutil.copy(
        tmp_path / "model" / "model.safetensors", tmp_path / "model/consolidated.safetensors"
    )
    count = sum(each.numel() for each in load_file(two / "first" / "model.safetensors").values())
    assert loaded_bytes(tmp_path / "model", 4) == 4 * count
    assert loaded_bytes(tmp_path / "model", 2) == 2 * count
