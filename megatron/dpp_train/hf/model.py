"""Compares the model of a run with a ``config.json``, for starts, exports and conversions alike."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp.naming import flag_name
from megatron.dpp_train.checkpoint.saved_args import SIZES, STRUCTURE
from megatron.dpp_train.hf import HfConfig
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import Settings

_BESIDE = ("mtp_num_layers", "experimental_attention_variant", "apply_layernorm_1p")
"""Further attributes of a model; no family has one. The last is of old Megatron-LM checkpoints."""


def args_of_model(config: HfConfig) -> argparse.Namespace:
    """The flags of a model as a checkpoint holds them."""
    parsed = parse_args(config.words())
    return argparse.Namespace(
        **{name: getattr(parsed, name) for name in (*parsed.given, *STRUCTURE)},
        loss_vocab_size=config.sizes.vocab,
    )


def completed(saved: Any) -> Any:
    """The arguments of a checkpoint, which another program may have written, with defaults for
    those that it lacks."""
    return argparse.Namespace(**(vars(parse_args([])) | vars(saved)))


def check_same(args: Settings, config: HfConfig, given: str, where: str, advice: str) -> None:
    """Refuse a ``config.json`` of another model than the run's.

    Args:
        args: all arguments of the run.
        given: what asks for the comparison, for errors.
        where: the name of ``config``.
        advice: what to do about a difference.

    Raises:
        DataError: naming all flags that differ, each with both values.
    """
    here, there = _structure(args), _structure(parse_args(config.words()))
    other = [
        f"{_flag(name)} is {_spelled(name, here[name])}, there {_spelled(name, there[name])}"
        for name in here
        if name in there and not _equal(here[name], there[name])
    ]
    rows = args.padded_vocab_size
    if rows and rows < config.sizes.vocab:
        other.append(f"--padded-vocab-size is {rows}, there {config.sizes.vocab}")
    if other:
        raise DataError(
            f"{given}: the run's model is not that of {where}: {'; '.join(other)}; {advice}"
        )


def _structure(args: Settings) -> dict[str, Any]:
    """The values that a model has: implied ones are filled in, idle ones left out."""
    values = {name: getattr(args, name, None) for name in (*SIZES, *STRUCTURE, *_BESIDE)}
    if not values.pop("group_query_attention"):
        values["num_query_groups"] = args.num_attention_heads
    if args.kv_channels is None and args.hidden_size:
        values["kv_channels"] = args.hidden_size // args.num_attention_heads
    values["moe_ffn_hidden_size"] = args.moe_ffn_hidden_size or args.ffn_hidden_size
    kind = args.position_embedding_type
    if kind == "learned_absolute":
        values["max_position_embeddings"] = args.max_position_embeddings
    used = {
        "add_qkv_bias": not args.add_bias_linear,  # which implies it
        **{name: kind in ("rope", "yarn") for name in values if name.startswith("rotary_")},
        "use_rope_scaling": kind == "rope",
        "rope_scaling_factor": kind == "rope" and args.use_rope_scaling,
        **{name: kind == "yarn" for name in values if name.startswith(("yarn_", "mscale"))},
        "rotary_scaling_factor": kind == "yarn",
        **{name: args.num_experts for name in values if name.startswith("moe_")},
    }
    return {name: value for name, value in values.items() if used.get(name, True)}


def _equal(here: Any, there: Any) -> bool:
    if isinstance(here, list) and not isinstance(there, list):
        return all(each == there for each in here)  # a value for each layer
    if isinstance(here, float) and isinstance(there, float):
        return math.isclose(here, there, rel_tol=1e-9)
    return bool(here == there) or (here in (None, False) and there in (None, False))


_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
}
"""Attribute -> its flag, where that has another name."""


def _flag(name: str) -> str:
    return _FLAGS.get(name, flag_name(name))


def _spelled(name: str, value: Any) -> str:
    if isinstance(value, bool):
        negated = _flag(name).startswith(("--disable-", "--no-"))
        return "on" if value != negated else "off"
    return "not given" if value is None else str(value)
