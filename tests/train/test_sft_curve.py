"""Fine-tuning on chats has the losses of a plain loop over transformers' model, which are TRL's."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.test_batches import LENGTHS, dataset, write_chats
from tests.hf import tiny
from tests.train.runs import train

pytestmark = [
    pytest.mark.skipif(
        sys.version_info < (3, 12), reason="megatron-core has its training loop for Python 3.12 on"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
STEPS, BATCH, WIDTH = 8, 8, 32
FLAGS = (
    f"--train-iters {STEPS} --global-batch-size {BATCH} --seq-length {WIDTH} --lr 1e-3 "
    "--lr-decay-style constant --weight-decay 0 --adam-beta2 0.999 --adam-eps 1e-8 --clip-grad 1 "
    "--calculate-per-token-loss --hidden-dropout 0 --attention-dropout 0 --transformer-impl local "
    "--distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --log-interval 1 "
    "--eval-iters 0 --split 1,0,0 --seed 1 --tokenizer-type NullTokenizer --vocab-size 96 "
    "--finetune --overlong cut --max-position-embeddings 64"
)
RUNS = {
    "as they are": (1, "--rows as-they-are --micro-batch-size 1"),
    "packed": (1, "--rows packed --micro-batch-size 4"),
    "as they are, PP2": (
        2,
        "--rows as-they-are --micro-batch-size 2 --pipeline-model-parallel-size 2 --use-dpp "
        "--dpp-strict",
    ),
    "packed, PP2": (
        2,
        "--rows packed --micro-batch-size 2 --pipeline-model-parallel-size 2 --use-dpp "
        "--dpp-strict",
    ),
}


def losses_of_theirs(folder: Path, chats: str) -> list[float]:
    """Each chat by itself; a token's weight is one over the answer tokens of its batch."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-8, weight_decay=0)
    data = dataset(chats, samples=STEPS * BATCH)
    found = []
    for first in range(0, STEPS * BATCH, BATCH):
        samples = [data[number] for number in range(first, first + BATCH)]
        count = sum(sample["mask"].sum() for sample in samples)
        total = 0.0
        for sample in samples:
            ids = torch.from_numpy(sample["tokens"])
            logits = model(ids[None, :-1]).logits[0]
            each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            loss = (each * torch.from_numpy(sample["mask"])).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def test_the_curve_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.dpp_train.hf import flags_of, to_megatron

    folder = tiny.make("llama", tmp_path / "llama", vocab_size=100, max_position_embeddings=64)
    to_megatron(folder, tmp_path / "start")
    chats = write_chats(tmp_path / "x", list(itertools.islice(itertools.cycle(LENGTHS), 80)))
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")  # megatron-core warns where it finds none
        theirs = losses_of_theirs(folder, chats)
    model = f"{FLAGS} {' '.join(flags_of(folder))} --load {tmp_path / 'start'}"
    (tmp_path / "runs").mkdir()
    for name, (ranks, flags) in RUNS.items():
        run = train(tmp_path / "runs", ranks, model, f"--data-path {chats}", flags)
        assert run.column("loss") == pytest.approx(theirs, rel=3e-7), name
        most = max(abs(a / b - 1) for a, b in zip(run.column("loss"), theirs, strict=True))
        print(f"{name}: {most:.1e} of the loss")
