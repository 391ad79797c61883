"""Exports say what was trained: no tensor and no field is dropped, guessed or changed silently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.dpp.errors import DataError
from megatron.dpp_train.families import find_families
from megatron.dpp_train.hf import Entry, checkpoint, read_config, write_config
from megatron.dpp_train.hf.checkpoint import Stored
from megatron.dpp_train.hf.convert_command import main
from megatron.dpp_train.hf.fields import parse_config
from megatron.dpp_train.hf.folder import Folder
from megatron.dpp_train.hf.model import args_of_model, check_same, completed
from megatron.dpp_train.hf.rules import join
from megatron.dpp_train.hf.to_hf import to_hf
from megatron.dpp_train.hf.to_megatron import to_megatron
from tests.hf import tiny
from tests.hf.test_stored import metadata_of, written

Change = Callable[[list[Entry]], list[Entry]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family's model of two layers, made once."""
    root = tmp_path_factory.mktemp("models")

    def find_or_make(family: str) -> Path:
        folder = root / family
        layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2}
        return folder if folder.is_dir() else tiny.make(family, folder, **layers)

    return find_or_make


def stored(
    source: Path, target: Path, change: Change = lambda found: found, **trained: Any
) -> Path:
    """A checkpoint of the model in ``source`` with other entries, by a run with other arguments."""
    folder = Folder(source)
    sizes, args = folder.config.sizes, args_of_model(folder.config)
    vars(args).update(trained)

    def read(entry: Entry) -> torch.Tensor:
        return join(entry.rule, folder.read(entry), sizes)

    target.mkdir()
    entries = change(list(folder.entries()))
    checkpoint.write(target, entries, sizes, torch.float32, read, args)
    return target


def export(source: Path, target: Path, like: Path) -> dict[str, torch.Tensor]:
    to_hf(source, target, like=like, progress=lambda _: None)
    return load_file(target / "model.safetensors")


