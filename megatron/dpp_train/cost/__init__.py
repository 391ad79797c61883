"""Estimates a run of Megatron before it starts, and chooses its layout. Needs no PyTorch.

``flags`` are Megatron's and ``--dpp-*`` flags, as ``{"--num-layers": 24, "--bf16": True}``. Flags
that are not given have Megatron's own defaults; flags that do not matter here are ignored. The
vocabulary is ``--padded-vocab-size``, else ``--vocab-size`` padded as Megatron pads it, else 50,304
words. Sequences that ``--dpp-slice-tokens`` cuts are estimated whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.dpp_train.cost.choose import Search, named, table
from megatron.dpp_train.cost.device import Devices, find_devices, named_devices
from megatron.dpp_train.cost.estimate import estimate, lines
from megatron.dpp_train.cost.flags import Given, shape_of

Flags = Mapping[str, object]

__all__ = ["Choice", "Devices", "Flags", "choose", "describe", "find_devices", "named_devices"]


class Choice(NamedTuple):
    """A layout for a model on given devices.

    Args:
        flags: those to add to the given ones, as ``{"--tensor-model-parallel-size": 2, "--use-dpp":
            True}``.
        lines: a table of the best layouts with their times and memory.
    """

    flags: dict[str, object]
    lines: list[str]


def describe(flags: Flags, devices: Devices, *, arch: str = "gpt") -> list[str]:
    """Lines of text: layout, memory per rank, bubble, traffic and time of an iteration.

    Args:
        arch: ``gpt`` or ``bert``.

    Raises:
        ConfigError: a flag is missing or has a value that is not possible, or sizes do not divide.
    """
    given, on_gpu = Given(flags), devices.on_gpu
    shape = shape_of(given, devices.number, devices.per_node, on_gpu=on_gpu, arch=arch)
    found = lines(estimate(shape, devices.device))
    if given.is_cut:
        found.append("slices      are estimated as whole sequences; they keep less memory")
    return found


def choose(flags: Flags, devices: Devices, *, arch: str = "gpt") -> Choice:
    """The fastest layout that fits: tensor, context, expert and pipeline parallel sizes, virtual
    stages or a planned ``--pipeline-model-parallel-layout``, micro-batch size, recompute,
    ``--use-distributed-optimizer``, ``--sequence-parallel`` and ``--use-dpp``.

    Flags that are given stay as they are; the others are chosen. ``--global-batch-size`` has to be
    given.

    Raises:
        ConfigError: as :func:`describe`; or nothing fits: names the nearest that does.
    """
    given = Given(flags)
    best = Search(given, devices, arch).best()
    return Choice(named(best[0], given), table(best, given, devices))
