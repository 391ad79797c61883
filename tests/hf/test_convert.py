"""Conversions give back what they got, and say in one line what they cannot take."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.dpp.errors import DataError
from megatron.dpp_train import hf
from megatron.dpp_train.hf.convert import write_shards
from megatron.dpp_train.hf.convert_command import main
from megatron.dpp_train.hf.families import find_families
from megatron.dpp_train.hf.fields import read_config
from tests.hf import tiny
from tests.small_disk import small_disk

Made = Callable[[str], Path]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Made:
    """Gives a copy of a family's folder that a test may change."""

    def copy(family: str) -> Path:
        return shutil.copytree(made(family), tmp_path / "copy" / family)

    return copy


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Write tensors of a folder anew; None takes one out. Names have ``__`` for dots."""
    found = load_file(folder / WEIGHTS) | {k.replace("__", "."): v for k, v in tensors.items()}
    save_file({k: v for k, v in found.items() if v is not None}, folder / WEIGHTS)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("family", tiny.MODELS)
def test_each_family_comes_back_bit_by_bit(family: str, made: Made, tmp_path: Path) -> None:
    """Tensors, fields and tokenizer; without the folder, what the arguments say is the same."""
    source, ours = made(family), tmp_path / "ours"
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert main([str(source), str(ours)]) == 0
    assert main([str(ours), str(tmp_path / "back")]) == 0
    assert same(tensors_of(source), tensors_of(tmp_path / "back"))
    written = find_families()[family].written
    assert config_of(tmp_path / "back") == config_of(source) | written
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ messages }}"
    shutil.rmtree(ours / "hf")
    hf.to_hf(ours, tmp_path / "named", family=family)
    hf.to_hf(ours, tmp_path / "found")
    assert same(tensors_of(source), tensors_of(tmp_path / "named"))
    assert read_config(tmp_path / "named").flags == read_config(source).flags
    assert read_config(tmp_path / "found").words() == read_config(source).words()


def test_shards_and_types(tmp_path: Path) -> None:
    """Several files in, several out; bf16 on request, with a ``config.json`` that says so."""
    source = tiny.make("glm4_moe", tmp_path / "sharded", shard="60KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    hf.to_megatron(source, tmp_path / "ours", dtype="bfloat16")
    written: list[int] = []
    hf.to_hf(tmp_path / "ours", tmp_path / "back", shard_bytes=30_000, progress=written.append)
    files = list((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 40_000
    found, full = tensors_of(tmp_path / "back"), "e_score_correction_bias"
    assert sum(written) == sum(tensor.nbytes for tensor in found.values())
    for name, tensor in tensors_of(source).items():
        wanted = tensor if name.endswith(full) else tensor.bfloat16()
        assert torch.equal(found[name], wanted) and found[name].dtype == wanted.dtype, name
    assert tiny.load(tmp_path / "back").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shard_bytes", "groups"), [(12, [["a", "b"], ["c"]]), (11, [["a"], ["b"], ["c"]]),
                                (1, [["a"], ["b"], ["c"]]), (20, [["a", "b", "c"]])],
)  # fmt: skip
def test_a_file_may_be_as_large_as_asked(
    shard_bytes: int, groups: list[list[str]], tmp_path: Path
) -> None:
    tensors = {name: torch.full((size,), 1.0) for name, size in zip("abc", (1, 2, 2), strict=True)}
    write_shards(tmp_path, tensors.items(), {k: t.nbytes for k, t in tensors.items()}, shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [list(load_file(file)) for file in files] == groups
    assert (tmp_path / INDEX).exists() == (len(groups) > 1)
    if len(groups) > 1:
        content = json.loads((tmp_path / INDEX).read_text())
        pairs = zip(files, groups, strict=True)
        assert content["metadata"]["total_size"] == 20
        assert content["weight_map"] == {n: file.name for file, names in pairs for n in names}


def test_numbers_beyond_a_type_and_several_types_are_refused(
    copied: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, name = copied("llama"), "model.layers.0.mlp.down_proj.weight"
    change(source, **{name.replace(".", "__"): torch.full((32, 48), -1e5)})
    hf.to_megatron(source, tmp_path / "ours")
    for which in (source, tmp_path / "ours"):
        error = refused(capsys, which, tmp_path / "half", "--dtype", "float16")
        assert "linear_fc2.weight holds " in error and "float16 ends at 65504" in error
    change(source, model__norm__weight=torch.ones(32, dtype=torch.bfloat16))
    assert "is bfloat16; say which type" in refused(capsys, source, tmp_path / "x")
    assert main([str(source), str(tmp_path / "x"), "--dtype", "float32"]) == 0


NORM = "model__norm__weight"
GATE = "model__layers__0__mlp__up_proj__weight"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "family": (lambda f: edit(f, model_type="mamba"), "model_type 'mamba' is not supported"),
    "activation": (lambda f: edit(f, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "no heads": (lambda f: edit(f, num_attention_heads=0), "num_attention_heads is 0"),
    "too large": (lambda f: edit(f, num_hidden_layers=10**6), "num_hidden_layers is 1000000"),
    "a text": (lambda f: edit(f, rms_norm_eps="x"), "rms_norm_eps is 'x', expected a number"),
    "quantized": (lambda f: edit(f, quantization_config={"bits": 4}), "a quantized model"),
    "no json": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "vocabulary": (lambda f: edit(f, vocab_size=95), "has shape [96, 32], config.json says [95"),
    "shape": (lambda f: change(f, **{GATE: torch.ones(32, 48)}), "up_proj.weight has shape [32"),
    "missing": (lambda f: change(f, **{NORM: None}), "lacks model.norm.weight"),
    "extra": (lambda f: edit(f, num_hidden_layers=3), "which llama does not have"),
    "a name that clears the terminal": (
        lambda f: change(f, **{"\x1b[2J": torch.ones(1)}),
        "holds \\x1b[2J, which",
    ),
    "experts": (
        lambda f: edit(f, model_type="mixtral", num_local_experts=2**30, num_experts_per_tok=2),
        "4 layers of 1073741824 experts are too many",
    ),
    "type": (
        lambda f: change(f, **{NORM: torch.ones(32, dtype=torch.int8)}),
        "model.norm.weight is I8",
    ),
    "cut": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-100]),
        "damaged or not whole",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"neither {WEIGHTS} nor"),
    "no shard": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "b.safetensors"}})),
        "b.safetensors: missing",
    ),
    "another shard": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS}})),
        f"{INDEX}: says that {WEIGHTS} holds a",
    ),
    "another's": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../x"}})),
        "expected the name of a file",
    ),
    "pointer": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, copied: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copied("llama")
    spoil, said = BAD[name]
    spoil(source)
    assert said in refused(capsys, source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_bad_checkpoints_and_targets_are_one_line(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ours, x = made("llama"), tmp_path / "ours", tmp_path / "x"
    hf.to_megatron(source, ours)
    for said, *words in (
        ("exists; name another target", source, ours),
        ("no such directory", tmp_path / "nowhere", x),
        ("no checkpoint of Megatron is there", tmp_path, x),
        ("kv_channels is 8, there 16", ours, x, "--like", made("qwen3")),
        ("must be above 0", ours, x, "--shard-size", "nan"),
        ("no checkpoint of Megatron is there", ours, x, "--step", "7"),
        ("config.json is of ", ours, x, "--family", "mixtral"),
        ("--family nothing: expected one of", ours, x, "--family", "nothing"),
        ("--step: ", source, x, "--step", "0"),
    ):
        assert said in refused(capsys, *words), said
    shutil.rmtree(ours / "hf")
    for said, *words in (
        ("add_qkv_bias is False, there True", ours, x, "--family", "qwen2"),
        ("the model has no experts", ours, x, "--family", "mixtral"),
    ):
        assert said in refused(capsys, *words), said
    (shard,) = (ours / "release").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-2000])
    assert "unreadable" in refused(capsys, ours, x)
    shard.unlink()
    assert "the checkpoint is not whole" in refused(capsys, ours, x)
    assert not x.exists()


def test_links_out_of_a_folder_are_refused(
    copied: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside the folder and the hub's cache they are followed; weights' may lead elsewhere."""
    cache = tmp_path / "models--a"
    source, blob = cache / "snapshots" / "1", cache / "blobs" / "w"
    source.parent.mkdir(parents=True), blob.parent.mkdir()
    shutil.move(copied("llama"), source)
    (source / WEIGHTS).rename(blob)
    (source / WEIGHTS).symlink_to("../../blobs/w")
    (source / "tokenizer.json").write_text("{}")
    (source / "vocab.json").symlink_to("tokenizer.json")
    hf.to_megatron(source, tmp_path / "ours")
    assert (tmp_path / "ours" / "hf" / "vocab.json").read_text() == "{}"
    assert not (tmp_path / "ours" / "hf" / "vocab.json").is_symlink()
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for name in ("LICENSE", "config.json", "tokenizer.json"):
        kept = (source / name).read_bytes() if (source / name).exists() else None
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(secret)
        error = refused(capsys, source, tmp_path / "x")
        assert f"{source / name}: a link to {secret}, outside of the model's folder" in error
        (source / name).unlink()
        if kept is not None:
            (source / name).write_bytes(kept)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_an_output_layer_of_its_own_is_kept_and_an_equal_one_is_not(
    family: str, copied: Made, tmp_path: Path
) -> None:
    """transformers computes with the one in the file, whatever ``tie_word_embeddings`` says."""
    source = copied(family)
    tensors = load_file(source / WEIGHTS)
    embedding = next(tensors[name] for name in tensors if "embed" in name or "wte" in name)
    change(source, lm_head__weight=embedding.clone())
    config = hf.to_megatron(source, tmp_path / "ours")
    assert not config.sizes.untied
    assert "left out lm_head.weight: equal to the embedding" in config.notes[-1]
    change(source, lm_head__weight=embedding + 0.5)
    config = hf.to_megatron(source, tmp_path / "untied")
    assert "taken as untied" in config.notes[-1]
    assert "--untie-embeddings-and-output-weights" in hf.flags_of(source)
    hf.to_hf(tmp_path / "untied", tmp_path / "back")
    assert config_of(tmp_path / "back")["tie_word_embeddings"] is False
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        one, other = (tiny.load(each)(tokens).logits for each in (source, tmp_path / "back"))
    assert torch.equal(one, other)


