"""The layers of a run that ``train`` or a launch script starts, where nothing names them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from megatron.dpp.errors import DppError
from megatron.dpp_train.checkpoint.files import find_start
from megatron.dpp_train.checkpoint.saved_args import saved_args
from megatron.dpp_train.options.layers import Layers, choose_layers
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.text_files import read_mapping


def default_layers(
    args: Settings,
    arch: str,
    *,
    on_gpu: bool,
    is_ampere: bool,
    python: str = sys.executable,
    elsewhere: bool = False,
) -> Layers | None:
    """The layers of a run; None where a flag or its file names them.

    Args:
        args: all parsed flags of the run.
        is_ampere, python, elsewhere: see :func:`choose_layers`.
    """
    if {"transformer_impl", "spec"} & set(args.given) or (
        args.yaml_cfg and _are_named(args.yaml_cfg)
    ):
        return None
    starts = args.load, args.pretrained_checkpoint, args.ckpt_step
    saved = _saved_layers(*starts) if any(starts[:2]) else None
    return choose_layers(
        args,
        arch,
        on_gpu=on_gpu,
        is_ampere=is_ampere,
        saved=saved,
        python=python,
        elsewhere=elsewhere,
    )


def _are_named(file: str) -> bool:
    loaded = read_mapping(Path(file))
    groups = [loaded, *(each for each in loaded.values() if isinstance(each, dict))]
    keys = {str(key).replace("-", "_") for group in groups for key in group}
    return bool({"transformer_impl", "spec"} & keys)


@functools.cache
def _saved_layers(load: str | None, pretrained: str | None, step: int | None) -> str | None:
    """The layers of a checkpoint; None where it is not read. What is wrong with it preflight
    says."""
    start = Settings()
    start.load, start.pretrained_checkpoint, start.ckpt_step = load, pretrained, step
    try:
        found = find_start(start)
        saved = found and saved_args(found)
    except DppError:
        return None
    return getattr(saved, "transformer_impl", None)
