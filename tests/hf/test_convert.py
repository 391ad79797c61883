"""Conversion of tiny random models: bit by bit back, and every bad input in one line."""

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
from megatron.dpp_train.checkpoint.files import find
from megatron.dpp_train.families import find_families
from megatron.dpp_train.hf import checkpoint, entries, read_config
from megatron.dpp_train.hf.convert_command import main
from megatron.dpp_train.hf.folder import Folder, Shards, one_dtype, some
from megatron.dpp_train.hf.to_hf import to_hf
from megatron.dpp_train.hf.to_megatron import to_megatron
from tests.hf import tiny

FAMILIES = tuple(tiny.MODELS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family's model, made once."""
    root = tmp_path_factory.mktemp("models")

    def find_or_make(family: str) -> Path:
        folder = root / family
        return folder if folder.is_dir() else tiny.make(family, folder)

    return find_or_make


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def converted(*words: str | Path) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_round_trip_is_bitwise(
    family: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = made(family)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    converted(source, tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "back" / "config.json").read_text()
    )
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ messages }}"
    config = read_config(source)
    model = tiny.load(tmp_path / "back")
    assert tiny.num_parameters(config.family, config.sizes) == model.num_parameters()


def test_shards_and_types(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Several files in, several out; bf16 on request, with a ``config.json`` that says so."""
    source = tiny.make("llama", tmp_path / "sharded", shard="60KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    converted(source, tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "back", "--shard-size", "3e-5", "--dtype", "bfloat16")
    files = list((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 40_000
    model = tiny.load(tmp_path / "back")
    assert model.dtype == torch.bfloat16
    for name, tensor in tensors_of(source).items():
        assert torch.equal(tensor.bfloat16(), model.state_dict()[name]), name


QUICK = ("llama", "mixtral", "gemma3_text")


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_a_config_is_written_for_a_model_that_had_none(
    family: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    source, ours = made(family), tmp_path / "ours"
    converted(source, ours)
    shutil.rmtree(ours / "hf")
    converted(ours, tmp_path / "back", "--family", family)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    (tmp_path / "back" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        same = [tiny.load(each)(tokens).logits for each in (source, tmp_path / "back")]
    assert torch.equal(*same)


def test_a_number_beyond_the_type_is_refused(
    made: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It became infinite without a word."""
    from safetensors.torch import load_file, save_file

    source = tmp_path / "large"
    shutil.copytree(made("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = -1e5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    converted(source, tmp_path / "ours", "--dtype", "bfloat16")
    for which in (source, tmp_path / "ours"):
        capsys.readouterr()
        assert main([str(which), str(tmp_path / "half"), "--dtype", "float16"]) == 1
        error = capsys.readouterr().err
        assert "linear_fc2.weight holds " in error and "float16 ends at 65504" in error
        assert error.count("\n") == 1 and not (tmp_path / "half").exists()


def test_a_killed_conversion_leaves_nothing_that_loads(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    target = tmp_path / "ours"
    child = os.fork()
    if not child:
        to_megatron(made("llama"), target, progress=lambda _: os._exit(9))
    os.waitpid(child, 0)
    assert not target.exists()
    (left,) = tmp_path.iterdir()
    assert find(str(left)) is None
    assert find(str(left / "new")) is None
    converted(made("llama"), target)
    assert list(tmp_path.iterdir()) == [target]

    back = tmp_path / "back"
    child = os.fork()
    if not child:
        to_hf(target, back, progress=lambda _: os._exit(9))
    os.waitpid(child, 0)
    assert not back.exists()
    with pytest.raises(DataError, match=r"config\.json"):
        Folder(tmp_path / ".back.unfinished" / "new")
    converted(target, back)
    assert sorted(tmp_path.iterdir()) == [back, target]


def test_files_that_are_written_piece_by_piece_are_read(tmp_path: Path) -> None:
    """The files are those that safetensors reads, several as one."""
    tensors = {
        name: torch.randn(size, 3, dtype=torch.float16)
        for name, size in zip("abc", (2, 5, 1), strict=True)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with Shards(tmp_path, shapes, torch.float16, 40) as shards:
        for name, tensor in tensors.items():
            shards.add(name, tensor.t().contiguous().t())
        shards.finish()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    found = tensors_of(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("shard_bytes", "groups"), [(12, [["a", "b"], ["c"]]), (11, [["a"], ["b"], ["c"]]),
                                (1, [["a"], ["b"], ["c"]]), (20, [["a", "b", "c"]])],
)  # fmt: skip
def test_a_file_may_be_as_large_as_asked_and_a_large_tensor_has_its_own(
    shard_bytes: int, groups: list[list[str]], tmp_path: Path
) -> None:
    tensors = {
        name: torch.full((size,), float(size)) for name, size in zip("abc", (1, 2, 2), strict=True)
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with Shards(tmp_path, shapes, torch.float32, shard_bytes) as shards:
        for name, tensor in tensors.items():
            shards.add(name, tensor)
        shards.finish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [list(load_file(file)) for file in files] == groups
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(groups) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == 20
        assert content["weight_map"] == {
            name: file.name for file, names in zip(files, groups, strict=True) for name in names
        }


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def turn(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors")


def index(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    weights = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    text = json.dumps({"weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(text)


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture": (lambda f: edit(f, model_type="mamba"), "model_type 'mamba' is not supported"),
    "activation": (lambda f: edit(f, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "rotary": (
        lambda f: edit(f, rope_parameters={"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}),
        "rope_type 'dynamic' cannot be trained here",
    ),
    "another family": (
        lambda f: edit(f, model_type="falcon"),
        "model_type 'falcon' is not supported",
    ),
    "no heads": (lambda f: edit(f, num_attention_heads=0), "num_attention_heads is 0"),
    "quantized": (lambda f: edit(f, quantization_config={"bits": 4}), "a quantized model"),
    "no json": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "vocabulary": (lambda f: edit(f, vocab_size=95), "has shape [96, 32], config.json says [95"),
    "turned": (
        lambda f: turn(f, "model.layers.0.mlp.up_proj.weight", torch.t),
        "model.layers.0.mlp.up_proj.weight has shape [",
    ),
    "shard": (index, "model-00001-of-00001.safetensors: missing"),
    "truncated": (cut, "damaged or not whole"),
    "missing": (lambda f: without(f, NORM), f"lacks {NORM}"),
    "extra": (lambda f: edit(f, num_hidden_layers=3), "which llama does not have"),
    "type": (lambda f: turn(f, NORM, lambda t: t.to(torch.int8)), f"{NORM} is I8"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str,
    made: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = shutil.copytree(made("llama"), tmp_path / "source")
    spoil, said = BAD[name]
    spoil(source)
    assert main([str(source), str(tmp_path / "target")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_bad_checkpoints_and_targets_are_one_line(
    made: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ours = made("llama"), tmp_path / "ours"
    converted(source, ours)
    other = made("qwen3")

    def refused(said: str, *words: str | Path) -> None:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1

    refused("exists; name another target", source, ours)
    refused("no such directory", tmp_path / "nowhere", tmp_path / "x")
    refused("neither a Hugging Face model nor a checkpoint", tmp_path, tmp_path / "x")
    refused("--kv-channels is 8, there 16", ours, tmp_path / "x", "--like", other)
    refused("must be above 0", ours, tmp_path / "x", "--shard-size", "0")
    refused("no such checkpoint", ours, tmp_path / "x", "--step", "7")
    refused("config.json is of ", ours, tmp_path / "x", "--family", "mixtral")
    refused("--family nothing: expected one of", ours, tmp_path / "x", "--family", "nothing")
    shutil.rmtree(ours / "hf")
    refused("--like DIR", ours, tmp_path / "x")
    refused("--add-qkv-bias is off, there on", ours, tmp_path / "x", "--family", "qwen2")
    refused("--family nothing: expected one of", ours, tmp_path / "x", "--family", "nothing")
    refused("the model has no experts", ours, tmp_path / "x", "--family", "mixtral")
    (shard,) = (ours / "release").glob("*.distcp")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    refused("damaged since it was saved", ours, tmp_path / "x", "--like", source)
    assert not (tmp_path / "x").exists()


def test_names_without_prefix_and_buffers_are_read(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Files of GPT-2 as they are published."""
    source = shutil.copytree(made("gpt2"), tmp_path / "published")
    tensors = tensors_of(source)
    bare = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1)
    save_file(bare, source / "model.safetensors")
    found = Folder(source)
    for entry in found.entries():
        for part, tensor in zip(entry.parts, found.read(entry), strict=True):
            assert torch.equal(tensor, tensors[part.name])


def test_tied_output_weights_may_be_saved_too(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(made("qwen2"), tmp_path / "tied")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    assert "lm_head.weight" not in Folder(source).dtypes


def test_notes_name_what_is_not_mapped(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = shutil.copytree(made("mistral"), tmp_path / "noted")
    edit(source, sliding_window=16, attention_dropout=0.5)
    config = read_config(source)
    assert config.flags["max-position-embeddings"] == 16
    assert [note.split(": ")[1] for note in config.notes] == [
        "sliding_window 16 is not mapped",
        "attention_dropout 0.5 is not mapped to a flag",
    ]


def test_every_tensor_has_one_place(made: Callable[[str], Path]) -> None:
    for family in FAMILIES:
        found = list(entries(find_families()[family], read_config(made(family)).sizes))
        places = [(each.key, each.place) for each in found]
        names = [part.name for each in found if not each.twin for part in each.parts]
        assert len(set(places)) == len(places)
        assert len(set(names)) == len(names)


def test_a_checkpoint_has_the_type_that_was_asked_for(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = made("qwen2")
    to_megatron(source, tmp_path / "ours", dtype=torch.bfloat16, progress=lambda _: None)
    stored = checkpoint.Stored(tmp_path / "ours" / "release")
    folder = Folder(source)
    entry = next(each for each in folder.entries() if each.rule == "same")
    assert torch.equal(stored.read(entry), folder.read(entry)[0].to(torch.bfloat16))
    (shard,) = (tmp_path / "ours" / "release").glob("*.distcp")
    shard.unlink()
    with pytest.raises(DataError, match=f"{shard.name}: missing; the checkpoint is not whole"):
        checkpoint.Stored(tmp_path / "ours" / "release")


def test_the_header_of_a_file_ends_at_a_multiple_of_8(tmp_path: Path) -> None:
    """Readers map the tensors behind it into memory."""
    for length in range(8):
        name = "x" * (length + 1)
        with Shards(tmp_path, {name: (2,)}, torch.float32, 8) as shards:
            shards.add(name, torch.ones(2))
            shards.finish()
        content = (tmp_path / "model.safetensors").read_bytes()
        header = int.from_bytes(content[:8], "little")
        assert header % 8 == 0 and len(content) == 8 + header + 8
        assert load_file(tmp_path / "model.safetensors")[name].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("count", "text"), [(1, "n0"), (3, "n0, n1, n2"),
                                             (5, "n0, n1, n2 and 2 more")])  # fmt: skip
def test_of_many_names_the_first_three_are_told(count: int, text: str) -> None:
    assert some([f"n{i}" for i in range(count)]) == text


def test_types_of_one_size_are_two_types() -> None:
    with pytest.raises(DataError, match="x: a is float16, b is bfloat16; "):
        one_dtype({"a": torch.float16, "b": torch.bfloat16}, Path("x"))


def test_a_changed_file_beside_a_converted_checkpoint_is_named(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its ``config.json`` shapes what is exported."""
    ours = tmp_path / "ours"
    to_megatron(made("llama"), ours, progress=lambda _: None)
    config = ours / "hf" / "config.json"
    config.write_text(config.read_text().replace("rms_norm_eps", "rms_norm_epx"))
    with pytest.raises(DataError, match=r"hf/config\.json: damaged since .*convert again"):
        to_hf(ours, tmp_path / "back", progress=lambda _: None)
    (ours / "hf" / "checksums.json").unlink()
    to_hf(ours, tmp_path / "back", progress=lambda _: None)
