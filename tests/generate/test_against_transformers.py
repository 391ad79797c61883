"""Answers and losses of tiny random models are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.dpp_train.generate.answers import generate
from megatron.dpp_train.generate.by_megatron import MegatronEngine, megatron_engine
from megatron.dpp_train.generate.by_transformers import TransformersEngine
from megatron.dpp_train.generate.losses import Document, total_loss
from megatron.dpp_train.generate.sampling import Sampling
from tests.hf import tiny

NEW = 32
PROMPTS = [
    torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 1, 9, 3, 20)
]
Open = Callable[[Path], AbstractContextManager[MegatronEngine]]


def opened(folder: Path, **options: Any) -> AbstractContextManager[MegatronEngine]:
    return megatron_engine(folder, vocabulary=96, device="cpu", **options)


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """transformers' own answer."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer


answers = partial(generate, most=NEW // 2, ends=frozenset(), sampling=Sampling(), batch_size=8)


def loss_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="none")


def compare(family: str, folder: Path) -> None:
    tiny.make(family, folder)
    model = tiny.load(folder)
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with opened(folder) as engine:
        assert [each.tokens for each in answers(engine, PROMPTS, most=NEW)] == wanted
        assert [each.tokens for each in answers(engine, PROMPTS, most=NEW, batch_size=2)] == wanted
        documents = [Document([*p, *w]) for p, w in zip(PROMPTS, wanted, strict=True)]
        found = total_loss(engine, documents, window=64, stride=32, batch_size=3)
    losses = torch.cat([loss_of(model, each.ids) for each in documents])
    assert found.tokens == len(losses)
    assert found.mean == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-5)


def test_a_llama(tmp_path: Path) -> None:
    compare("llama", tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in tiny.MODELS if name != "llama"])
def test_every_family(family: str, tmp_path: Path) -> None:
    compare(family, tmp_path / "model")


def test_draws_ends_and_room(tmp_path: Path) -> None:
    """Draws do not depend on the batch; an end leaves no token; positions bound an answer."""
    folder = tiny.make("gpt2", tmp_path / "model")
    drawn = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=3)
    with opened(folder) as engine:
        several = [each.tokens for each in answers(engine, PROMPTS, sampling=drawn)]
        one = [each.tokens for each in answers(engine, PROMPTS, sampling=drawn, batch_size=1)]
        long = next(answers(engine, [[7] * 50]))
        end = several[0][4]
        stopped = list(answers(engine, PROMPTS, sampling=drawn, ends=frozenset([end])))
        short = list(answers(engine, PROMPTS, sampling=drawn, most=1))
    assert several == one
    assert len({tuple(each) for each in several}) == len(PROMPTS)
    assert (len(long.tokens), long.finish) == (64 - 50, "length")
    for whole, cut in zip(several, stopped, strict=True):
        assert cut.tokens == (whole[: whole.index(end)] if end in whole else whole)
        assert cut.finish == ("stop" if end in whole else "length")
    assert [each.tokens for each in short] == [each[:1] for each in several]


def test_the_other_engine_agrees(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "model")
    drawn = Sampling(temperature=1.0, top_p=0.9, seed=1)
    other = TransformersEngine(folder, "cpu", None)
    documents = [Document(prompt) for prompt in PROMPTS]
    losses = partial(total_loss, documents=documents, window=12, stride=5, batch_size=2)
    with opened(folder) as engine:
        for rule in (Sampling(), drawn):
            found = [answers(each, PROMPTS, sampling=rule) for each in (engine, other)]
            ours, theirs = ([answer.tokens for answer in each] for each in found)
            assert ours == theirs
        assert losses(engine).loss == pytest.approx(losses(other).loss, rel=1e-5)
        assert engine.positions == other.positions == 64


def test_strided_windows_have_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "model")
    ids = torch.randint(2, 96, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    model = tiny.load(folder)
    total, done = 0.0, 1
    for begin in range(0, 100, 8):
        end = min(begin + 24, 100)
        total += float(loss_of(model, ids[begin:end])[done - begin - 1 :].sum())
        done = end
        if end == 100:
            break
    with opened(folder) as engine:
        for batch_size in (1, 3):
            found = total_loss(engine, [Document(ids)], window=24, stride=8, batch_size=batch_size)
            assert found.tokens == 99
            assert found.loss == pytest.approx(total, rel=1e-5)


def test_bf16_is_near(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "model")
    document = [Document(PROMPTS[-1])]
    losses = partial(total_loss, documents=document, window=32, stride=16, batch_size=1)
    with opened(folder) as engine:
        exact = losses(engine).mean
    with opened(folder, dtype="bfloat16") as engine:
        assert "bfloat16" in engine.name
        assert losses(engine).mean == pytest.approx(exact, rel=0.03)
