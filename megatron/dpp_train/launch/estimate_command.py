"""``megatron-dpp estimate --ranks 8 [Megatron's flags]``: memory, traffic and time of a run.

    megatron-dpp estimate --ranks 4 --num-layers 24 --hidden-size 1024 \
        --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4 --bf16 \
        --padded-vocab-size 50304 --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.errors import ConfigError, require
from megatron.dpp.naming import flag_name
from megatron.dpp_train.cost.device import Device, find_machine, named_gpu
from megatron.dpp_train.cost.estimate import estimate
from megatron.dpp_train.cost.from_flags import check_format, shape_of
from megatron.dpp_train.cost.text import lines
from megatron.dpp_train.launch.flags import from_argv, model_flags, to_argv
from megatron.dpp_train.launch.layers import default_layers
from megatron.dpp_train.options.arguments import give, parse_args
from megatron.dpp_train.options.layers import LOCAL
from megatron.dpp_train.options.run_config import RunConfig, Settings

_ASSUMED = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0"
"""Defaults of flags that training requires and an estimate hardly depends on."""
_VOCABULARY = 50304


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = new_parser(
        prog,
        "Print memory, traffic, bubble and time of a run before it starts.",
        "[options] [any flag of pretrain_gpt.py]",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of the run")
    parser.add_argument("--per-node", type=int, metavar="N", help="of each node (default: all)")
    parser.add_argument("--model", metavar="M", help="a file of configs/models, or a folder")
    parser.add_argument("--arch", choices=("gpt", "bert"), default="gpt")
    parser.add_argument("--gpu", metavar="NAME", help="H100, H200, ...; default: this machine")
    parser.add_argument("--memory", type=float, metavar="GiB", help="memory of one device")
    parser.add_argument("--tflops", type=float, metavar="T", help="its rate in matrix products")
    text = "of its memory; with --memory and --tflops in the place of --gpu"
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help=text)
    return parser


def _check(known: argparse.Namespace) -> None:
    for name in ("ranks", "per_node", "memory", "tflops", "bandwidth"):
        value = getattr(known, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag_name(name)} {value:g}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class _Target:
    """The devices of an estimate: this machine's, or with ``elsewhere`` those of another one."""

    device: Device
    on_gpu: bool
    elsewhere: bool


def _target(known: argparse.Namespace) -> _Target:
    figures = known.tflops, known.memory, known.bandwidth
    named = named_gpu(known.gpu, *figures)
    if named is not None:
        return _Target(device=named, on_gpu=True, elsewhere=True)
    machine = find_machine(known.ranks)
    return _Target(
        device=machine.device.with_figures(*figures),
        on_gpu=machine.num_gpus > 0,
        elsewhere=False,
    )


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp estimate") -> int:
    """Print the estimate; returns the exit status."""
    known, flags = build_parser(prog).parse_known_args(argv)
    return guarded(prog, lambda: _run(known, flags))


def _run(known: argparse.Namespace, flags: list[str]) -> int:
    _check(known)
    if known.model:
        file = from_argv(flags).get("--family-file")
        flags = [*to_argv(model_flags(known.model, file)), *flags]
    target = _target(known)
    args, layers = _checked(flags, known.ranks, known.arch, target)
    shape = shape_of(args, on_gpu=target.on_gpu, arch=known.arch, per_node=known.per_node)
    print("\n".join([*layers, *lines(estimate(shape, target.device))]))
    return 0


def _checked(
    flags: Sequence[str], ranks: int, arch: str, target: _Target
) -> tuple[RunConfig, list[str]]:
    """The training script's arguments, with ``--dpp-plan`` carried out, and a line about layers
    that nobody named."""
    from megatron.dpp_train.cost.planned import take_plan
    from megatron.dpp_train.options.validate import validate
    from megatron.dpp_train.preflight import check as preflight

    args = parse_args([*_ASSUMED.split(), *flags])
    require(args.seq_length, "--seq-length is required")
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    named = (args.data_path, args.train_data_path, args.data_args_path)
    args.mock_data = args.mock_data or not any((*named, args.per_split_data_args_path))
    has_vocabulary = args.vocab_file or args.tokenizer_type
    said = _name_layers(args, arch, target)
    check_format(args, target.device)
    require(
        target.on_gpu or args.transformer_impl == LOCAL,
        f"--transformer-impl {args.transformer_impl}: this machine has no GPU; name those of the "
        "plan by --gpu NAME, or by --tflops, --memory and --bandwidth together",
    )
    checked = validate(args, ranks, arch, elsewhere=target.elsewhere)
    if has_vocabulary:
        checked, _ = preflight.build_vocabulary(checked)
    checked = checked.with_(padded_vocab_size=checked.padded_vocab_size or _VOCABULARY)
    if checked.dpp_plan:
        checked = take_plan(checked)
    if checked.use_dpp:
        preflight.check_schedule(checked, one_node=False)
    return checked, said


def _name_layers(args: Settings, arch: str, target: _Target) -> list[str]:
    """Give ``args`` their layers where nobody names them, as ``train`` does, and on GPUs say so."""
    layers = default_layers(
        args,
        arch,
        on_gpu=target.on_gpu,
        is_ampere=target.device.bf16,
        elsewhere=target.elsewhere,
    )
    if layers is None:
        return []
    give(args, {"--transformer-impl": layers.name})
    return [layers.line()] if target.on_gpu else []
