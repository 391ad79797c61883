"""Forms of a model that no flag of Megatron describes, as the value of one flag: ``--hf-forms``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

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


NAMES = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Forms))
"""The forms, as the flag spells them."""
_SWITCHES = ("tanh-gelu", "geglu", "no-input-norms", "output-norms", "qk-norm-over-heads")
_COUNTS = ("tokens", "window-rotary-base")


def parse_forms(text: str | None) -> Forms:
    """The forms in the value of the flag; none in None.

    Raises:
        ConfigError: a name is unknown, or a number is missing or wrong.
    """
    found: dict[str, bool | int | float] = {}
    for word in filter(None, (text or "").split(",")):
        name, equals, value = word.partition("=")
        if name not in NAMES or bool(equals) == (name in _SWITCHES):
            raise ConfigError(
                f"{FLAG} {text}: {shown(word)} is no form: expected "
                f"{', '.join(n if n in _SWITCHES else f'{n}=NUMBER' for n in NAMES)}"
                f"{did_you_mean(name, NAMES)}"
            )
        found[name.replace("-", "_")] = _number(name, value, text) if equals else True
    return Forms(**found)  # type: ignore[arg-type]


def _number(name: str, value: str, text: str | None) -> int | float:
    try:
        number = int(value) if name in _COUNTS else float(value)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise ConfigError(f"{FLAG} {text}: {name} is {shown(value)}, expected a number above 0")
    return number
