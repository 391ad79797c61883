"""``--load-hf`` and ``--save-hf`` are compared with the folder's files before the start."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import saved_args as checkpoint_args
from megatron.dpp_train.checkpoint.files import Found
from megatron.dpp_train.checkpoint.saved_args import STRUCTURE
from megatron.dpp_train.hf import files as hf_files
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.hf.fields import ORIGIN
from megatron.dpp_train.hf.model import args_of_model
from megatron.dpp_train.hf.weights import INDEX, WEIGHTS, WeightFile, find_weights
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.preflight.check import build_vocabulary
from tests.hf.tiny import SIZES

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    **SIZES,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
}
_SPARSE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 64}
_GPT2 |= {"n_embd": 32, "n_layer": 4, "n_head": 4}
_FOLDERS = {
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16},
    "mixtral": {**_LLAMA, **_SPARSE},
    "gpt2": _GPT2,
}
EMPTY = (8).to_bytes(8, "little") + b"{}      "
"""A file of safetensors without tensors."""
_RUN = (
    "--seq-length 16 --lr 1 --micro-batch-size 1 --train-iters 1 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 9 --transformer-impl local --save-interval 1"
)


def make(folder: Path, family: str) -> tuple[Path, list[str]]:
    """A folder with a ``config.json`` and a file without tensors, and the flags of its model."""
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(EMPTY)
    (folder / "config.json").write_text(json.dumps(_FOLDERS[family]))
    return folder, read_config(folder).words()


def check(words: list[str], *more: str | Path) -> None:
    args = parse_args([*words, *_RUN.split(), *map(str, more)])
    hf_files.check_hf(validate(args, 1, "gpt"))


@pytest.mark.parametrize("family", _FOLDERS)
def test_the_flags_of_a_folder_fit_it(family: str, tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", family)
    check(words, "--load-hf", folder, "--padded-vocab-size", "128")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", "--num-layers 2", "--num-layers is 2, there 4"),
        ("llama", "--rotary-base 10000", "--rotary-base is 10000, there 500000"),
        ("llama", "--norm-epsilon 1e-5", "--norm-epsilon is 1e-05, there 1e-06"),
        ("llama", "--use-rope-scaling", "--use-rope-scaling is on, there off"),
        ("llama", "--rotary-percent 0.5", "--rotary-percent is 0.5, there 1.0"),
        ("llama", "--padded-vocab-size 64", "--padded-vocab-size is 64, there 96"),
        ("llama", "--num-query-groups 4", "--num-query-groups is 4, there 2"),
        ("qwen2", "-add-qkv-bias", "--add-qkv-bias is off, there on"),
        ("qwen2", "-disable-bias-linear", "--disable-bias-linear is off, there on"),
        ("qwen3", "-qk-layernorm", "--qk-layernorm is off, there on"),
        ("mixtral", "--moe-router-topk 3", "--moe-router-topk is 3, there 2"),
        ("gpt2", "--max-position-embeddings 32", "--max-position-embeddings is 32, there 64"),
    ],
)
def test_flags_of_another_model_are_refused(
    family: str, changes: str, said: str, tmp_path: Path
) -> None:
    folder, words = make(tmp_path / "there", family)
    if changes.startswith("--"):
        words += changes.split()
    else:
        words.remove("-" + changes)
    with pytest.raises(DataError) as error:
        check(words, "--load-hf", folder)
    assert said in str(error.value)
    assert str(error.value).count(", there") == 1


def test_all_differing_flags_are_named_at_once(tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    with pytest.raises(DataError, match=r"--rotary-base is 7, .*; --norm-epsilon is 0\.1, "):
        check(words, "--load-hf", folder, "--rotary-base", "7", "--norm-epsilon", "0.1")


def test_lengths_and_what_training_alone_needs_may_differ(tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    more = "--max-position-embeddings 32 --init-method-std 0.5 --attention-dropout 0.3"
    check(words, "--load-hf", folder, *more.split())


def test_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    for content in (EMPTY[:-1], EMPTY + b"x", b"", b"{" * 9):
        (folder / WEIGHTS).write_bytes(content)
        with pytest.raises(
            DataError, match=rf"model\.safetensors: damaged or not whole .*\b{len(content)} bytes"
        ):
            check(words, "--load-hf", folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "second.safetensors"}}))
    with pytest.raises(DataError, match=r"second\.safetensors: missing"):
        check(words, "--load-hf", folder)


@pytest.mark.parametrize("change", ["cut", "longer", "other", "gone"])
def test_weights_that_change_while_they_are_read_are_one_line(change: str, tmp_path: Path) -> None:
    """A file that was cut short ended its reader by SIGBUS."""
    path = tmp_path / WEIGHTS
    save_file({"a": torch.ones(5000), "b": torch.arange(5000.0)}, path)
    whole = path.stat().st_size
    file, content = WeightFile(path), bytearray(20000)
    file.read_into("b", memoryview(content))
    assert torch.frombuffer(content, dtype=torch.float32).tolist() == list(range(5000))
    if change == "gone":
        path.unlink()
        said = "b: No such file or directory"
    else:
        size = {"cut": whole // 2, "longer": whole + 1, "other": whole}[change]
        if change == "other":
            path.rename(tmp_path / "before")
            path.touch()
        os.truncate(path, size)
        said = rf"changed while it was read \({whole} bytes at first, then {size}\)"
    with pytest.raises(DataError, match=rf"model\.safetensors: {said}"):
        file.read_into("b", memoryview(content))


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_another_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    vocab = {"a": 0, "b": 1}
    whole = {"model": {"vocab": vocab}, "added_tokens": [{"content": "<end>", "id": 2}]}
    (folder / name).write_text(json.dumps(whole if name == "tokenizer.json" else vocab))
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(json.dumps(vocab))
    other.write_text(json.dumps({"b": 0}))
    for right in (folder / name, same, tmp_path / "not there yet"):
        check(words, "--load-hf", folder, "--vocab-file", right)
    with pytest.raises(DataError) as error:
        check(words, "--load-hf", folder, "--vocab-file", other)
    assert f"its tokenizer is not {other}: 'b' is 0 there, 1 in {name}" in str(error.value)


def test_tokens_that_were_added_count_too(tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    content = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<end>", "id": 2}]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    mine = tmp_path / "mine.json"
    for end, right in ((2, True), (1, False)):
        mine.write_text(json.dumps({"a": 0, "<end>": end}))
        if right:
            check(words, "--load-hf", folder, "--vocab-file", mine)
            continue
        with pytest.raises(DataError, match=r"'<end>' is 1 there, 2 in tokenizer\.json"):
            check(words, "--load-hf", folder, "--vocab-file", mine)


def test_a_vocabulary_beside_sentence_pieces_is_refused(tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    (folder / "tokenizer.model").touch()
    check(words, "--load-hf", folder)
    with pytest.raises(DataError, match=r"its tokenizer is tokenizer\.model, --vocab-file mine"):
        check(words, "--load-hf", folder, "--vocab-file", "mine")


def test_sentence_pieces_of_other_bytes_are_refused(tmp_path: Path) -> None:
    folder, words = make(tmp_path / "there", "llama")
    mine = tmp_path / "mine"
    mine.mkdir()
    for place in (folder, mine):
        (place / "tokenizer.model").write_bytes(b"pieces")
    words += ["--load-hf", str(folder), "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model"]
    for given in (mine, mine / "tokenizer.model"):
        check_pieces(words, given)
    (mine / "tokenizer.model").write_bytes(b"piecez")
    for given in (mine, mine / "tokenizer.model"):
        with pytest.raises(DataError, match=r"its tokenizer\.model is another than .*mine"):
            check_pieces(words, given)


def check_pieces(words: list[str], given: Path) -> None:
    """Of a run whose tokenizer is that of ``words``."""
    usual = [*_RUN.replace("--tokenizer-type NullTokenizer", "").split(), *words, str(given)]
    args = validate(parse_args(usual), 1, "gpt")
    hf_files.check_hf(args)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--pretrained-checkpoint x --load-hf", "--pretrained-checkpoint x exclude each other"),
        ("--save s --ckpt-format torch --save-hf new --load-hf", "needs --ckpt-format torch_dist"),
        ("--save s --use-torch-fsdp2 --no-gradient-accumulation-fusion --save-hf", "--use-torch-f"),
    ],
)
def test_what_would_fail_or_be_ignored_later_is_refused(
    more: str, said: str, tmp_path: Path
) -> None:
    folder, words = make(tmp_path / "there", "llama")
    words += _RUN.split()
    given = f"{more} {folder if more.endswith('--load-hf') else 'new'}"
    with pytest.raises(DataError) as error:
        hf_files.check_hf(parse_args([*words, *given.split()]))
    assert said in str(error.value)


def test_an_export_needs_the_folder_that_training_started_from(tmp_path: Path) -> None:
    save = tmp_path / "run" / "save"
    folder, words = make(tmp_path / "there", "llama")
    target = ("--save", save, "--save-hf", tmp_path / "new")
    with pytest.raises(DataError, match=r"the config\.json of the model is not known"):
        check(words, *target)
    check(words, *target, "--load-hf", folder)
    with pytest.raises(DataError, match=r"--mtp-num-layers is 1, there not given"):
        check([*words, "--mtp-num-layers", "1"], *target, "--load-hf", folder)
    converted = tmp_path / "converted"
    converted.mkdir()
    folder.rename(converted / ORIGIN)
    check(words, *target, "--pretrained-checkpoint", converted)
    with pytest.raises(DataError, match=r"--save-hf .*--rotary-base is 7, there 500000"):
        check([*words, "--rotary-base", "7"], *target, "--pretrained-checkpoint", converted)


def test_a_run_that_goes_on_knows_where_its_model_comes_from(tmp_path: Path) -> None:
    """Its own checkpoints name the folder, too, which no flag of it does."""
    folder, words = make(tmp_path / "there", "llama")
    save = tmp_path / "save"
    (save / "iter_0000003").mkdir(parents=True)
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    (save / "iter_0000003" / "metadata.json").write_text("{}")
    origins = []
    for name in ("load_hf", "model_origin"):  # the first run's arguments, then those of the second
        state = {"args": Namespace(**{name: str(folder)})}
        torch.save(state, save / "iter_0000003" / "common.pt")
        given = ("--load", save, "--save", save, "--save-hf", tmp_path / "new")
        check(words, *given)
        args = validate(parse_args([*words, *_RUN.split(), *map(str, given)]), 1, "gpt")
        origins.append(build_vocabulary(args)[0].model_origin)
    assert origins == [str(folder)] * 2


@pytest.mark.parametrize("family", _FOLDERS)
def test_a_converted_checkpoint_brings_its_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--use-checkpoint-args`` gives what the folder's flags would have given."""
    folder, _ = make(tmp_path / "there", family)
    saved = args_of_model(read_config(folder))
    torch.save({"args": saved}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").touch()
    monkeypatch.setattr(checkpoint_args, "find_start", lambda _: Found(tmp_path, 1))
    args = parse_args([*_RUN.split(), "--use-checkpoint-args", "--load", str(folder)])
    checkpoint_args.take_checkpoint_args(args)
    args.load_hf = str(folder)
    hf_files.check_hf(validate(args, 1, "gpt"))


def test_every_attribute_of_the_structure_is_one_of_a_flag() -> None:
    args = parse_args([])
    assert [name for name in STRUCTURE if not hasattr(args, name)] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 10**400) for key in ("rope_theta", "hidden_size", "rms_norm_eps")),
        *((key, "deep") for key in ("rope_parameters", "model_type", "unknown")),
        ("num_hidden_layers", 10**6),
        ("vocab_size", 2**40),
        ("rope_theta", 1e308),
        ("rope_theta", float("inf")),
        ("rope_parameters", {"rope_type": "yarn", "factor": float("nan")}),
        ("model_type", ["llama"]),
        ("intermediate_size", "x" * 100_000),
    ],
)
def test_a_config_of_any_content_is_one_short_error(key: str, value: Any, tmp_path: Path) -> None:
    text = json.dumps(_LLAMA | {key: value})
    if value == "deep":
        text = text.replace('"deep"', "[" * 5000 + "]" * 5000)
    (tmp_path / "config.json").write_text(text)
    if value == 1e308:  # a whole number all the same
        assert read_config(tmp_path).flags["rotary-base"] == int(value)
        return
    with pytest.raises(DataError, match=r"config\.json: ") as refused:
        read_config(tmp_path)
    assert len(str(refused.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        [],
        "x",
        {"dtype": "F32", "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 8]},
    ],
)
def test_a_header_of_tensors_that_says_nonsense_is_refused(entry: Any, tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(DataError, match=r"model\.safetensors: "):
        find_weights(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "../x", "/etc/passwd", "", 1, None, "a\0b"])
def test_a_file_name_of_an_index_is_that_of_a_file(name: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DataError):
        find_weights(tmp_path)
