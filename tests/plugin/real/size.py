"""Sizes of the model and of the rollouts that a run of another project's training code takes."""

from __future__ import annotations

import json
import math
import os
import random
from typing import NamedTuple


class Size(NamedTuple):
    """A Llama and its rollouts. The defaults are those of a comparison on a CPU.

    Args:
        vocabulary: tokens, also those of the tokenizer.
        samples: sequences of a rollout; a global batch has half of them.
        median: tokens of a sequence; the lengths are lognormal with sigma 0.9.
        longest: most tokens of a sequence.
        most: tokens to which the host packs a microbatch.
        rollouts: each has two updates of the policy.
    """

    layers: int = 4
    hidden: int = 64
    vocabulary: int = 128
    samples: int = 16
    median: int = 24
    longest: int = 64
    most: int = 96
    rollouts: int = 2

    @classmethod
    def of_environment(cls) -> Size:
        """That of the variable ``SIZE``, which :meth:`text` wrote."""
        return cls(*json.loads(os.environ.get("SIZE", "[]")))

    def text(self) -> str:
        return json.dumps(self)

    @property
    def heads(self) -> int:
        return max(self.hidden // 128, 4)

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads // 2

    @property
    def ffn(self) -> int:
        return 3 * self.hidden

    @property
    def longest_prompt(self) -> int:
        return self.longest // 4

    def lengths(self, seed: int) -> tuple[list[int], list[int]]:
        """Tokens of the prompts and of the responses of a rollout."""
        draw = random.Random(seed)
        prompts, responses = [], []
        for _ in range(self.samples):
            drawn = draw.lognormvariate(math.log(self.median), 0.9)
            tokens = min(max(round(drawn), 4), self.longest)
            prompts.append(draw.randint(2, max(tokens // 4, 2)))
            responses.append(tokens - prompts[-1])
        return prompts, responses
