"""The modes of ``train``: from its options to Megatron's flags."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost import Devices, choose
from megatron.dpp_train.presets.checks import nearest_multiple
from megatron.dpp_train.presets.flags import Flags, model_flags, number, read_flags, shared
from megatron.dpp_train.presets.options import CHUNKS, CONTEXT, EXPERT, PIPELINE, TENSOR

_HALF = ("--fp16", "--bf16")
_RECOMPUTE: dict[str | None, Flags] = {
    "full": {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": 1,
    },
    "selective": {"--recompute-granularity": "selective"},
}


def base_flags(options: argparse.Namespace, given: Flags, devices: Devices) -> Flags:
    """Model, batch and precision: everything but the layout. ``--config`` wins over ``--model``,
    the command line over both.

    Raises:
        ConfigError: a model that is not known.
        DataError: a file that is not there.
    """
    name = options.model or options.load_hf or ("small" if devices.on_gpu else "sample")
    flags = read_flags(shared("configs") / "train.yaml") | model_flags(name)
    if options.arch == "bert":
        flags["--seq-length"] = min(512, number(flags, "--seq-length"))
    own = (read_flags(Path(options.config)) if options.config else {}) | given
    flags |= own | _heads(own)
    if "--train-samples" in own and "--train-iters" not in own:
        del flags["--train-iters"]
    flags |= _precision(options, flags, devices)
    return _derived(flags) | _RECOMPUTE.get(options.recompute, {})


def _heads(own: Mapping[str, Any]) -> Flags:
    """Attention heads of a width that is given without them: 64 wide, from 2048 on 128.

    >>> _heads({"--hidden-size": 1024})
    {'--num-attention-heads': 16}
    """
    if "--hidden-size" not in own or {"--num-attention-heads", "--kv-channels"} & set(own):
        return {}
    hidden = number(own, "--hidden-size")
    width = 128 if hidden >= 2048 and hidden % 128 == 0 else 64
    return {} if hidden % width or hidden < 256 else {"--num-attention-heads": hidden // width}


def _precision(options: argparse.Namespace, flags: Flags, devices: Devices) -> Flags:
    """As asked for, else on GPUs the 16-bit format that they support."""
    asked = [name for name in _HALF if name in flags]
    if options.fp32:
        if asked:
            raise ConfigError(f"--fp32 and {asked[0]} exclude each other")
        return {}
    if not asked and devices.on_gpu:
        asked = ["--bf16" if devices.device.bf16 else "--fp16"]
    scale: Flags = {"--initial-loss-scale": 65536} if asked == ["--fp16"] else {}
    return dict.fromkeys(asked, True) | {k: v for k, v in scale.items() if k not in flags}


def _derived(flags: Flags) -> Flags:
    """Flags that follow from others and are not given."""
    flags.setdefault("--max-position-embeddings", flags["--seq-length"])
    try:
        flags.setdefault("--min-lr", float(Decimal(str(flags["--lr"])) / 10))
    except ArithmeticError:
        raise ConfigError(f"--lr {flags['--lr']}: expected a number") from None
    unit = "samples" if "--train-samples" in flags else "iters"
    flags.setdefault(f"--lr-decay-{unit}", flags[f"--train-{unit}"])
    return flags


def add_layout(
    options: argparse.Namespace, flags: Flags, devices: Devices
) -> tuple[Flags, list[str]]:
    """The flags with a layout and a batch that fits it, and lines about the choice.

    Raises:
        ConfigError: nothing fits the devices, or the batch does not divide.
    """
    lines: list[str] = []
    if options.mode == "auto":
        static = {"--use-dpp": False} if options.no_dpp else {}
        choice = choose(flags | static, devices, arch=options.arch)
        flags, lines = flags | choice.flags, choice.lines
    sizes = {TENSOR, PIPELINE, CHUNKS, CONTEXT, EXPERT}
    if options.mode == "3d" and not sizes & set(flags) and devices.number % 2 == 0:
        flags[PIPELINE] = 2
    dynamic = options.mode in ("3d", "simple") and not options.no_dpp
    if dynamic and number(flags, PIPELINE) > 1:
        flags["--use-dpp"] = True
    if options.mode == "zero":
        flags |= _shards(options)
    tensor = number(flags, TENSOR)
    if tensor > 1 and "--num-experts" in flags:
        flags["--sequence-parallel"] = True  # megatron-core asks for it
    if "--padded-vocab-size" not in flags and 1024 % tensor == 0:  # as large in every layout
        flags.setdefault("--make-vocab-size-divisible-by", 1024 // tensor)
    return flags | _batch(options, flags, devices), lines


_SHARDS: dict[int, Flags] = {
    0: {},
    1: {"--use-distributed-optimizer": True},
    2: {"--use-torch-fsdp2": True, "--torch-fsdp2-no-reshard-after-forward": True},
    3: {"--use-torch-fsdp2": True},
}
"""ZeRO's stage -> flags: replicas share optimizer state, gradients, parameters."""
_FSDP2: Flags = {
    "--no-gradient-accumulation-fusion": True,
    "--untie-embeddings-and-output-weights": True,
}


