"""Training from a Hugging Face model to another one, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.preflight import check as preflight
from tests.hf import tiny
from tests.loop.several import train_each


@pytest.mark.slow
def test_training_starts_from_and_ends_with_a_folder(tmp_path: Path) -> None:
    """Both layouts begin with the losses of transformers; a step later they differ from it, and
    the exports agree."""
    source = tiny.make("llama", tmp_path / "source", vocab_size=101)
    words = " ".join(tiny.words(source))
    layouts = {
        "chunks": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--use-dpp",
        "tensor": "--tensor-model-parallel-size 2",
    }
    runs = {
        name: f"{words} --padded-vocab-size 102 --hidden-dropout 0 --attention-dropout 0 "
        f"--lr-decay-style constant --train-iters 2 --load-hf {source} --save DIR/{name}-ours "
        f"--save-interval 2 --save-hf DIR/{name} {layout}"
        for name, layout in layouts.items()
    }
    found = train_each(tmp_path, 2, runs)
    first = [found[name].column("lm loss")[0] for name in runs]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    before = tiny.load(source).state_dict()
    after = [tiny.load(tmp_path / name).state_dict() for name in runs]
    assert before.keys() == after[0].keys() == after[1].keys()
    for name, tensor in before.items():
        assert not torch.equal(tensor, after[0][name]), name
        assert (after[0][name] - after[1][name]).abs().mean() < 1e-3, name


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--save-hf there", "--save-hf there: needs --save"),
        ("--save DIR --save-hf .", "--save-hf .: exists"),
        ("--load-hf nowhere", "nowhere/config.json"),
        ("--load-hf x --use-torch-fsdp2", "--load-hf x does not go with --use-torch-fsdp2"),
    ],
)
def test_bad_flags_are_refused_before_the_start(more: str, said: str, tmp_path: Path) -> None:
    words = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1 "
    words += "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --mock-data "
    words += "--tokenizer-type NullTokenizer --vocab-size 9 --eval-iters 0 "
    words += "--transformer-impl local --save-interval 1 "
    with pytest.raises((ConfigError, DataError)) as error:
        preflight.check("gpt", (words + more.replace("DIR", str(tmp_path))).split(), 1)
    assert said in str(error.value)
