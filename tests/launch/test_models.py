"""Presets of ``configs/models`` that are models people know, and ``--model`` with a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp_train.cost.memory import model_parameters
from megatron.dpp_train.families import find_families
from megatron.dpp_train.generate.model_source import find_source
from megatron.dpp_train.hf import Sizes
from megatron.dpp_train.launch.checked import shape_from
from megatron.dpp_train.launch.flags import MODELS, model_flags
from megatron.dpp_train.launch.main import plan
from tests.hf import tiny

PARAMETERS = {
    "gpt2": ("gpt2", 124_439_808),
    "gpt2-medium": ("gpt2", 354_823_168),
    "gpt2-large": ("gpt2", 774_030_080),
    "gpt2-xl": ("gpt2", 1_557_611_200),
    "llama3-8b": ("llama", 8_030_261_248),
    "llama3-70b": ("llama", 70_553_706_496),
    "llama3.1-8b": ("llama", 8_030_261_248),
    "llama3.1-70b": ("llama", 70_553_706_496),
    "llama3.2-1b": ("llama", 1_235_814_400),
    "llama3.2-3b": ("llama", 3_212_749_824),
    "mistral-7b": ("mistral", 7_248_023_552),
    "qwen2.5-0.5b": ("qwen2", 494_032_768),
    "qwen2.5-1.5b": ("qwen2", 1_543_714_304),
    "qwen2.5-3b": ("qwen2", 3_085_938_688),
    "qwen2.5-7b": ("qwen2", 7_615_616_512),
    "qwen2.5-14b": ("qwen2", 14_770_033_664),
    "qwen2.5-32b": ("qwen2", 32_763_876_352),
    "qwen3-0.6b": ("qwen3", 596_049_920),
    "qwen3-1.7b": ("qwen3", 1_720_574_976),
    "qwen3-4b": ("qwen3", 4_022_468_096),
    "qwen3-8b": ("qwen3", 8_190_735_360),
    "qwen3-14b": ("qwen3", 14_768_307_200),
    "qwen3-32b": ("qwen3", 32_762_123_264),
    "qwen3-30b-a3b": ("qwen3_moe", 30_532_122_624),
    "mixtral-8x7b": ("mixtral", 46_702_792_704),
}
"""Preset -> its family, and the parameters that its publisher counts."""
GPT3 = {
    "gpt3-125m": 125e6,
    "gpt3-350m": 350e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13e9,
    "gpt3-175b": 175e9,
}
"""Preset -> the parameters that the paper gives in two or three digits."""
TINY = {
    "tiny-gpt2": "gpt2",
    "tiny-llama3": "llama",
    "tiny-mistral": "mistral",
    "tiny-mixtral": "mixtral",
    "tiny-qwen2.5": "qwen2",
    "tiny-qwen3": "qwen3",
    "tiny-qwen3-moe": "qwen3_moe",
}
OWN = {"sample", "sample-experts", "small", "medium", "large"}
"""Presets without a vocabulary of their own."""
LAYOUTS = {
    "mixtral-8x7b": "--gpus 32 --pp 4 --ep 8",
    "qwen3-30b-a3b": "--gpus 16 --pp 4 --ep 4",
    "tiny-mixtral": "--gpus 4 --pp 2 --ep 2",
    "tiny-qwen3-moe": "--gpus 4 --pp 2 --ep 2",
}
"""Preset -> a layout that fits into H200s, where it does not follow from the size."""


def sizes_of(name: str, family: str) -> Sizes:
    flags = model_flags(name)
    heads, hidden = flags["--num-attention-heads"], flags["--hidden-size"]
    ffn = flags.get("--ffn-hidden-size", 4 * hidden)
    return Sizes(
        layers=flags["--num-layers"],
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=flags.get("--num-query-groups", heads),
        head=flags.get("--kv-channels", hidden // heads),
        vocab=flags["--padded-vocab-size"],
        positions=flags["--max-position-embeddings"],
        experts=flags.get("--num-experts", 0),
        expert_ffn=flags.get("--moe-ffn-hidden-size", ffn),
        untied=family != "gpt2" and "--untie-embeddings-and-output-weights" in flags,
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    family, count = PARAMETERS[name]
    assert tiny.num_parameters(find_families()[family], sizes_of(name, family)) == count


@pytest.mark.parametrize("name", GPT3)
def test_a_size_of_gpt3_is_near_the_papers(name: str) -> None:
    assert tiny.num_parameters(find_families()["gpt2"], sizes_of(name, "gpt2")) == pytest.approx(
        GPT3[name], rel=0.02
    )


def test_presets_have_the_options_of_their_family() -> None:
    families = {name: family for name, (family, _) in PARAMETERS.items()} | TINY
    for name, family in families.items():
        options = find_families()[family].flags
        switches = {f"--{each}" for each, value in options.items() if value is True}
        flags = model_flags(name)
        assert switches <= flags.keys(), name
        for each, value in options.items():
            assert flags.get(f"--{each}") == value, (name, each)


NAMES = [*PARAMETERS, *GPT3, *TINY]
FEW = {"gpt2", "gpt3-175b", "llama3.1-8b", "mixtral-8x7b", "tiny-qwen3-moe"}


@pytest.mark.parametrize(
    "name", [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in NAMES]
)
def test_a_preset_is_planned_with_a_layout_that_fits(name: str) -> None:
    """The estimate counts all parameters of the model."""
    family = "gpt2" if name in GPT3 else PARAMETERS.get(name, (TINY.get(name, ""), 0))[0]
    count = tiny.num_parameters(find_families()[family], sizes_of(name, family))
    sizes = {
        4e9: "--gpus 2 --pp 2",
        15e9: "--gpus 8 --tp 2 --pp 4",
        40e9: "--gpus 16 --tp 4 --pp 4",
    }
    usual = next((text for most, text in sizes.items() if count < most), "--gpus 64 --tp 8 --pp 8")
    layout = LAYOUTS.get(name, usual)
    found = plan(f"--model {name} --gpu H200 --mode 3d {layout} --dry-run".split())
    assert model_parameters(shape_from(found.resolved, found.devices)) == pytest.approx(count)


def test_every_preset_names_its_source() -> None:
    assert {path.stem for path in MODELS.glob("*.yaml")} == {*NAMES, *OWN}
    for path in MODELS.glob("*.yaml"):
        first = path.read_text().split("\n")[0]
        assert first.startswith("#"), path
        assert path.stem in TINY or path.stem in OWN or "https://" in first, path


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1501,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "mystery": 7,
}


@pytest.mark.parametrize("form", ["adapter", "file"])
def test_an_adapter_and_a_file_are_no_models(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, said = {"adapter": ("lora", "merge it into its model first"),
                  "file": ("model.gguf", "a file; a model is a folder")}[form]  # fmt: skip
    if form == "adapter":
        Path(name).mkdir()
        (Path(name) / "adapter_config.json").write_text("{}")
    else:
        Path(name).write_bytes(b"GGUF")
    with pytest.raises(DataError, match=said):
        model_flags(name)
    with pytest.raises(DataError, match=said):
        find_source(Path(name), None, "auto")


def test_a_folder_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--model", str(tmp_path), "--mode", "3d", "--procs", "2", "--tp", "2", "--dry-run"]
    found = plan(words).resolved.flags
    assert found["--padded-vocab-size"] == 1502  # of which each rank holds half
    assert "--make-vocab-size-divisible-by" not in found
    assert found["--seq-length"] == 128
    assert found["--num-query-groups"] == 2
    assert "mystery 7 is not mapped" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "x"}))
    with pytest.raises(DataError, match=r"model_type 'x' is not supported"):
        plan(words)
    with pytest.raises(DataError, match=r"nowhere/config\.json"):
        plan(["--model", "./nowhere", "--dry-run"])
