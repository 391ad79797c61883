"""From ``train``'s options to the flags of ``pretrain_gpt.py`` or ``pretrain_bert.py``.

:func:`resolve` defines the modes. Nothing is started here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost.device import Device
from megatron.dpp_train.cost.planned import SHAPES
from megatron.dpp_train.launch.flags import (
    Flags,
    from_argv,
    heads,
    model_flags,
    read_flags,
    resume_flags,
    to_argv,
    whole_flag,
)
from megatron.dpp_train.launch.layers import default_layers
from megatron.dpp_train.launch.layout import Divisible, Layout, check_layout, nearest_multiple
from megatron.dpp_train.options.arguments import give, parse_args
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.options.validate_layout import CUTS, NOT_PLANNED
from megatron.dpp_train.text_files import read_text
from megatron.dpp_train.tokenizers import Tokenizer, build_tokenizer

_DEFAULT_STEPS = 50
_STAGES = ("optimizer", "gradients", "parameters")
"""Sharded state of ZeRO's stages 1 to 3."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run.

    Args:
        per_node: processes of a node, each with its ``device``.
        elsewhere: the devices are those of another machine, for which a plan is made.
        build_tokenizer: builds the tokenizer of the layouts that are tried, once for all.
    """

    per_node: int
    num_nodes: int
    on_gpu: bool
    device: Device
    elsewhere: bool = False
    build_tokenizer: Callable[..., Tokenizer] = field(
        default_factory=lambda: functools.lru_cache(maxsize=1)(build_tokenizer),
        compare=False,
        repr=False,
    )

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.per_node * self.num_nodes

    @property
    def option(self) -> str:
        """The option that sets the number of devices."""
        return "--gpus" if self.on_gpu else "--procs"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A run that can be started: its flags, layout and sharded state; ``notes`` are lines about
    layers that nobody named."""

    arch: str
    flags: Flags
    layout: Layout
    shard: str
    notes: list[str] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        """The flags as words."""
        return to_argv(self.flags)

    @functools.cached_property
    def parsed(self) -> Settings:
        """The flags as the training script's parser reads them."""
        return parse_args(self.argv)

    def give(self, flags: Flags) -> None:
        """Add flags that were found late."""
        self.flags.update(flags)
        give(self.parsed, flags)


def base_flags(options: argparse.Namespace, rest: Sequence[str], devices: Devices) -> Flags:
    """Flags of model, batch and precision, and the given ones: everything but the layout.

    Raises:
        ConfigError: a model or a word that is not known.
        DataError: a file that is not there.
    """
    asked = from_argv(rest)
    name = options.model or asked.get("--load-hf") or ("small" if devices.on_gpu else "sample")
    flags = {**_common(on_gpu=devices.on_gpu), **model_flags(name, asked.get("--family-file"))}
    if options.arch == "bert":
        flags["--seq-length"] = min(512, whole_flag(flags, "--seq-length"))
    file = {}
    if options.config and options.mode != "megatron":
        file = read_flags(Path(options.config))
    given = {
        "--hidden-size": options.hidden_size,
        "--num-layers": options.num_layers,
        "--seq-length": options.seq_length,
        "--global-batch-size": options.batch_size,
        "--micro-batch-size": options.micro_batch_size,
        "--train-iters": options.max_steps,
        "--lr": options.lr,
    }
    spelled = {name: value for name, value in given.items() if value is not None}
    flags |= file | spelled | heads(file | spelled | asked)
    if _asked_precision(options):
        flags = {name: value for name, value in flags.items() if name not in _HALF}
    flags |= _precision(options, flags, devices)
    flags |= asked
    if "--train-samples" in flags and "--train-iters" not in spelled | asked:
        del flags["--train-iters"]
    if options.mode == "megatron" and options.config:
        if options.model:
            raise ConfigError("--model and --config exclude each other in --mode megatron")
        read_text(options.config)  # refuses a file that is no text
        flags = _above_file(options, spelled | asked, devices)
    else:
        _refuse_layout(options.mode, flags)
    return _derived(flags)


