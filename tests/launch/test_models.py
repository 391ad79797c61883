"""Presets of ``configs/models`` that are models people know, and ``--model`` with a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.launch import cli
from megatron.dpp.launch.flags import MODELS, model_flags
from megatron.dpp.launch.layout import Layout
from megatron.dpp.launch.main import plan
from megatron.dpp.launch.resolve import base_flags, resolve
from megatron.dpp.launch.settle import shape_from
from megatron.dpp.launch.start import prepare
from megatron.dpp.models import Sizes, num_parameters
from megatron.dpp.models.fields import FAMILIES
from megatron.dpp.plan import model_parameters
from tests.launch.test_train import H200

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
}
"""Preset -> its family, and the parameters that its publisher counts."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    family, count = PARAMETERS[name]
    flags = model_flags(name)
    heads, hidden = flags["--num-attention-heads"], flags["--hidden-size"]
    sizes = Sizes(
        layers=flags["--num-layers"],
        hidden=hidden,
        ffn=flags.get("--ffn-hidden-size", 4 * hidden),
        heads=heads,
        groups=flags.get("--num-query-groups", heads),
        head=flags.get("--kv-channels", hidden // heads),
        vocab=flags["--padded-vocab-size"],
        positions=flags["--max-position-embeddings"],
        untied=family != "gpt2" and "--untie-embeddings-and-output-weights" in flags,
    )
    assert num_parameters(family, sizes) == count
    switches = {f"--{each}" for each, value in FAMILIES[family].flags.items() if value is True}
    assert switches <= flags.keys()


@pytest.mark.parametrize("name", ["gpt2", "llama3.2-1b", "llama3-8b", "qwen2.5-7b", "qwen3-8b"])
def test_the_estimate_counts_the_same(name: str) -> None:
    options, rest = cli.parse(["--mode", "simple", "--procs", "1", "--model", name])
    flags = base_flags(options, rest, H200)
    flags |= prepare("gpt", None, flags).flags
    resolved = resolve(options, flags, H200, layout=Layout(), shard="none")
    counted = model_parameters(shape_from(resolved, H200))
    assert counted == pytest.approx(PARAMETERS[name][1], rel=1e-6)


def test_every_preset_names_its_source() -> None:
    for path in MODELS.glob("*.yaml"):
        assert path.read_text().startswith("#"), path


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
