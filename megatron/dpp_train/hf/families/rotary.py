"""Rotary embeddings: the fields of ``config.json`` that describe one, as flags, and back."""

from __future__ import annotations

import math
from typing import Any

from megatron.dpp.errors import DataError, shown

_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
"""Values that megatron-core's scaling of Llama 3 has built in."""
_Fields = dict[str, Any]


def add_rotary(flags: dict[str, Any], filled: _Fields) -> None:
    """Add the flags of the rotary embedding.

    Args:
        filled: the fields of ``config.json``, ``rope_theta`` among them.

    Raises:
        DataError: no flag says what a field says.
    """
    new, old = filled.get("rope_parameters"), filled.get("rope_scaling")
    if new and old and new != old:
        both = f"rope_parameters is {shown(new)}, rope_scaling is {shown(old)}"
        raise DataError(f"{both}; remove one")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise DataError(f"rope_parameters is {shown(rope)}, expected an object")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", filled["rope_theta"])
    if not isinstance(theta, int | float) or not float(theta).is_integer() or theta < 1:
        raise DataError(f"rope_theta is {shown(theta)}, expected a whole number")
    flags["rotary-base"] = int(theta)
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    if kind in ("llama3", "yarn") and filled.get(_ORIGINAL) is not None:
        rope[_ORIGINAL] = filled[_ORIGINAL]  # as in transformers, it has priority
    if kind == "linear":
        flags["rotary-seq-len-interpolation-factor"] = _whole(rope, "factor")
    elif kind == "llama3":
        for key, value in _LLAMA3.items():
            if (found := rope.pop(key, None)) != value:
                raise DataError(f"{key} of rope_type llama3 is {shown(found)}, expected {value}")
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": _number(rope, "factor", least=1)}
    elif kind == "yarn":
        rope.setdefault(_ORIGINAL, filled["max_position_embeddings"])
        flags |= _yarn(rope)
    elif kind != "default":
        known = "default, linear, llama3 or yarn"
        raise DataError(f"rope_type {shown(kind)} cannot be trained here; expected {known}")
    if rope:
        raise DataError(f"{', '.join(map(str, rope))} of rope_type {kind} cannot be trained here")


def _yarn(rope: _Fields) -> dict[str, Any]:
    """The flags of YaRN, whose fields are taken out of ``rope``."""
    factor, original = _number(rope, "factor", least=1), _whole(rope, _ORIGINAL)
    fast, slow = (_number(rope, f"beta_{n}", d) or d for n, d in (("fast", 32.0), ("slow", 1.0)))
    if fast <= slow:
        raise DataError(f"beta_fast of rope_type yarn is {fast:g}, expected more than {slow:g}")
    flags: dict[str, Any] = {
        "position-embedding-type": "yarn",
        "rotary-scaling-factor": factor,
        "yarn-original-max-position-embeddings": original,
        "yarn-beta-fast": fast,
        "yarn-beta-slow": slow,
    }
    # the factor of sine and cosine, by the rules of transformers
    scale, all_dim = (_number(rope, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    wanted = _number(rope, "attention_factor", -1.0)
    if wanted < 0 and scale and all_dim:
        flags |= {"mscale": scale, "mscale-all-dim": all_dim}
    elif wanted >= 0 and factor > 1:
        flags["mscale"] = (wanted - 1) / (0.1 * math.log(factor))
    elif wanted not in (-1, 1):
        raise DataError(f"attention_factor {wanted:g} of rope_type yarn with factor 1: expected 1")
    if not rope.pop("truncate", True):
        flags["no-yarn-correction-range-round-to-int"] = True
    return flags


def _number(rope: _Fields, key: str, default: float | None = None, least: float = 0) -> float:
    """The number of a field, which is taken out of ``rope``."""
    value = rope.pop(key, default)
    if value == default is not None:
        return float(value)
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise DataError(f"{key} is {shown(value)}, expected {least:g} or more")
    return float(value)


def _whole(rope: _Fields, key: str) -> int:
    value = _number(rope, key, least=1)
    if not value.is_integer():
        raise DataError(f"{key} is {value:g}; megatron-core knows whole ones")
    return int(value)


def rotary_fields(args: Any) -> _Fields:
    """The fields of ``config.json`` for a model that was trained with ``args``."""
    scaling: _Fields | None = None
    if args.rotary_seq_len_interpolation_factor:
        factor = float(args.rotary_seq_len_interpolation_factor)
        scaling = {"rope_type": "linear", "factor": factor}
    if args.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": args.rope_scaling_factor, **_LLAMA3}
    if args.position_embedding_type == "yarn":
        factor, both = args.rotary_scaling_factor, (args.mscale, args.mscale_all_dim)
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            _ORIGINAL: args.yarn_original_max_position_embeddings,
            "beta_fast": args.yarn_beta_fast,
            "beta_slow": args.yarn_beta_slow,
            "truncate": args.yarn_correction_range_round_to_int,
        }
        if all(both):
            scaling |= dict(zip(("mscale", "mscale_all_dim"), both, strict=True))
        elif both != (1.0, 0.0):
            above, below = (0.1 * each * math.log(factor) + 1 for each in both)
            scaling["attention_factor"] = above / below
    return {"rope_theta": float(args.rotary_base), "rope_scaling": scaling}
