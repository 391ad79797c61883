"""Logits of converted models under several layouts, against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp_train.hf.convert_command import main
from tests.hf import tiny
from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("logits_worker.py")
FLAGS = [
    "--seq-length",
    "48",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "90",
    "--mock-data",
    "--skip-train",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--eval-interval",
    "1",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--transformer-impl",
    "local",
    "--device",
    "cpu",
]
LAYOUTS = {
    "one": "",
    "pipeline": "--pipeline-model-parallel-size 2",
    "chunks": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-dpp",
    "tensor": "--tensor-model-parallel-size 2",
    "sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "experts": "--expert-model-parallel-size 2",
    "sequence-experts": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3", {"rope_parameters": _YARN}),
    "yarn-mscale": ("llama", {"rope_parameters": _YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    "yarn-factor": (
        "qwen2",
        {"rope_parameters": _YARN | {"attention_factor": 1.3, "truncate": False, "beta_fast": 8}},
    ),
    "yarn-experts": ("qwen3_moe", {"rope_parameters": _YARN}),
    "linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
}
"""Name -> family and further settings."""
DENSE = tuple(name for name in tiny.MODELS if name not in tiny.SPARSE)


def compare(folder: Path, num_ranks: int, cases: list[tuple[str, str]]) -> None:
    """Convert each family once, run all cases in one start of processes, and compare."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 96, (2, 48))
    torch.save(tokens, folder / "tokens.pt")
    lines, wanted = [], {}
    for family, layout in cases:
        source, ours = folder / family, folder / f"{family}-ours"
        if family not in wanted:
            name, more = VARIANTS.get(family, (family, {}))
            tiny.make(name, source, **more)
            assert main([str(source), str(ours)]) == 0
            with torch.no_grad():
                wanted[family] = tiny.load(source)(tokens).logits
        words = [*tiny.words(source), *FLAGS, "--load", str(ours), *LAYOUTS[layout].split()]
        lines.append([f"{family}-{layout}", words])
    (folder / "cases.json").write_text(json.dumps(lines))
    run_ranks(WORKER, num_ranks, [str(folder / "cases.json")], timeout=150)
    for family, layout in cases:
        found = torch.load(folder / f"{family}-{layout}.pt")
        differences = (found - wanted[family]).abs()
        assert differences.max() < 1e-4, (family, layout)
        assert differences.mean() < 1e-5, (family, layout)


def test_logits_of_chunks_and_of_experts(tmp_path: Path) -> None:
    compare(
        tmp_path,
        2,
        [
            *[
                ("llama", "chunks"),
                ("mixtral", "experts"),
                ("yarn", "chunks"),
                ("linear", "chunks"),
                ("gemma3_text", "chunks"),
                ("gpt_oss", "sequence-experts"),
            ],
        ],
    )


@pytest.mark.slow
def test_logits_of_every_family(tmp_path: Path) -> None:
    compare(tmp_path, 1, [(family, "one") for family in (*DENSE, *tiny.SPARSE, *VARIANTS)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pipeline", "chunks", "tensor", "sequence", "experts", "sequence-experts"]
)
def test_logits_of_every_layout(layout: str, tmp_path: Path) -> None:
    families = {
        "tensor": (*DENSE, "yarn"),
        "sequence": tuple(name for name in tiny.MODELS if name != "gpt_oss"),
        "experts": (*tiny.SPARSE, "yarn-experts"),
        "sequence-experts": ("gpt_oss", "glm4_moe"),
    }
    compare(
        tmp_path, 2, [(family, layout) for family in families.get(layout, (*DENSE, *tiny.SPARSE))]
    )