_OF_TRAIN = {
    "--tensor-model-parallel-size": ("--mode 3d", "--tp"),
    "--pipeline-model-parallel-size": ("--mode 3d", "--pp"),
    "--num-virtual-stages-per-pipeline-rank": ("--mode 3d", "--chunks"),
    "--use-torch-fsdp2": ("--mode zero", "--zero-stage 3"),
    "--deepspeed-zero-stage": ("--mode zero", "--engine deepspeed --zero-stage"),
}
"""Flags of Megatron that a mode sets -> the mode and option of ``train`` with the same meaning."""
_OF_AUTO = (
    "--use-dpp",
    "--use-distributed-optimizer",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--dpp-plan",
    "--dpp-replay",
    *CUTS,
    "--recompute-granularity",
    "--recompute-activations",
)
"""Flags that other modes accept, and ``auto`` chooses."""


def _refuse_layout(mode: str, flags: Flags) -> None:
    """Refuse flags of a layout that the mode chooses. ``zero`` accepts tensor parallelism,
    ``megatron`` everything."""
    if mode in ("zero", "megatron"):
        return
    for name, (other, option) in _OF_TRAIN.items():
        if name in flags:
            value = "" if flags[name] is True else f" {flags[name]}"
            raise ConfigError(
                f"{name}{value} is not for --mode {mode}; nearest: {other} {option}{value}"
            )
    for name in _OF_AUTO if mode == "auto" else ():
        if name in flags:
            raise ConfigError(f"{name}: --mode auto decides about that; nearest: --mode megatron")


def _common(*, on_gpu: bool) -> Flags:
    return {
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--train-iters": _DEFAULT_STEPS,
        "--weight-decay": 0.1,
        "--adam-beta2": 0.95,
        "--clip-grad": 1.0,
        "--lr-decay-style": "cosine",
        "--lr-warmup-fraction": 0.05,
        "--eval-interval": 1000,
        "--eval-iters": 2,
        "--log-interval": 1,
        "--estimate": True,
        "--device": "cuda" if on_gpu else "cpu",
    } | ({"--log-throughput": True} if on_gpu else {})


def _above_file(options: argparse.Namespace, spelled: Flags, devices: Devices) -> Flags:
    """The flags of a run with Megatron's own file, and those of the command line, which win."""
    if asked := _asked_precision(options):
        file = parse_args(["--yaml-cfg", options.config])
        for name in _HALF:
            if name != asked and getattr(file, name[2:]):
                raise ConfigError(
                    f"{asked}: {options.config} says {name[2:]}, which no flag can undo; change it "
                    f"there, or leave {asked} out"
                )
        spelled |= _precision(options, spelled, devices)
    device = {"--device": "cuda" if devices.on_gpu else "cpu", "--estimate": True}
    return {"--yaml-cfg": options.config} | device | _missing_in(options.config, spelled) | spelled


def _missing_in(config: str, spelled: Flags) -> Flags:
    """Flags that a run needs, for a file that describes a model only, as those of ``configs/``."""
    args = parse_args(to_argv({"--yaml-cfg": config} | spelled))
    flags: Flags = {}
    if args.max_position_embeddings is None and args.seq_length is not None:
        flags["--max-position-embeddings"] = args.seq_length
    if not (args.train_iters or args.train_samples):
        flags["--train-iters"] = _DEFAULT_STEPS
    if args.eval_interval is None and args.eval_iters != 0:
        flags["--eval-interval"] = _common(on_gpu=False)["--eval-interval"]
    return flags


_HALF = ("--fp16", "--bf16")
"""Megatron's flags for another precision than fp32, which has none."""


