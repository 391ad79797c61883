"""Converted models train on ``megatron.training`` as transformers' do, and come back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from megatron.dpp_train import hf
from tests.hf import tiny
from tests.hf.training import train_each

STEPS, LENGTH = 3, 24
PIPELINE = "--pipeline-model-parallel-size 2"
CHUNKS = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
DYNAMIC = f"{CHUNKS} --use-dpp --dpp-strict"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--expert-model-parallel-size 2"
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3", {"rope_parameters": _YARN}),
    "yarn-factor": ("qwen2", {"rope_parameters": _YARN | {"attention_factor": 1.3}}),
    "linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            }
        },
    ),
}  # fmt: skip
"""Name -> family and further settings."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    torch.manual_seed(2)
    torch.save(torch.randint(0, 95, (8, LENGTH + 1)), tmp_path / "rows.pt")
    return tmp_path / "rows.pt"


def plain_loop(folder: Path, rows: torch.Tensor) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of transformers and PyTorch's AdamW; a step takes four rows."""
    model = tiny.load(folder)  # as for evaluation: without dropout
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), 1e-5, weight_decay=0)
    losses, norms = [], []
    for step in range(STEPS):
        batch = rows[4 * step % 8 :][:4]
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def run_of(folder: Path, ours: Path, layout: str, steps: int = STEPS) -> str:
    ranks = 2 if "--tensor" in layout else 1
    words = " ".join(hf.flags_of(folder, tensor_parallel=ranks))
    return f"{words} --seq-length {LENGTH} --train-iters {steps} --load {ours} --finetune {layout}"


def compare(folder: Path, rows: Path, cases: list[tuple[str, str]]) -> None:
    """Train all cases in one start of processes. A family of several layouts has the same numbers
    in those of pipelines, to the last digit."""
    runs, wanted, of_pipeline = {}, {}, {}
    for name, layout in cases:
        source, ours = folder / name, folder / f"{name}-ours"
        if name not in wanted:
            family, more = VARIANTS.get(name, (name, {}))
            more = more if name in ("gpt2", "gpt_oss") else {"vocab_size": 95, **more}
            tiny.make(family, source, **more)
            hf.to_megatron(source, ours)
            wanted[name] = plain_loop(source, torch.load(rows))
        runs[f"{name} {layout}"] = run_of(source, ours, layout)
    found = train_each(folder, 2, rows, runs, timeout=900)
    for name, layout in cases:
        one = found[f"{name} {layout}"]
        losses, norms = wanted[name]
        # Megatron's log gives the mean of the first two steps' losses at the second
        assert one.losses[::2] == pytest.approx(losses[::2], rel=1e-6), (name, layout)
        assert one.norms == pytest.approx(norms, abs=6e-4), (name, layout)
        if layout in (CHUNKS, DYNAMIC):
            both = of_pipeline.setdefault(name, (one.losses, one.norms))
            assert both == (one.losses, one.norms), name


@pytest.mark.timeout(300)
def test_models_have_the_losses_and_gradients_of_transformers(tmp_path: Path, rows: Path) -> None:
    """A vocabulary of 95 is padded where two ranks share it."""
    cases = [("llama", DYNAMIC), ("gemma3_text", TENSOR), ("glm4_moe", EXPERTS), ("gpt2", CHUNKS)]
    compare(tmp_path, rows, cases)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(4))
def test_every_family_in_every_layout(part: int, tmp_path: Path, rows: Path) -> None:
    cases = []
    for name in [*tiny.MODELS, *VARIANTS][part::4]:
        alone = f"{TENSOR} {EXPERTS}"
        layouts = [CHUNKS, DYNAMIC, *([alone, EXPERTS] if name in tiny.SPARSE else [TENSOR])]
        cases += [(name, layout) for layout in layouts]
    compare(tmp_path, rows, cases)


SAVED = {"llama": TENSOR, "mixtral": EXPERTS}
MORE = {
    "gemma3_text": CHUNKS,
    "glm4_moe": PIPELINE,
    "gpt2": TENSOR,
    "olmo2": TENSOR,
    "gpt_oss": f"{TENSOR} {EXPERTS}",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layouts", [SAVED, pytest.param(MORE, marks=pytest.mark.slow)])
def test_what_megatron_saves_comes_back_bit_by_bit(
    layouts: dict[str, str], tmp_path: Path, rows: Path
) -> None:
    """A step with a learning rate of 0 leaves the model as it is; a run that goes on in another
    layout finds it. The family is found by the arguments of the run, too."""
    still = "--lr 0 --min-lr 0 --save-interval 1 --save"
    runs = {}
    for name, layout in layouts.items():
        more = {} if name in ("gpt2", "gpt_oss") else {"vocab_size": 95}
        source, ours = tiny.make(name, tmp_path / name, **more), tmp_path / f"{name}-ours"
        hf.to_megatron(source, ours)
        runs[name] = f"{run_of(source, ours, layout, 1)} {still} {tmp_path / name}-saved"
    again = run_of(tmp_path / name, tmp_path / f"{name}-saved", PIPELINE, 1)
    runs["again"] = f"{again} {still} {tmp_path / 'again-saved'}"
    train_each(tmp_path, 2, rows, runs, timeout=580)
    for run in runs:
        source, saved = tmp_path / (name if run == "again" else run), tmp_path / f"{run}-saved"
        hf.to_hf(saved, tmp_path / f"{run}-back", like=source)
        hf.to_hf(saved, tmp_path / f"{run}-kept")
        shutil.rmtree(tmp_path / f"{source.name}-ours" / "hf", ignore_errors=True)
        hf.to_hf(saved, tmp_path / f"{run}-found")
        wanted = load_file(source / "model.safetensors")
        for kind in ("back", "kept", "found"):
            found = load_file(tmp_path / f"{run}-{kind}" / "model.safetensors")
            assert found.keys() == wanted.keys(), (run, kind)
            for key in wanted:
                assert torch.equal(found[key], wanted[key]), (run, kind, key)
