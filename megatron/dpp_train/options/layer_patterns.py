"""Patterns of layers: the stages of a layout string, and the layers that hold experts."""

from __future__ import annotations

import re

from megatron.dpp.errors import require
from megatron.dpp_train.options.run_config import Settings


def layout_stages(text: str) -> list[str]:
    """The parts of each virtual stage of a ``--pipeline-model-parallel-layout``, a letter for each,
    as megatron-core reads it.

    >>> layout_stages("Et*3|(tt|)*2,tL")
    ['Ettt', 'tt', 'tt', 'tL']

    Raises:
        ConfigError: a letter other than E, t, m and L.
    """
    whole = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        whole = re.sub(repeated, lambda found: found[1] * int(found[2]), whole)
    unknown = sorted(set(whole) - set("EtmL|"))
    require(
        not unknown,
        f"--pipeline-model-parallel-layout {text}: {' '.join(unknown)} is none of E (embedding), "
        "t (layer), m (multi-token prediction), L (loss)",
    )
    return whole.split("|")


def layers_with_experts(args: Settings) -> list[int]:
    """1 for each layer that holds experts and 0 for each other one, from checked ``args``."""
    if not args.num_experts:
        return [0] * args.num_layers
    every = args.moe_layer_freq
    if isinstance(every, list):
        return every
    return [int(i % every == 0) for i in range(args.num_layers)]