def _asked_precision(options: argparse.Namespace) -> str | None:
    """``--fp16``, ``--bf16``, ``--fp32`` or none of them."""
    asked = [name for name in (*_HALF, "--fp32") if getattr(options, name[2:])]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} exclude each other")
    return asked[0] if asked else None


def _precision(options: argparse.Namespace, flags: Flags, devices: Devices) -> Flags:
    """Flags of the precision: as asked for, else on GPUs the 16-bit format that they support."""
    asked = _asked_precision(options)
    if asked is None and devices.on_gpu and not set(_HALF) & set(flags):
        asked = "--bf16" if devices.device.bf16 else "--fp16"
    if asked == "--fp16":
        return {"--fp16": True, "--initial-loss-scale": 65536}
    return {"--bf16": True} if asked == "--bf16" else {}


def _derived(flags: Flags) -> Flags:
    """Flags that follow from others and are not given."""
    if "--yaml-cfg" in flags:
        return flags
    flags.setdefault("--max-position-embeddings", flags["--seq-length"])
    try:
        flags.setdefault("--min-lr", float(Decimal(str(flags["--lr"])) / 10))
    except ArithmeticError:
        raise ConfigError(f"--lr {flags['--lr']}: expected a number") from None
    if "--train-samples" in flags:
        flags.setdefault("--lr-decay-samples", flags["--train-samples"])
    else:
        flags.setdefault("--lr-decay-iters", flags["--train-iters"])
    if "--bf16" in flags and flags["--device"] == "cuda":  # it rounds gradients to this format
        flags.setdefault("--cross-entropy-loss-fusion", True)
    if "--create-attention-mask-in-dataloader" not in flags and flags["--device"] == "cuda":
        flags.setdefault("--no-create-attention-mask-in-dataloader", True)
    hidden, heads = whole_flag(flags, "--hidden-size"), whole_flag(flags, "--num-attention-heads")
    if hidden % heads and "--kv-channels" not in flags:
        raise ConfigError(
            f"--hidden-size {hidden} cannot be divided by {heads} attention heads; "
            f"nearest: {nearest_multiple(hidden, heads)}"
        )
    return flags


def resolve(
    options: argparse.Namespace, flags: Flags, devices: Devices, *, layout: Layout, shard: str
) -> Resolved:
    """Add a layout and sharded state to :func:`base_flags`.

    Raises:
        ConfigError: the layout or the batch is not possible; the nearest that is, is named.
    """
    flags = dict(flags)
    if options.mode != "megatron":
        planned = is_planned(options, flags, layout, devices)
        uneven = planned or any(name in flags for name in CUTS)
        model = divisible(flags, uneven=uneven)
        check_layout(layout, devices.world_size, model, devices.option)
        if planned:
            flags["--dpp-plan"] = SHAPES
        by_deepspeed = options.mode == "zero" and options.engine == "deepspeed"
        name = "--padded-vocab-size"
        known = whole_flag(flags, name) if name in flags else None
        flags |= _layout_flags(options, layout, devices, known) | _shard_flags(shard, by_deepspeed)
        if layout.tensor > 1 and "--num-experts" in flags:
            flags["--sequence-parallel"] = True  # megatron-core asks for it
        if by_deepspeed or shard in ("gradients", "parameters"):
            flags.pop("--overlap-grad-reduce", None)  # both do so by themselves
        flags |= _batch(options, flags, devices, layout)
        flags |= _recompute(options.recompute)
        if devices.on_gpu and not by_deepspeed and _replays(options, flags, layout, shard):
            flags.setdefault("--dpp-cuda-graphs", "on")
    if options.save:
        flags["--save"] = options.save
        flags.setdefault("--save-interval", 1000)
    if options.resume_from:
        flags |= resume_flags(options.resume_from)
    found = Resolved(arch=options.arch or "gpt", flags=flags, layout=layout, shard=shard)
    _add_layers(found, devices)
    return found


