"""Conversion of an 8B-shaped model there and back: speed, memory, and a comparison of all bits.

A folder with random weights in bf16 is made once and stays in the page cache if that has room. The
commands run as they are, in processes of their own. A table comes last.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import sys
import time
from pathlib import Path

import harness
import numpy as np
import torch
from safetensors import safe_open

from megatron.dpp_train.hf import HfConfig, entries
from megatron.dpp_train.hf.fields import CONFIG, parse_config
from megatron.dpp_train.hf.folder import Shards
from megatron.dpp_train.hf.weights import find_weights

SHARD_BYTES = 5 * 10**9
SAMPLE_SECONDS = 0.005
LLAMA3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
_WIDTHS = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")


def scaled(scale: float) -> HfConfig:
    """The model with about ``scale`` times the bytes: all widths shrink alike."""
    content = dict(LLAMA3_8B)
    for name in _WIDTHS:
        content[name] = max(2, 2 * round(LLAMA3_8B[name] * math.sqrt(scale) / 2))  # type: ignore[operator]
    return parse_config(content, "the scaled model")


def make(config: HfConfig, folder: Path, shard_bytes: int) -> None:
    """Write a folder of random weights; all values are finite."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config.content), encoding="utf-8")
    parts = [part for each in entries(config.family, config.sizes) for part in each.parts]
    random = np.random.default_rng(1)
    shapes = {part.name: part.shape for part in parts}
    with Shards(folder, shapes, torch.bfloat16, shard_bytes) as shards:
        for part in parts:
            count = math.prod(part.shape)
            words = random.integers(0, 2**64, -(-count // 4), dtype=np.uint64)
            words &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)  # no exponent of infinity
            flat = torch.from_numpy(words.view(np.int16)[:count])
            shards.add(part.name, flat.view(torch.bfloat16).reshape(part.shape))
        shards.finish()


def convert(*words: str | Path) -> harness.Ran:
    """Run ``megatron-dpp convert`` and sample its memory."""
    command = [sys.executable, "-m", "megatron.dpp", "convert", *map(str, words)]
    return harness.run_sampled(command, SAMPLE_SECONDS)


def compare(one: Path, other: Path) -> int:
    """Compare all tensors bit by bit; their number."""
    here, there = find_weights(one), find_weights(other)
    assert here.keys() == there.keys(), here.keys() ^ there.keys()
    for name, file in here.items():
        with safe_open(file, "pt") as first, safe_open(there[name], "pt") as second:
            same = [each.get_tensor(name).view(torch.int16) for each in (first, second)]
        assert torch.equal(*same), name
    return len(here)


def measure(folder: Path, scale: float) -> None:
    """Convert there and back, compare, and print the table."""
    shard = round(SHARD_BYTES * scale)
    source, ours, back = folder / "source", folder / "megatron", folder / "back"
    make(scaled(1e-5), folder / "least", SHARD_BYTES)
    least = [
        convert(folder / "least", folder / "least-ours"),
        convert(folder / "least-ours", folder / "least-back"),
    ]
    if not source.is_dir():
        make(scaled(scale), source, shard)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    ran = [
        convert(source, ours),
        convert(ours, back, "--shard-size", f"{shard / 10**9:.6g}"),
    ]
    number = compare(source, back)
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}, "
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads\n"
        f"{size / 10**9:.2f} GB in {len(list(source.glob('*.safetensors')))} files of at most "
        f"{shard / 10**9:g} GB; {number} tensors equal bit by bit\n"
        f"above: compared with a model of a few kB. Memory is sampled every {SAMPLE_SECONDS} s"
    )
    rows = []
    for name, each, base in zip(("to Megatron", "to Hugging Face"), ran, least, strict=True):
        above, seconds = each.anonymous - base.anonymous, each.seconds - base.seconds
        rows.append(
            (name, f"{each.seconds:.1f}", f"{seconds:.1f}", f"{size / 10**6 / seconds:.0f}",
             f"{above / 10**9:.2f}", f"{above / shard:.2f}", f"{each.resident / 10**9:.2f}")
        )  # fmt: skip
    harness.print_table(
        "conversion | s | s above | MB/s of these | anonymous memory above, GB | in shards | "
        "resident with mapped files, GB",
        rows,
    )


def main() -> None:
    parser = harness.new_parser(
        __doc__, scale=(1.0, "share of the bytes of 8B"), keep=(False, "keep the directory")
    )
    parser.add_argument("folder", type=Path, help="directory to make, with room for three models")
    args = parser.parse_args()
    if not 0 < args.scale <= 1:
        parser.error(f"--scale {args.scale}: must be above 0 and at most 1")
    if args.folder.exists():
        parser.error(f"{args.folder}: exists; name another directory")
    args.folder.mkdir(parents=True)
    try:
        measure(args.folder.absolute(), args.scale)
    finally:
        if not args.keep:
            shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