def rewritten(family: str, folder: Path) -> dict[str, Any]:
    return write_config(find_families()[family], completed(args_of_model(read_config(folder))))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A folder that has the ``config.json`` of ``source`` with these changes."""
    target.mkdir()
    content = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(content))
    return target


def test_stored_parameters_that_the_family_lacks_are_refused(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny.make("qwen2", tmp_path / "untied", tie_word_embeddings=False)
    ours = stored(source, tmp_path / "ours")
    like = edited(source, tmp_path / "tied", tie_word_embeddings=True, model_type="llama")
    with pytest.raises(DataError, match=r"--add-qkv-bias is on, .*--untie-.* is on, there off"):
        export(ours, tmp_path / "x", like)

    source = made("llama")

    def beside(key: str) -> Change:
        return lambda found: [*found, replace(found[0], key=key)]

    for number, key in enumerate(("optimizer.state.exp_avg.x", "chained_0.optimizer.state.x")):
        ours = stored(source, tmp_path / f"trained{number}", beside(key))
        export(ours, tmp_path / f"y{number}", source)
    for number, key in enumerate(("decoder.layers.mlp.shared_experts.x", "mtp.layers.0.x")):
        ours = stored(source, tmp_path / f"other{number}", beside(key))
        with pytest.raises(DataError, match=f"holds {key}, which llama does not have"):
            export(ours, tmp_path / "x", source)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("gpt2", "squared_relu", True),
        ("gpt2", "quick_geglu", True),
        ("gpt2", "layernorm_zero_centered_gamma", True),
        ("mistral", "rotary_percent", 0.5),
        ("llama", "rotary_interleaved", True),
        ("qwen3_moe", "moe_shared_expert_intermediate_size", 8),
        ("qwen3_moe", "moe_router_score_function", "sigmoid"),
        ("qwen3_moe", "moe_layer_freq", [0, 1]),
        ("mixtral", "moe_router_pre_softmax", True),
    ],
)
def test_options_that_no_config_says_are_refused(
    family: str, name: str, value: Any, made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = made(family)
    ours = stored(source, tmp_path / "ours", moe_layer_freq=[1, 1])
    to_hf(ours, tmp_path / "x", family=family, progress=lambda _: None)
    other = stored(source, tmp_path / "other", **{name: value})
    with pytest.raises(DataError, match=f"--{name.replace('_', '-')} is .*, there "):
        to_hf(other, tmp_path / "y", family=family, progress=lambda _: None)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rotary_base", 5000000, "--rotary-base is 5000000, there 10000"),
        ("layernorm_epsilon", 1e-5, "--norm-epsilon is 1e-05, there 1e-06"),
        ("rope_scaling_factor", 4.0, "--rope-scaling-factor is 4.0, there 8.0"),
        ("use_rope_scaling", False, "--use-rope-scaling is off, there on"),
        ("num_attention_heads", 8, "--num-attention-heads is 8, there 4"),
        ("num_query_groups", 4, "--num-query-groups is 4, there 2"),
        ("squared_relu", True, "--squared-relu is on, there off"),
    ],
)
def test_a_config_that_the_run_did_not_train_is_refused(
    name: str, value: Any, said: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    ours = stored(made("llama"), tmp_path / "ours", **{name: value})
    with pytest.raises(DataError, match=said):
        export(ours, tmp_path / "x", made("llama"))
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_without_arguments_is_held_to_its_tensors(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.dpp_train.hf.to_hf.saved_args", lambda _: None)
    ours = stored(made("llama"), tmp_path / "ours")
    with pytest.raises(DataError, match=r"linear_qkv.weight is \[2, 64, 32\], the model"):
        export(ours, tmp_path / "x", made("qwen3"))
    with pytest.raises(DataError, match="holds no arguments; name a folder"):
        to_hf(ours, tmp_path / "x", family="llama", progress=lambda _: None)
    assert same(
        export(ours, tmp_path / "y", made("llama")), load_file(made("llama") / "model.safetensors")
    )


def test_biases_that_others_imply_are_no_difference(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """A run with biases in all linear layers saves ``add_qkv_bias``, too."""
    source = made("gpt2")
    ours = stored(source, tmp_path / "ours", add_qkv_bias=True)
    assert same(export(ours, tmp_path / "x", source), load_file(source / "model.safetensors"))
    to_hf(ours, tmp_path / "y", family="gpt2", progress=lambda _: None)


def test_names_of_fields_stay(made: Callable[[str], Path], tmp_path: Path) -> None:
    """Versions of transformers differ in what they call the number of experts."""
    source = made("qwen3_moe")
    content = json.loads((source / "config.json").read_text())
    content["num_experts"] = content.pop("num_local_experts", 4)
    assert parse_config(content, "x").content == content
    assert parse_config(content, "x").flags["num-experts"] == 4
    written = rewritten("qwen3_moe", source)
    assert written["num_experts"] == 4
    assert "num_local_experts" not in written
    written = rewritten("mixtral", made("mixtral"))
    assert written["num_local_experts"] == 4


@pytest.mark.parametrize("left", ["mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"])
def test_either_name_of_the_norm_of_experts_is_read(
    left: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = made("mixtral")
    ours = stored(
        source, tmp_path / "ours", lambda found: [each for each in found if left not in each.key]
    )
    assert same(export(ours, tmp_path / "x", source), load_file(source / "model.safetensors"))


def test_layers_stored_apart_are_read(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = made("mixtral")

    def apart(entry: Entry) -> Entry:
        if not entry.place:
            return entry
        key = entry.key.replace("layers.", f"layers.{entry.place[0]}.")
        return replace(entry, key=key, place=entry.place[1:], counts=entry.counts[1:])

    ours = stored(source, tmp_path / "ours", lambda found: [apart(each) for each in found])
    assert same(export(ours, tmp_path / "x", source), load_file(source / "model.safetensors"))


def test_tensors_of_several_types_need_one(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(made("llama"), tmp_path / "mixed")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    save_file(tensors, source / "model.safetensors")
    ours = tmp_path / "ours"
    said = r"embed_tokens.weight is bfloat16, model.norm.weight is float32; .*--dtype"
    with pytest.raises(DataError, match=said):
        to_megatron(source, ours, progress=lambda _: None)
    assert main([str(source), str(ours), "--dtype", "float32"]) == 0
    monkeypatch.setattr(
        Stored, "dtype", lambda _, entry: torch.float16 if entry.by_vocab else torch.float32
    )
    with pytest.raises(DataError, match=r"weight is float16, .* is float32; .*--dtype"):
        to_hf(ours, tmp_path / "x", progress=lambda _: None)
    written: list[int] = []
    to_hf(ours, tmp_path / "x", dtype=torch.float16, progress=written.append)
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    assert sum(written) == sum(2 * tensor.numel() for tensor in found.values())
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float16"


def test_the_type_of_an_entry_is_that_of_its_own_tensor(tmp_path: Path) -> None:
    """Layers may be tensors of their own."""
    types = {"decoder.layers.0.w": torch.float32, "decoder.layers.1.w": torch.bfloat16}
    folder = written(tmp_path / "x", {key: torch.zeros(2, 3) for key in types})
    with metadata_of(folder) as metadata:
        for key, kind in types.items():
            own = metadata.state_dict_metadata[key]
            own = replace(own, properties=replace(own.properties, dtype=kind))
            metadata.state_dict_metadata[key] = own
    found = checkpoint.Stored(folder)
    entry = Entry("decoder.layers.w", (1,), (2,), (2, 3), (), "same", twin=False, by_vocab=False)
    assert found.dtype(entry) == torch.bfloat16
    assert found.dtype(replace(entry, place=(0,))) == torch.float32


@pytest.mark.parametrize("family", tiny.MODELS)
def test_absent_fields_have_the_values_of_transformers(family: str) -> None:
    import transformers

    kind = getattr(transformers, f"{tiny.MODELS[family][0]}Config")
    usual = kind()

    def value_of(key: str) -> Any:
        rope = getattr(usual, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        return rope[key] if key in rope else getattr(usual, key)

    for key, value in find_families()[family].usual.items():
        if key not in ("sliding_window", "rope_local_base_freq") or hasattr(usual, key):
            assert value_of(key) == value, key
    for key, values in find_families()[family].only.items():
        if hasattr(usual, key):
            assert getattr(usual, key) == values[0], key
    if family == "gpt2":
        return
    few = {
        **dict.fromkeys(("num_hidden_layers", "intermediate_size", "vocab_size"), 8),
        "hidden_size": 256,
        "num_attention_heads": 32,
        "max_position_embeddings": 8,
        "n_routed_experts": 8,
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), 8),
    }
    there, sizes = kind(**few), parse_config({"model_type": family, **few}, "x").sizes
    assert sizes.groups == there.num_key_value_heads
    assert sizes.head == (getattr(there, "head_dim", None) or 8)


def test_a_written_config_has_no_window(made: Callable[[str], Path]) -> None:
    content = json.loads((made("mistral") / "config.json").read_text())
    written = rewritten("mistral", made("mistral"))
    assert written["sliding_window"] is None
    del content["sliding_window"]
    content["max_position_embeddings"] = 8192
    assert parse_config(content, "x").flags["max-position-embeddings"] == 4096
    content["sliding_window"] = None
    assert parse_config(content, "x").flags["max-position-embeddings"] == 8192


LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mscale": 1.2, "mscale_all_dim": 0.7},
        {"mscale": 1.2},
        {"attention_factor": 1.3, "truncate": False, "beta_fast": 8, "beta_slow": 2},
    ],
)
def test_yarn_comes_back_as_it_was(more: dict[str, Any], made: Callable[[str], Path]) -> None:
    """The frequencies of transformers are those of the ``config.json`` that is written."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    content = json.loads((made("llama") / "config.json").read_text())
    content["rope_parameters"] = YARN | {"rope_theta": 10000.0} | more
    config = parse_config(content, "x")
    written = write_config(find_families()["llama"], completed(args_of_model(config)))
    check_same(completed(args_of_model(config)), parse_config(written, "x"), "", "", "")
    found = [ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**each)) for each in (content, written)]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"factor": 4}, "factor of rope_type default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of rope_type default"),
        (LLAMA3, "factor of rope_type llama3 is None"),
        (LLAMA3 | {"factor": "8"}, "factor of rope_type llama3 is '8'"),
        (LLAMA3 | {"factor": 8, "beta": 1}, "beta of rope_type llama3"),
        (LLAMA3 | {"low_freq_factor": 2, "factor": 8}, "low_freq_factor of rope_type llama3 is 2"),
        (YARN | {"factor": None}, "factor of rope_type yarn is None"),
        (YARN | {"factor": 0.5}, "factor of rope_type yarn is 0.5, expected 1 or more"),
        (YARN | {"beta_fast": 1}, "beta_fast 1 of rope_type yarn is not above 1"),
        (YARN | {"attention_factor": "1"}, "attention_factor of rope_type yarn is '1'"),
        (YARN | {"factor": 1, "attention_factor": 2}, "attention_factor 2 of rope_type yarn with"),
        (YARN | {"long_factor": [1]}, "long_factor of rope_type yarn cannot be trained here"),
        ({"rope_type": "linear", "factor": 2.5}, "factor of rope_type linear is 2.5; megatron"),
        ({"rope_type": "linear", "factor": 0.5}, "factor of rope_type linear is 0.5, expected 1"),
        ({"rope_type": "dynamic", "factor": 2}, "rope_type 'dynamic' cannot be trained here"),
        ([8], "expected an object"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
    ],
)
def test_rotary_fields_are_read_or_refused(
    rope: Any, said: str, made: Callable[[str], Path]
) -> None:
    content = json.loads((made("llama") / "config.json").read_text())
    with pytest.raises(DataError, match=said):
        parse_config(content | {"rope_parameters": rope}, "x")
    with pytest.raises(DataError, match="remove one"):
        parse_config(content | {"rope_scaling": {"type": "yarn"}}, "x")
    with pytest.raises(DataError, match="_position_embeddings of rope_type llama3 is 9"):
        parse_config(content | {"original_max_position_embeddings": 9}, "x")
    harmless = {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": None}
    flags = parse_config(content | {"rope_parameters": harmless}, "x").flags
    assert "use-rope-scaling" not in flags


def test_linear_scaling_comes_back_as_it_was(made: Callable[[str], Path]) -> None:
    content = json.loads((made("llama") / "config.json").read_text())
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    config = parse_config(content | {"rope_parameters": rope}, "x")
    assert config.flags["rotary-seq-len-interpolation-factor"] == 4
    written = write_config(find_families()["llama"], completed(args_of_model(config)))
    check_same(completed(args_of_model(config)), parse_config(written, "x"), "", "", "")
    assert parse_config(written, "x").flags == config.flags


@pytest.mark.parametrize("change", [{"sliding_window": "8"}, {"rms_norm_eps": "x"}])
def test_values_of_another_type_are_refused(
    change: dict[str, Any], made: Callable[[str], Path]
) -> None:
    content = json.loads((made("mistral") / "config.json").read_text())
    (name,) = change
    with pytest.raises(DataError, match=f"{name} is '.', expected a"):
        parse_config(content | change, "x")


@pytest.mark.parametrize(
    ("family", "name"), [("granite", "logits_scaling"), ("gemma3_text", "query_pre_attn_scalar")]
)
def test_a_scale_of_0_is_refused(family: str, name: str) -> None:
    """It ended in a ZeroDivisionError."""
    with pytest.raises(DataError, match=f"^x: family {family} cannot read its fields"):
        parse_config(tiny.config_of(family) | {name: 0}, "x")


@pytest.mark.parametrize("file", ["../source/model.safetensors", "/x", 7, None, []])
def test_an_index_names_files_of_its_folder(
    file: Any, made: Callable[[str], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(made("llama"), tmp_path / "source")
    weights = dict.fromkeys(load_file(source / "model.safetensors"), file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(DataError, match="expected the name of a file"):
        Folder(source)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--like x", "--like: "),
        ("--step 0", "--step: "),
        ("--family llama", "--family: "),
        ("--shard-size inf", "--shard-size inf: must be above 0"),
        ("--shard-size nan", "--shard-size nan: must be above 0"),
    ],
)
def test_options_without_effect_are_refused(
    more: str,
    said: str,
    made: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(made("llama")), str(tmp_path / "x"), *more.split()]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
