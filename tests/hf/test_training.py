"""Converted models train on ``megatron.training`` as transformers' do, and come back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from megatron.dpp_train import hf
from tests.hf import tiny
from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("train_worker.py")
FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 96 "
    "--lr 1e-3 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --adam-eps 1e-5 "
    "--clip-grad 1 --log-interval 1 --eval-iters 0 --eval-interval 100 "
    "--hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl local --distributed-backend gloo --use-cpu-initialization "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--num-workers 0 --dataloader-type single --ckpt-format torch_dist --no-save-optim"
)
NUMBER = r"([\d.E+-]+)"
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


@dataclass(frozen=True)
class Losses:
    """Loss and gradient norm of each step in a run's log."""

    losses: list[float]
    norms: list[float]


def train(num_ranks: int, rows: Path, words: str, *, timeout: float = 300) -> Losses:
    """Run a command line on forked ranks; what it logged."""
    arguments = f"{FLAGS} {words} --moe-aux-loss-coeff 0".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWS", str(rows))
        log = run_ranks(WORKER, num_ranks, arguments, timeout, preload="training")
    return Losses(*(
        list(map(float, re.findall(rf"{name}: {NUMBER}", log))) for name in ("lm loss", "grad norm")
    ))  # fmt: skip


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


def compare(folder: Path, rows: Path, name: str, layouts: Sequence[str]) -> None:
    """Train a model in each layout. Those of pipelines have the same numbers, to the last digit."""
    source, ours = folder / name, folder / f"{name}-ours"
    family, more = VARIANTS.get(name, (name, {}))
    more = more if name in ("gpt2", "gpt_oss") else {"vocab_size": 95, **more}
    tiny.make(family, source, **more)
    hf.to_megatron(source, ours)
    losses, norms = plain_loop(source, torch.load(rows))
    of_pipelines = []
    for layout in layouts:
        found = train(2, rows, run_of(source, ours, layout))
        # Megatron's log gives the mean of the first two steps' losses at the second
        assert found.losses[::2] == pytest.approx(losses[::2], rel=1e-6), layout
        assert found.norms == pytest.approx(norms, abs=6e-4), layout
        of_pipelines += [found] if layout in (CHUNKS, DYNAMIC) else []
    assert all(each == of_pipelines[0] for each in of_pipelines)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", DYNAMIC),
        ("gemma3_text", TENSOR),
        ("glm4_moe", EXPERTS),
        ("gpt2", CHUNKS),
        ("gpt_oss", EXPERTS),
        ("granite", CHUNKS),
        ("olmo3", DYNAMIC),
        ("phi3", CHUNKS),
        ("smollm3", CHUNKS),
        ("yarn", CHUNKS),
    ],
)
def test_models_have_the_losses_and_gradients_of_transformers(
    name: str, layout: str, tmp_path: Path, rows: Path
) -> None:
    """One family of each kind. A vocabulary of 95 is padded where two ranks share it."""
    compare(tmp_path, rows, name, [layout])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*tiny.MODELS, *VARIANTS])
def test_every_family_in_every_layout(name: str, tmp_path: Path, rows: Path) -> None:
    alone = [f"{TENSOR} {EXPERTS}", EXPERTS] if name in tiny.SPARSE else [TENSOR]
    compare(tmp_path, rows, name, [CHUNKS, DYNAMIC, *alone])


SAVED = {"llama": TENSOR, "mixtral": EXPERTS}
MORE = {
    "gemma3_text": CHUNKS,
    "glm4_moe": PIPELINE,
    "gpt2": TENSOR,
    "olmo2": TENSOR,
    "gpt_oss": f"{TENSOR} {EXPERTS}",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "layout"),
    [*SAVED.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE.items())],
)
def test_what_megatron_saves_comes_back_bit_by_bit(
    name: str, layout: str, tmp_path: Path, rows: Path
) -> None:
    """A step with a learning rate of 0 leaves the model as it is; a run that goes on in another
    layout finds it. The family is found by the arguments of the run, too."""
    more = {} if name in ("gpt2", "gpt_oss") else {"vocab_size": 95}
    source, ours = tiny.make(name, tmp_path / name, **more), tmp_path / "ours"
    hf.to_megatron(source, ours)
    wanted = load_file(source / "model.safetensors")
    for start, saved, ranks in ((ours, "saved", layout), (tmp_path / "saved", "again", PIPELINE)):
        words = f"--lr 0 --min-lr 0 --save-interval 1 --save {tmp_path / saved}"
        train(2, rows, f"{run_of(source, start, ranks, 1)} {words}")
        hf.to_hf(tmp_path / saved, tmp_path / f"{saved}-like", like=source)
        hf.to_hf(tmp_path / saved, tmp_path / f"{saved}-kept")
    shutil.rmtree(ours / "hf")
    hf.to_hf(tmp_path / "saved", tmp_path / "saved-found")
    for each in ("saved-like", "saved-kept", "saved-found", "again-like", "again-kept"):
        found = load_file(tmp_path / each / "model.safetensors")
        assert found.keys() == wanted.keys(), each
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), each