def _add_layers(found: Resolved, devices: Devices) -> None:
    """Give a run its layers, where nothing names them."""
    layers = default_layers(
        found.parsed,
        found.arch,
        on_gpu=devices.on_gpu,
        is_ampere=devices.device.bf16,
        elsewhere=devices.elsewhere,
    )
    if layers is not None:
        found.give({"--transformer-impl": layers.name})
        found.notes.extend([layers.line()] if devices.on_gpu else [])


def asked_layout(options: argparse.Namespace, flags: Flags) -> Layout:
    """The given layout, in modes other than ``auto``. ``zero`` reads Megatron's flags."""
    if options.mode == "zero":
        names = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
        tensor, pipeline = (whole_flag(flags, name) if name in flags else 1 for name in names)
        return Layout(tensor=tensor, pipeline=pipeline)
    return Layout(
        tensor=options.tp or 1,
        pipeline=options.pp or 1,
        chunks=options.chunks or 1,
        context=options.cp or 1,
        expert=options.ep or 1,
    )


def divisible(flags: Flags, *, uneven: bool) -> Divisible:
    """The sizes of the model that a layout must divide.

    Args:
        uneven: the layers are not cut evenly.
    """
    return Divisible(
        num_layers=0 if uneven else whole_flag(flags, "--num-layers"),
        num_heads=whole_flag(flags, "--num-attention-heads"),
        num_experts=whole_flag(flags, "--num-experts") if "--num-experts" in flags else 0,
    )


def shard_of(options: argparse.Namespace, devices: Devices) -> str:
    """The sharded state of the mode.

    Raises:
        ConfigError: a combination that cannot be.
    """
    if options.mode != "zero":
        return "none"
    if options.zero_stage == 0:
        if options.engine == "deepspeed":
            raise ConfigError(
                "--zero-stage 0 shards nothing, and DeepSpeed's engine always does; nearest: "
                "--zero-stage 1, or --engine megatron"
            )
        return "none"
    needed = options.engine == "deepspeed" and not devices.elsewhere
    if needed and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "--engine deepspeed: DeepSpeed is not installed (DS_BUILD_OPS=0 pip install "
            "deepspeed); nearest possible: --engine megatron, which shards the same state "
            "(stage 1 by megatron-core, 2 and 3 by PyTorch's FSDP2)"
        )
    return _STAGES[(options.zero_stage or 1) - 1]


