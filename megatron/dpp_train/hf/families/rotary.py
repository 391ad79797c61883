"""Rotary embeddings: the fields of ``config.json`` that describe one, as flags, and back."""

from __future__ import annotations

import math
from typing import Any

from megatron.dpp.errors import DataError, shown

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Values that megatron-core's scaling of Llama 3 has built in."""
_ORIGINAL = "original_max_position_embeddings"
_SCALED = ("llama3", "yarn")
_Fields = dict[str, Any]


def add_rotary(flags: dict[str, Any], filled: _Fields, where: str) -> None:
    """Add the flags of the rotary embedding.

    Args:
        filled: the fields of ``config.json``, ``rope_theta`` among them.
        where: its name, for errors.

    Raises:
        DataError: no flag says what a field says.
    """
    new, old = filled.get("rope_parameters"), filled.get("rope_scaling")
    if new and old and new != old:
        raise DataError(
            f"{where}: rope_parameters is {shown(new)}, rope_scaling is {shown(old)}; remove one"
        )
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise DataError(f"{where}: rope_parameters is {shown(rope)}, expected an object")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", filled["rope_theta"])
    if not isinstance(theta, int | float) or not float(theta).is_integer() or theta < 1:
        raise DataError(f"{where}: rope_theta is {shown(theta)}, expected a whole number")
    flags["rotary-base"] = int(theta)
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    if kind in _SCALED:
        if filled.get(_ORIGINAL) is not None:  # as in transformers, it has priority
            rope[_ORIGINAL] = filled[_ORIGINAL]
        (_add_llama3 if kind == "llama3" else _add_yarn)(flags, rope, filled, where)
    elif kind == "linear":
        factor = _number(rope, "factor", kind, where, least=1)
        if not factor.is_integer():
            raise DataError(
                f"{where}: factor of rope_type linear is {factor:g}; megatron-core knows whole ones"
            )
        flags["rotary-seq-len-interpolation-factor"] = int(factor)
    elif kind != "default":
        raise DataError(
            f"{where}: rope_type {shown(kind)} cannot be trained here; expected default, linear, "
            f"{' or '.join(_SCALED)}"
        )
    if rope:
        raise DataError(
            f"{where}: {', '.join(map(str, rope))} of rope_type {kind} cannot be trained here"
        )


def _add_llama3(flags: dict[str, Any], rope: _Fields, filled: _Fields, where: str) -> None:
    """Add the flags of llama3's scaling, and take its fields out of ``rope``."""
    for key, value in _LLAMA3.items():
        found = rope.pop(key, None)
        if found != value:
            raise DataError(
                f"{where}: {key} of rope_type llama3 is {shown(found)}; megatron-core knows "
                f"{value} only"
            )
    factor = _number(rope, "factor", "llama3", where, least=1)
    flags |= {"use-rope-scaling": True, "rope-scaling-factor": factor}


def _add_yarn(flags: dict[str, Any], rope: _Fields, filled: _Fields, where: str) -> None:
    """Add the flags of YaRN, and take its fields out of ``rope``."""
    rope.setdefault(_ORIGINAL, filled["max_position_embeddings"])
    original = _number(rope, _ORIGINAL, "yarn", where, least=1)
    factor = _number(rope, "factor", "yarn", where, least=1)
    fast = _number(rope, "beta_fast", "yarn", where, default=32) or 32.0
    slow = _number(rope, "beta_slow", "yarn", where, default=1) or 1.0
    if not original.is_integer():
        raise DataError(f"{where}: {_ORIGINAL} of rope_type yarn is {original}, expected a whole")
    if fast <= slow:
        raise DataError(f"{where}: beta_fast {fast:g} of rope_type yarn is not above {slow:g}")
    flags |= {
        "position-embedding-type": "yarn",
        "rotary-scaling-factor": factor,
        "yarn-original-max-position-embeddings": int(original),
        "yarn-beta-fast": fast,
        "yarn-beta-slow": slow,
        **_attention_scaling(rope, factor, where),
    }
    if not rope.pop("truncate", True):
        flags["no-yarn-correction-range-round-to-int"] = True


def _attention_scaling(rope: _Fields, factor: float, where: str) -> dict[str, float]:
    """The flags of YaRN's factor of sine and cosine, by the rules of transformers."""
    both = [_number(rope, name, "yarn", where, default=0) for name in ("mscale", "mscale_all_dim")]
    wanted = _number(rope, "attention_factor", "yarn", where, default=-1)
    if wanted < 0:
        return {"mscale": both[0], "mscale-all-dim": both[1]} if all(both) else {}
    if factor == 1 and wanted != 1:
        raise DataError(
            f"{where}: attention_factor {wanted:g} of rope_type yarn with factor 1; megatron-core "
            "knows 1 only"
        )
    return {} if factor == 1 else {"mscale": (wanted - 1) / (0.1 * math.log(factor))}


def _number(
    rope: _Fields,
    key: str,
    kind: str,
    where: str,
    *,
    least: float = 0,
    default: float | None = None,
) -> float:
    """The number of a field, which is taken out of ``rope``."""
    value = rope.pop(key, default)
    if value == default and default is not None:
        return float(default)
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise DataError(
            f"{where}: {key} of rope_type {kind} is {shown(value)}, expected {least:g} or more"
        )
    return float(value)


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
