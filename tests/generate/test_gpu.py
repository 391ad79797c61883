"""Answers and losses on a GPU are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.dpp_train.generate.by_megatron import megatron_engine
from megatron.dpp_train.generate.losses import Document, total_loss
from tests.generate.test_against_transformers import PROMPTS, answers
from tests.hf import tiny


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:barrier\\(\\)")  # PyTorch's, on one rank without a device_id
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_gpu_answers_as_the_cpu(family: str, tmp_path: Path) -> None:
    """In fp32 token by token; losses in bf16 are near."""
    folder = tiny.make(family, tmp_path / "model")
    found, losses = [], []
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", None)):
        with megatron_engine(folder, vocabulary=96, device=device, dtype=dtype) as engine:
            found.append([each.tokens for each in answers(engine, PROMPTS)])
            documents = [Document(prompt) for prompt in PROMPTS]
            totals = total_loss(engine, documents, window=64, stride=32, batch_size=2)
            losses.append(totals.mean)
    assert "bfloat16" in engine.name
    assert found[1] == found[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=0.05)
    assert [len(each) for each in found[2]] == [len(each) for each in found[0]]
