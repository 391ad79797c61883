"""The choice of the next token: greedy, or drawn from the likeliest ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.dpp.errors import DataError, require


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rule of the choice.

    Args:
        temperature: divides logits; 0 takes the likeliest token.
        top_k: draws from this many tokens; 0 from all.
        top_p: draws from the likeliest tokens that together reach this probability.
        seed: of the draws, with the number of the prompt.

    Raises:
        ConfigError: a value that means nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        finite = 0 <= self.temperature < math.inf
        require(finite, f"--temperature {self.temperature:g}: must be finite and not below 0")
        require(self.top_k >= 0, f"--top-k {self.top_k}: must not be below 0")
        require(0 < self.top_p <= 1, f"--top-p {self.top_p:g}: must be above 0 and at most 1")
        if not self.temperature:
            drawn = self.top_k or self.top_p < 1
            require(not drawn, "--top-k and --top-p need a --temperature above 0")


class Chooser:
    """Chooses tokens for prompts. Each prompt has draws of its own, so that its tokens depend on
    the seed and its number alone.

    Args:
        numbers: of the prompts.
    """

    def __init__(self, sampling: Sampling, numbers: Sequence[int]) -> None:
        self._sampling = sampling
        self._draws = {number: random.Random(f"{sampling.seed} {number}") for number in numbers}

    def choose(self, logits: torch.Tensor, numbers: Sequence[int]) -> list[int]:
        """A token for each row of the logits, which are fp32 [prompts, vocabulary].

        Raises:
            DataError: a logit is no number.
        """
        if bool(logits.isnan().any()):
            raise DataError("the model's logits are no numbers (NaN): its weights are broken")
        if not self._sampling.temperature:
            found: list[int] = logits.argmax(-1).tolist()
            return found
        draws = torch.tensor([self._draws[number].random() for number in numbers])
        return self._drawn(logits, draws.to(logits.device, torch.float64))

    def _drawn(self, logits: torch.Tensor, draws: torch.Tensor) -> list[int]:
        """The tokens where the sum of the probabilities, the likeliest first, reaches ``draws``."""
        rule = self._sampling
        ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
        if rule.top_k:
            ordered, tokens = ordered[:, : rule.top_k], tokens[:, : rule.top_k]
        likely = ((ordered - ordered[:, :1]) / rule.temperature).softmax(-1)
        sums = likely.cumsum(-1)
        sums = (likely * (sums - likely < rule.top_p)).cumsum(-1)
        place = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)
        # Behind the last token with a probability all sums are equal.
        last = (sums < sums[:, -1:]).sum(-1, keepdim=True)
        found: list[int] = tokens.gather(-1, torch.minimum(place, last))[:, 0].tolist()
        return found