def test_tensors_without_a_place_are_named(copied: Made, tmp_path: Path) -> None:
    source = copied("glm4_moe")
    change(source, model__layers__4__mlp__x=torch.ones(1), a__rotary_emb__inv_freq=torch.ones(1))
    notes = hf.to_megatron(source, tmp_path / "ours").notes[-2:]
    assert sorted(note.split("left out ")[1] for note in notes) == [
        "a.rotary_emb.inv_freq: a buffer that is computed",
        "model.layers.4.mlp.x: it predicts further tokens",
    ]
    hf.to_hf(tmp_path / "ours", tmp_path / "back")
    assert config_of(tmp_path / "back")["num_nextn_predict_layers"] == 0


def test_names_without_prefix_are_read(copied: Made, tmp_path: Path) -> None:
    """Files of GPT-2 as they are published."""
    source = copied("gpt2")
    tensors = load_file(source / WEIGHTS)
    bare = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1)}, source / WEIGHTS)
    hf.to_megatron(source, tmp_path / "ours")
    hf.to_hf(tmp_path / "ours", tmp_path / "back")
    assert same(tensors_of(tmp_path / "back"), tensors)


def test_a_killed_conversion_leaves_nothing_that_loads(made: Made, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    for convert, source, target in ((hf.to_megatron, made("llama"), ours), (hf.to_hf, ours, back)):
        child = os.fork()
        if not child:
            convert(source, target, progress=lambda _: os._exit(9))
        os.waitpid(child, 0)
        assert not target.exists()
        with pytest.raises(DataError):
            hf.to_hf(tmp_path / f".{target.name}.unfinished" / "new", tmp_path / "x")
        convert(source, target)
    assert sorted(tmp_path.iterdir()) == [back, ours]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_full_disk_is_one_line(
    made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hf.to_megatron(made("llama"), tmp_path / "whole")
    with small_disk(tmp_path, 64 << 10) as disk:
        for given in (made("llama"), tmp_path / "whole"):
            error = refused(capfd, given, disk / "target")  # type: ignore[arg-type]
            assert error.startswith(f"megatron-dpp convert: error: {disk / 'target'}: ")
            assert "bytes are free there" in error
            assert os.listdir(disk) == []


def test_the_flags_of_a_folder_pad_its_vocabulary(made: Made) -> None:
    words = hf.flags_of(made("granite"), tensor_parallel=5)
    assert words[words.index("--padded-vocab-size") + 1] == "100"
    assert words[-1].startswith("tokens=96,embedding-scale=3.0,logit-scale=0.2,")
    assert "tokens" not in hf.flags_of(made("granite"), tensor_parallel=4)[-1]
    assert "--hf-forms" not in hf.flags_of(made("llama"))


def test_each_family_is_tested() -> None:
    assert set(tiny.MODELS) == set(find_families())
