"""Fields of Hugging Face's ``config.json`` as flags of training, and back: one table.

A field that changes what a model computes is mapped or refused. One that says how to train or to
generate may be left, and a note names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.dpp.errors import DataError, shown
from megatron.dpp_train.hf.rotary import add_rotary
from megatron.dpp_train.hf.tables import TABLES, Sizes
from megatron.dpp_train.text_files import read_json

CONFIG = "config.json"
ORIGIN = "hf"
"""Folder beside a converted checkpoint that keeps ``config.json`` and the tokenizer."""
_MOST_CONFIG_BYTES = 1 << 24
_MOST = {"num_hidden_layers": 10_000, "n_layer": 10_000}
_MOST_OF_ALL = 1 << 31
"""Sizes from which on a ``config.json`` is taken for a damaged one."""
Config = dict[str, Any]
"""The content of a ``config.json``."""

_MAPPED = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_key_value_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "vocab_size": "padded-vocab-size",
    "max_position_embeddings": "max-position-embeddings",
    "rms_norm_eps": "norm-epsilon",
    "initializer_range": "init-method-std",
}
_OF_GPT2 = {
    "n_layer": "num-layers",
    "n_embd": "hidden-size",
    "n_inner": "ffn-hidden-size",
    "n_head": "num-attention-heads",
    "vocab_size": "padded-vocab-size",
    "n_positions": "max-position-embeddings",
    "layer_norm_epsilon": "norm-epsilon",
    "initializer_range": "init-method-std",
}
_OF_EXPERTS = {
    "num_experts_per_tok": "moe-router-topk",
    "router_aux_loss_coef": "moe-aux-loss-coeff",
}
_OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Names of a field in files of other versions of transformers -> its name in a family's table."""

