"""Forms of a model that no flag of Megatron describes, as the value of one flag: ``--hf-forms``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron.dpp.errors import ConfigError, did_you_mean, shown

FLAG = "--hf-forms"


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The forms of one model. The value of the flag is a list such as
    ``output-norms,embedding-scale=12.0``.

    Args:
        tokens: rows of the vocabulary behind this number pad it, and get no probability.
        tanh_gelu: the MLP's activation is GELU, approximated by tanh, as Megatron's fused one is.
        geglu: the same, as a gate.
        no_input_norms: attention and MLP have no norm in front.
        output_norms: the output of attention and of MLP is normalised before it is added.
        qk_norm_over_heads: queries and keys are normalised over all heads together.
        window_rotary_base: base of the rotary embedding in layers with a window.
        embedding_scale, logit_scale: factors of the embedding and of the logits.
        residual_scale: factor of what attention and MLP add.
        softmax_scale: factor of attention scores; None stands for 1 / sqrt(width of a head).
    """

    tokens: int | None = None
    tanh_gelu: bool = False
    geglu: bool = False
    no_input_norms: bool = False
    output_norms: bool = False
    qk_norm_over_heads: bool = False
    window_rotary_base: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    residual_scale: float = 1.0
    softmax_scale: float | None = None

    @property
    def change_layers(self) -> bool:
        """True if a layer of megatron-core has other modules by these forms."""
        return (
            self.residual_scale != 1.0
            or self.window_rotary_base is not None
            or any((self.no_input_norms, self.output_norms, self.qk_norm_over_heads))
        )

    def __str__(self) -> str:
        words = []
        for field in dataclasses.fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            if value != field.default:
                words.append(name if value is True else f"{name}={value}")
        return ",".join(words)


_KINDS = {f.name.replace("_", "-"): str(f.type).split()[0] for f in dataclasses.fields(Forms)}
NAMES = tuple(_KINDS)
"""The forms, as the flag spells them."""


def parse_forms(text: str | None) -> Forms:
    """The forms in the value of the flag; none in None.

    Raises:
        ConfigError: a name is unknown, or a number is missing or wrong.
    """
    found: dict[str, Any] = {}
    for word in filter(None, (text or "").split(",")):
        name, equals, value = word.partition("=")
        kind = _KINDS.get(name)
        number = True if kind == "bool" and not equals else _number(kind, value)
        if number is None:
            known = ", ".join(n if k == "bool" else f"{n}=NUMBER" for n, k in _KINDS.items())
            raise ConfigError(
                f"{FLAG} {text}: {shown(word)} is no form: expected {known}, with numbers above 0"
                f"{did_you_mean(name, NAMES)}"
            )
        found[name.replace("-", "_")] = number
    return Forms(**found)


def _number(kind: str | None, value: str) -> int | float | None:
    """The number that a form of this kind takes; None for anything else."""
    with contextlib.suppress(ValueError):
        number = {"int": int, "float": float}.get(kind or "", lambda _: 0)(value)
        return number if 0 < number < math.inf else None
    return None
