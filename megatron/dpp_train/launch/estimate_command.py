"""``megatron-dpp estimate --ranks 8 [Megatron's flags]``: memory, traffic and time of a run.

    megatron-dpp estimate --ranks 4 --num-layers 24 --hidden-size 1024 \
        --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4 --bf16 \
        --padded-vocab-size 50304 --tensor-model-parallel-size 2
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from megatron.dpp.command_line import guarded, new_parser
from megatron.dpp.errors import ConfigError, require
from megatron.dpp.naming import flag_name
from megatron.dpp_train.cost.device import Device, find_machine, known_gpu
from megatron.dpp_train.cost.estimate import estimate
from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.text import lines
from megatron.dpp_train.launch.flags import from_argv, model_flags, to_argv
from megatron.dpp_train.options.run_config import RunConfig

_ASSUMED = "--transformer-impl local --micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0"
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
    return parser


def _check(known: argparse.Namespace) -> None:
    for name in ("ranks", "per_node", "memory", "tflops"):
        value = getattr(known, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag_name(name)} {value:g}: must be above 0")


def device_of(
    ranks: int, gpu: str | None, memory: float | None, tflops: float | None
) -> tuple[bool, Device]:
    """``(on_gpu, device)``: this machine's device or the named GPU, with the given figures."""
    if gpu is None:
        machine = find_machine(ranks)
        on_gpu, device = machine.num_gpus > 0, machine.device
    else:
        on_gpu, device = True, known_gpu(gpu)
    return on_gpu, device.with_figures(tflops, memory)


def main(argv: Sequence[str] | None = None, *, prog: str = "megatron-dpp estimate") -> int:
    """Print the estimate; returns the exit status."""
    known, flags = build_parser(prog).parse_known_args(argv)
    return guarded(prog, lambda: _run(known, flags))


def _run(known: argparse.Namespace, flags: list[str]) -> int:
    _check(known)
    if known.model:
        file = from_argv(flags).get("--family-file")
        flags = [*to_argv(model_flags(known.model, file)), *flags]
    args = _checked(flags, known.ranks, known.arch)
    on_gpu, device = device_of(known.ranks, known.gpu, known.memory, known.tflops)
    shape = shape_of(args, on_gpu=on_gpu, arch=known.arch, per_node=known.per_node)
    print("\n".join(lines(estimate(shape, device))))
    return 0


def _checked(flags: Sequence[str], ranks: int, arch: str) -> RunConfig:
    """The training script's arguments, with ``--dpp-plan`` carried out."""
    from megatron.dpp_train.cost.planned import take_plan
    from megatron.dpp_train.options import arguments
    from megatron.dpp_train.options.validate import validate
    from megatron.dpp_train.preflight import check as preflight

    args = arguments.parse_args([*_ASSUMED.split(), *flags])
    require(args.seq_length, "--seq-length is required")
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    named = (args.data_path, args.train_data_path, args.data_args_path)
    args.mock_data = args.mock_data or not any((*named, args.per_split_data_args_path))
    has_vocabulary = args.vocab_file or args.tokenizer_type
    checked = validate(args, ranks, arch)
    if has_vocabulary:
        checked, _ = preflight.build_vocabulary(checked)
    checked = checked.with_(padded_vocab_size=checked.padded_vocab_size or _VOCABULARY)
    if checked.dpp_plan:
        checked = take_plan(checked)
    if checked.use_dpp:
        preflight.check_schedule(checked, one_node=False)
    return checked