def _shards(options: argparse.Namespace) -> Flags:
    """Flags of the states that replicas share in mode ``deepspeed``."""
    stage = 1 if options.zero_stage is None else options.zero_stage
    if options.engine != "deepspeed":
        return _SHARDS[stage] | (_FSDP2 if stage > 1 else {})
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "--engine deepspeed: DeepSpeed is not installed (DS_BUILD_OPS=0 pip install "
            "deepspeed); --engine megatron shards the same state"
        )
    return {"--deepspeed-zero-stage": max(1, stage)}


def replicas_of(flags: Flags, devices: Devices) -> int:
    """Data-parallel replicas."""
    sizes = (number(flags, name) for name in (TENSOR, PIPELINE, CONTEXT))
    return devices.number // math.prod(sizes)


def _batch(options: argparse.Namespace, flags: Flags, devices: Devices) -> Flags:
    """Micro-batch and global batch sizes that fit. A size that was not given is adapted."""
    pipeline = number(flags, PIPELINE)
    replicas = max(1, replicas_of(flags, devices))
    static = number(flags, CHUNKS) > 1 and "--use-dpp" not in flags
    unit = replicas * (pipeline if static else 1)
    micro, batch = number(flags, "--micro-batch-size"), number(flags, "--global-batch-size")
    if "--micro-batch-size" not in options.given:
        while micro > 1 and (batch % (micro * unit) or batch // (micro * unit) < pipeline):
            micro -= 1
    if batch % (micro * unit) and "--global-batch-size" not in options.given:
        batch = nearest_multiple(batch, micro * unit)
    return {"--micro-batch-size": micro, "--global-batch-size": batch}


def platform_flags(
    flags: Flags, arch: str, devices: Devices, *, elsewhere: bool
) -> tuple[Flags, str]:
    """Flags that this machine's packages and devices need, and a word about the layers.

    Megatron's defaults are those of Transformer Engine and Apex on NVIDIA's GPUs.

    Args:
        elsewhere: the devices are another machine's, which has Transformer Engine.
    """
    given = flags.get("--transformer-impl")
    engine = (
        devices.on_gpu
        and devices.device.bf16
        and bool({"--bf16", "--fp16"} & set(flags))
        and arch == "gpt"
        and (elsewhere or importlib.util.find_spec("transformer_engine") is not None)
    )
    layers = given or ("transformer_engine" if engine else "local")
    found: Flags = {"--transformer-impl": layers}
    if layers == "local" and (not devices.on_gpu or importlib.util.find_spec("apex") is None):
        found |= {"--no-persist-layer-norm": True, "--no-gradient-accumulation-fusion": True}
        if flags.get("--position-embedding-type") == "rope":
            found["--no-rope-fusion"] = True
    if not devices.on_gpu:
        found["--distributed-backend"] = "gloo"
    return found, f"{'Transformer Engine' if layers != 'local' else 'local'} layers"
