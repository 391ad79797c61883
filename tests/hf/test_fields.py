"""Fields of ``config.json`` become Megatron's flags, come back, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.hf.families import find_families
from megatron.dpp_train.hf.fields import parse_config
from megatron.dpp_train.hf.forms import Forms, parse_forms
from tests.hf import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"), 8),
        "n_routed_experts": 8,
    }
    there, sizes = kind(**few), parse_config({"model_type": family, **few}, "x").sizes
    assert sizes.groups == there.num_key_value_heads
    assert sizes.head == (getattr(there, "head_dim", None) or 8)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"factor": 4}, "factor of rope_type default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of rope_type default"),
        (LLAMA3 | {"factor": "8"}, "^x: factor is '8', expected 1 or more"),
        (LLAMA3 | {"factor": 8, "beta": 1}, "beta of rope_type llama3"),
        (LLAMA3 | {"low_freq_factor": 2, "factor": 8}, "low_freq_factor of rope_type llama3 is 2"),
        (YARN | {"factor": 0.5}, "factor is 0.5, expected 1 or more"),
        (YARN | {"beta_fast": 1}, "beta_fast of rope_type yarn is 1, expected more than 1"),
        (YARN | {"factor": 1, "attention_factor": 2}, "attention_factor 2 of rope_type yarn with"),
        (YARN | {"long_factor": [1]}, "long_factor of rope_type yarn cannot be trained here"),
        ({"rope_type": "linear", "factor": 2.5}, "factor is 2.5; megatron-core knows whole ones"),
        ({"rope_type": "dynamic", "factor": 2}, "rope_type 'dynamic' cannot be trained here"),
        ([8], "expected an object"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
    ],
)
def test_rotary_fields_are_read_or_refused(rope: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_config(tiny.config_of("llama") | {"rope_parameters": rope}, "x")


@pytest.mark.parametrize(
    ("family", "field", "value", "said"),
    [
        ("granite", "logits_scaling", 0, "^x: its fields cannot be read .ZeroDivisionError"),
        ("gemma3_text", "query_pre_attn_scalar", 0, "^x: its fields cannot be read"),
        ("mistral", "sliding_window", "8", "sliding_window is '8', expected a whole number"),
        ("olmo3", "layer_types", ["x"], "layer_types is"),
        ("glm4_moe", "norm_topk_prob", False, "norm_topk_prob is False"),
        ("gpt_oss", "swiglu_alpha", 1.0, "swiglu_alpha is 1.0"),
        ("smollm3", "no_rope_layers", [2], "no_rope_layers is"),
        ("phi3", "rope_parameters", {"rope_type": "longrope"}, "'longrope' cannot be trained"),
        ("llama", "rope_scaling", {"type": "yarn"}, "remove one"),
        ("gemma2", "x", 1, "model_type 'gemma2' is not supported"),
    ],
)
def test_fields_that_cannot_be_trained_are_refused(
    family: str, field: str, value: Any, said: str
) -> None:
    content = tiny.config_of(family) if family in tiny.MODELS else {"model_type": family}
    with pytest.raises(DataError, match=said):
        parse_config(content | {field: value}, "x")


def test_notes_name_what_is_not_mapped() -> None:
    content = {"model_type": "mistral", **tiny.SIZES}
    content |= {"sliding_window": 16, "attention_dropout": 0.5}
    config = parse_config(content, "x")
    assert config.flags["max-position-embeddings"] == 16
    assert [note.split(": ")[1] for note in config.notes] == [
        "sliding_window 16 is not mapped",
        "attention_dropout 0.5 is not mapped to a flag",
    ]
    del content["sliding_window"], content["attention_dropout"]
    content["max_position_embeddings"] = 8192
    assert parse_config(content, "x").flags["max-position-embeddings"] == 4096


def test_absent_patterns_and_unnormalised_experts_have_their_flags() -> None:
    gemma = tiny.config_of("gemma3_text") | {"layer_types": None, "num_hidden_layers": 7}
    found = parse_config(gemma, "x").flags["window-attn-skip-freq"]
    assert found == "[1,1,1,1,1,0,1]"
    for normed in (True, False):
        content = tiny.config_of("qwen3_moe") | {"norm_topk_prob": normed}
        assert ("moe-router-pre-softmax" in parse_config(content, "x").flags) is not normed


def test_names_of_other_versions_are_read() -> None:
    """Versions of transformers differ in what they call the number of experts."""
    content = tiny.config_of("qwen3_moe")
    content["num_experts"] = content.pop("num_local_experts", 4)
    assert parse_config(content, "x").content == content
    assert parse_config(content, "x").flags["num-experts"] == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("geglu=1", "'geglu=1' is no form"),
        ("tokens", "'tokens' is no form"),
        ("output-norm", r"did you mean output-norms\?"),
        ("tokens=0", "'tokens=0' is no form: .*, with numbers above 0"),
        ("geglu,tokens=1.5", "'tokens=1.5' is no form"),
        ("logit-scale=inf", "'logit-scale=inf' is no form"),
        ("logit-scale=x", "'logit-scale=x' is no form"),
    ],
)
def test_forms_are_read_or_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_forms(text)


def test_forms_come_back_as_they_were() -> None:
    forms = Forms(tokens=5, geglu=True, logit_scale=1 / 3, window_rotary_base=10000)
    assert parse_forms(str(forms)) == forms
    assert parse_forms(None) == parse_forms("") == Forms()