_SWITCHES = ("swiglu", "disable-bias-linear")
_VALUES = {"normalization": "RMSNorm", "position-embedding-type": "rope"}
_ROUTING = {
    "moe-router-load-balancing-type": "aux_loss",
    "moe-token-dispatcher-type": "alltoall",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's fields.

    Args:
        class_name: the class of transformers.
        mapped: field -> flag.
        flags: flags that all its models have; True for a switch.
        only: field -> the values that can be trained; the first is that of a file without it.
        usual: field -> transformers' value for a file without it.
    """

    class_name: str
    mapped: dict[str, str]
    flags: dict[str, Any] = field(default_factory=dict)
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)


_ROTARY = dict.fromkeys(_SWITCHES, True) | _VALUES
_ALL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "use_sliding_window": (False, None),
}
_USUAL: Config = {
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_USUAL_SPARSE = _USUAL | {"router_aux_loss_coef": 0.001}
_SPARSE = _ALL | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}

FAMILIES = {
    "llama": Family(
        class_name="LlamaForCausalLM", mapped=_MAPPED, flags=_ROTARY, only=_ALL, usual=_USUAL
    ),
    "mistral": Family(
        class_name="MistralForCausalLM",
        mapped=_MAPPED,
        flags=_ROTARY,
        only=_ALL,
        usual=_USUAL | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        mapped=_MAPPED,
        flags=_ROTARY | {"add-qkv-bias": True},
        only=_ALL,
        usual=_USUAL | {"num_key_value_heads": 32},
    ),
    "qwen3": Family(
        class_name="Qwen3ForCausalLM",
        mapped=_MAPPED,
        flags=_ROTARY | {"qk-layernorm": True},
        only=_ALL,
        usual=_USUAL | {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        class_name="Qwen3MoeForCausalLM",
        mapped=_MAPPED
        | _OF_EXPERTS
        | {"num_experts": "num-experts", "moe_intermediate_size": "moe-ffn-hidden-size"},
        flags=_ROTARY | _ROUTING | {"qk-layernorm": True},
        only=_SPARSE,
        usual=_USUAL_SPARSE | {"num_key_value_heads": 4, "norm_topk_prob": False},
    ),
    "mixtral": Family(
        class_name="MixtralForCausalLM",
        mapped=_MAPPED | _OF_EXPERTS | {"num_local_experts": "num-experts"},
        flags=_ROTARY | _ROUTING,
        only=_SPARSE | {"router_jitter_noise": (0.0, None)},
        usual=_USUAL_SPARSE | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "gpt2": Family(
        class_name="GPT2LMHeadModel",
        mapped=_OF_GPT2,
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False, None),
            "add_cross_attention": (False, None),
        },
        usual={
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
}
"""``model_type`` -> its family."""

_SILENT = {
    *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "max_window_layers"),
    *("output_router_logits", "reorder_and_upcast_attn", "task_specific_params", "n_ctx"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "auto_map", "_attn_implementation", "unsloth_fixed"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("sliding_window", "layer_types"),
    *("tie_word_embeddings", "norm_topk_prob"),
}
"""Fields that are read apart, or say nothing about training."""


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """A ``config.json``.

    Args:
        content: the file's, as it is.
        flags: flags of training, without dashes in front; True for a switch.
        notes: fields that no flag stands for.
    """

    family: str
    content: Config
    sizes: Sizes
    flags: dict[str, Any]
    notes: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """The flags as words of a command line."""
        words: list[str] = []
        for name, value in self.flags.items():
            words += [f"--{name}", *([] if value is True else [str(value)])]
        return words


def read_config(folder: str | Path) -> HfConfig:
    """The ``config.json`` in a folder of a Hugging Face model.

    Raises:
        DataError: there is none, or a model of this kind cannot be trained here.
    """
    path = Path(folder) / CONFIG
    content = read_json(path, most=_MOST_CONFIG_BYTES)
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object")
    return parse_config(content, str(path))


def find_origin(save: Path, started: Iterable[str | None]) -> Path | None:
    """The folder with the ``config.json`` of a checkpoint's model: beside the checkpoint, or what
    its run started from.

    Args:
        save: the directory of checkpoints.
        started: folders or directories of checkpoints that the run started from.
    """
    places = [save / ORIGIN]
    for each in filter(None, started):
        places += [Path(each), Path(each) / ORIGIN]
    return next((place for place in places if (place / CONFIG).is_file()), None)


def parse_config(content: Config, where: str) -> HfConfig:
    """Flags and sizes of a ``config.json``.

    Args:
        where: its name, for errors.

    Raises:
        DataError: a field is missing, or has a value that cannot be trained here.
    """
    name = content.get("model_type")
    family = FAMILIES.get(str(name))
    if family is None:
        raise DataError(
            f"{where}: model_type {shown(name)} is not supported; expected one of "
            f"{', '.join(FAMILIES)}"
        )
    original, content = content, _renamed(family, content)
    if content.get("quantization_config"):
        raise DataError(f"{where}: a quantized model; convert needs one in 16 or 32 bits")
    for key, values in family.only.items():
        if content.get(key, values[0]) not in values:
            raise DataError(
                f"{where}: {key} is {shown(content[key])}, which cannot be trained here; expected "
                f"{values[0]!r}"
            )
    filled = _filled(family, content, where)
    flags = dict(family.flags)
    for key, flag in family.mapped.items():
        flags[flag] = filled[key]
    if flags.get("position-embedding-type") == "rope":
        add_rotary(flags, filled, where)
    notes = [f"{where}: {text}" for text in _window(flags, filled, where)]
    if flags.pop("num-query-groups", flags["num-attention-heads"]) != flags["num-attention-heads"]:
        flags |= {"group-query-attention": True, "num-query-groups": filled["num_key_value_heads"]}
    if not filled["tie_word_embeddings"]:
        flags["untie-embeddings-and-output-weights"] = True
    if not filled.get("norm_topk_prob", True):
        flags["moe-router-pre-softmax"] = True
    known = {*family.mapped, *family.only, *_SILENT}
    notes += [
        f"{where}: {key} {shown(value)} is not mapped to a flag"
        for key, value in content.items()
        if key not in known and value not in (None, False, 0, 0.0, [], {})
    ]
    sizes = _sizes(flags)
    return HfConfig(
        family=str(name), content=original, sizes=sizes, flags=flags, notes=tuple(notes)
    )


def _renamed(family: Family, content: Config) -> Config:
    """The fields under the names that the family's table has."""
    renamed = dict(content)
    for other, name in _OTHER_NAMES.items():
        if other in content and name in family.mapped:
            renamed.setdefault(name, renamed.pop(other))
    return renamed


_REAL = ("initializer_range", "layer_norm_epsilon", "rms_norm_eps", "router_aux_loss_coef")
"""Mapped fields that are no whole numbers."""


def _filled(family: Family, content: Config, where: str) -> Config:
    """The mapped fields, with transformers' values for those that a file may lack."""
    filled = family.usual | content
    if "n_embd" in family.mapped:
        filled["n_inner"] = content.get("n_inner") or 4 * _whole(content, "n_embd", where)
    else:
        heads = _whole(content, "num_attention_heads", where)
        filled["num_key_value_heads"] = filled.get("num_key_value_heads") or heads
        if not filled.get("head_dim"):
            filled["head_dim"] = _whole(content, "hidden_size", where) // heads
    for key in family.mapped:
        if key not in _REAL:
            _whole(filled, key, where)
            continue
        if filled[key] is None:
            filled[key] = family.usual[key]
        if not isinstance(filled[key], int | float) or not 0 <= filled[key] < math.inf:
            raise DataError(f"{where}: {key} is {shown(filled[key])}, expected a number from 0 on")
    return filled


def _whole(content: Config, key: str, where: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{where}: {key} is {shown(value)}, expected a whole number above 0")
    most = _MOST.get(key, _MOST_OF_ALL)
    if value > most:
        raise DataError(f"{where}: {key} is {value}, expected at most {most}")
    return value


def _window(flags: dict[str, Any], filled: Config, where: str) -> list[str]:
    """Bound the positions by a sliding window, within which attention sees all tokens."""
    if not filled.get("sliding_window") or filled.get("use_sliding_window") is False:
        return []
    window = _whole(filled, "sliding_window", where)
    if window >= flags["max-position-embeddings"]:
        return []
    flags["max-position-embeddings"] = window
    return [f"sliding_window {window} is not mapped: samples may have {window} tokens at most"]


def _sizes(flags: dict[str, Any]) -> Sizes:
    heads = flags["num-attention-heads"]
    return Sizes(
        layers=flags["num-layers"],
        hidden=flags["hidden-size"],
        ffn=flags["ffn-hidden-size"],
        heads=heads,
        groups=flags.get("num-query-groups", heads),
        head=flags.get("kv-channels", flags["hidden-size"] // heads),
        vocab=flags["padded-vocab-size"],
        positions=flags["max-position-embeddings"],
        experts=flags.get("num-experts", 0),
        expert_ffn=flags.get("moe-ffn-hidden-size", flags["ffn-hidden-size"]),
        untied="untie-embeddings-and-output-weights" in flags,
    )


assert FAMILIES.keys() == TABLES.keys()
