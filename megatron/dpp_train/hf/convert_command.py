"""``megatron-dpp convert``: a Hugging Face model to a Megatron checkpoint, and back."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from megatron.dpp.command_line import command, new_parser, progress_bar
from megatron.dpp.errors import DataError, plain
from megatron.dpp.processes import sigint_held_back
from megatron.dpp_train.hf.fields import CONFIG

_DTYPES = ("float32", "bfloat16", "float16")


def _parser(prog: str) -> argparse.ArgumentParser:
    text = (
        "Turn a Hugging Face model into a Megatron checkpoint that any layout loads, or a "
        "checkpoint into a Hugging Face model. SOURCE says which: the former has a config.json."
    )
    parser = new_parser(prog, text, "SOURCE TARGET [options]")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder to read")
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder to make")
    parser.add_argument("--dtype", choices=_DTYPES, help="type of the tensors (default: as is)")
    group = parser.add_argument_group("from a checkpoint")
    group.add_argument(
        "--like", type=Path, metavar="DIR", help="Hugging Face folder of the same model"
    )
    group.add_argument(
        "--family", metavar="NAME", help="kind of model, without --like (default: that which fits)"
    )
    group.add_argument("--step", type=int, metavar="N", help="iteration (default: the latest)")
    group.add_argument(
        "--shard-size", type=float, default=5.0, metavar="GB", help="largest file (default 5)"
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    if not args.source.is_dir():
        raise DataError(f"{args.source}: no such directory")
    if not 0 < args.shard_size < math.inf:
        raise DataError(f"--shard-size {args.shard_size:g}: must be above 0 and finite")
    from_hf = (args.source / CONFIG).is_file()
    for name in ("like", "family", "step"):
        if from_hf and getattr(args, name) is not None:
            raise DataError(f"--{name}: {args.source} is a Hugging Face model, not a checkpoint")
    with sigint_held_back():
        from megatron.dpp_train.hf.convert import to_hf, to_megatron
    start, total = time.monotonic(), 0
    with progress_bar(_bytes_of(args.source)) as bar:

        def progress(done: int) -> None:
            nonlocal total
            total += done
            bar.update(done)

        values: dict[str, Any] = {"dtype": args.dtype}
        if not from_hf:
            values |= {name: getattr(args, name) for name in ("like", "family", "step")}
            values["shard_bytes"] = int(args.shard_size * 10**9)
        convert = to_megatron if from_hf else to_hf
        config = convert(args.source, args.target, progress=progress, **values)
    for note in config.notes:
        print(plain(f"note: {note}"), file=sys.stderr)
    seconds = time.monotonic() - start
    print(f"{args.target}: {total / 10**9:.3f} GB in {seconds:.1f} s")
    if from_hf:
        print(
            f"flags: --load {shlex.quote(str(args.target))} --finetune {shlex.join(config.words())}"
        )
    return 0


def _bytes_of(source: Path) -> int:
    """Bytes of the files that hold tensors, for the progress bar."""
    return sum(
        path.stat().st_size
        for pattern in ("*.safetensors", "*.distcp", "*/*.distcp")
        for path in source.glob(pattern)
    )


main = command("megatron-dpp convert", _parser, _run)