def _layout_flags(
    options: argparse.Namespace, layout: Layout, devices: Devices, known: int | None
) -> Flags:
    """Flags of a layout; ``known`` is the vocabulary of a model that has its own."""
    flags: Flags = {}
    if layout.tensor > 1:
        flags["--tensor-model-parallel-size"] = layout.tensor
    # The padded vocabulary must not depend on the layout, or losses and checkpoints would.
    if known is not None:
        flags["--padded-vocab-size"] = -(-known // layout.tensor) * layout.tensor
    elif 1024 % layout.tensor == 0:
        flags["--make-vocab-size-divisible-by"] = 1024 // layout.tensor
    if layout.pipeline > 1:
        flags["--pipeline-model-parallel-size"] = layout.pipeline
        if not options.no_dpp:
            flags["--use-dpp"] = True
    if layout.context > 1:
        flags["--context-parallel-size"] = layout.context
    if layout.expert > 1:
        flags["--expert-model-parallel-size"] = layout.expert
        if layout.tensor > 1:  # a tensor-parallel size of experts stays inside of this group
            flags["--expert-tensor-parallel-size"] = 1
    if devices.on_gpu and devices.world_size > layout.tensor * layout.pipeline:
        flags["--overlap-grad-reduce"] = True
    if layout.chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = layout.chunks
    return flags


def forms(resolved: Resolved, devices: Devices) -> list[Resolved]:
    """The same run, and one with sequence parallelism where that is possible.

    It needs less memory, but a layer has ten collectives instead of four: 345M and 1.3B take 5 to
    12 % longer with it on H200s (docs/benchmarks/scaling-h200.md).
    """
    name = "--sequence-parallel"
    if resolved.layout.tensor == 1 or not devices.on_gpu or name in resolved.flags:
        return [resolved]
    return [resolved, dataclasses.replace(resolved, flags=resolved.flags | {name: True})]


def is_planned(options: argparse.Namespace, flags: Flags, layout: Layout, devices: Devices) -> bool:
    """True where GPT's layers are laid out by cost: in dynamic pipelines on GPUs, whose last rank
    has an output layer worth several layers, unless flags say otherwise.
    """
    asked = any(name in flags for name in ("--dpp-plan", *NOT_PLANNED))
    free = options.chunks is None and layout.chunks == 1 and not asked
    dynamic = options.mode in ("3d", "auto") and layout.pipeline > 1 and not options.no_dpp
    return free and dynamic and devices.on_gpu and (options.arch or "gpt") == "gpt"


def _replays(options: argparse.Namespace, flags: Flags, layout: Layout, shard: str) -> bool:
    """True where CUDA graphs pay without a dynamic pipeline. Layers of small models are
    launch-bound, above all tensor-parallel ones. Without a pipeline one activation is in flight, so
    the graphs need no memory of their own.
    """
    recomputes_all = flags.get("--recompute-granularity") == "full"
    wrapped_by_ddp = shard in ("none", "optimizer")
    alone = layout.pipeline == 1 and wrapped_by_ddp and not recomputes_all
    captured = "--num-experts" not in flags and layout.context == 1
    return alone and captured and (options.arch or "gpt") == "gpt"


def _shard_flags(shard: str, by_deepspeed: bool) -> Flags:
    if by_deepspeed:
        return {"--deepspeed-zero-stage": _STAGES.index(shard) + 1}
    return {
        "none": {},
        "optimizer": {"--use-distributed-optimizer": True},
        "gradients": {"--use-torch-fsdp2": True, "--torch-fsdp2-no-reshard-after-forward": True},
        "parameters": {"--use-torch-fsdp2": True},
    }[shard]


def asked_batch(options: argparse.Namespace, rest: Sequence[str]) -> int | None:
    """The given global batch size, under either name, from the command line or a file."""
    name = "--global-batch-size"
    file = read_flags(Path(options.config)) if options.config and options.mode != "megatron" else {}
    own = {} if options.batch_size is None else {name: options.batch_size}
    asked = {**file, **own, **from_argv(rest)}
    return whole_flag(asked, name) if name in asked else None


def _batch(options: Any, flags: Flags, devices: Devices, layout: Layout) -> Flags:
    """Micro-batch and global batch sizes that fit. A size that was not given is adapted."""
    replicas = devices.world_size // layout.replica_size
    micro, batch = whole_flag(flags, "--micro-batch-size"), whole_flag(flags, "--global-batch-size")
    static = layout.chunks > 1 and options.no_dpp
    unit = replicas * (layout.pipeline if static else 1)
    if options.micro_batch_size is None:
        while micro > 1 and (batch % (micro * unit) or batch // (micro * unit) < layout.pipeline):
            micro -= 1
    if batch % (micro * unit) == 0:
        return {"--micro-batch-size": micro, "--global-batch-size": batch}
    near = nearest_multiple(batch, micro * unit)
    if options.batch_size is not None:
        why = f" x {layout.pipeline} stages" if static else ""
        raise ConfigError(
            f"--batch-size {batch} is not a multiple of micro batch {micro} x {replicas} "
            f"replicas{why} = {micro * unit}; nearest possible: {near}"
        )
    return {"--micro-batch-size": micro, "--global-batch-size": near}


def _recompute(kind: str | None) -> Flags:
    if kind == "full":
        return {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": 1,
        }
    return {"--recompute-activations": True} if kind == "selective" else {}
