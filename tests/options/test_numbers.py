"""Numbers that no run can mean are refused before it starts, by the setting and its rule."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.options.validate_numbers import check_numbers
from megatron.dpp_train.preflight.files import check_data, check_split

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--eval-iters 0 --transformer-impl local --device cpu --mock-data"
)
TAKEN = [
    "--lr 0", "--adam-eps 0", "--iterations-to-skip 0 2", "--num-workers 0", "--rotary-percent 0.5",
    "--eval-interval 0", "--moe-layer-freq [1,0] --num-experts 4 --disable-bias-linear",
]  # fmt: skip
REFUSED = {
    "--lr nan": "nan: must be finite",
    "--lr inf": "inf: must be finite",
    "--weight-decay inf": "finite",
    "--init-method-std nan": "finite",
    "--moe-aux-loss-coeff nan --num-experts 4": "finite",
    "--adam-eps -1": "-1.0: must be at least 0",
    "--clip-grad -1": "at least 0",
    "--norm-epsilon -1": "at least 0",
    "--rotary-percent 2": "above 0 and at most 1",
    "--rotary-percent nan": "finite",
    "--rotary-base 0": "above 0",
    "--iterations-to-skip 3 -1": "at least 0",
    "--profile-ranks -1": "at least 0",
    "--profile --profile-step-start 5 --profile-step-end 2": "5 is not below --profile-step-end 2",
    "--eval-interval -1": "at least 0",
    "--save-interval -1": "at least 1",
    "--exit-interval 0": "at least 1",
    "--exit-duration-in-mins -1": "above 0",
    "--lr-warmup-iters -1": "at least 0",
    "--lr-decay-style WSD --lr-wsd-decay-iters 9": "9 is above --train-iters 4",
    "--decoupled-lr -1": "above 0",
    "--decoupled-min-lr 5": "needs --decoupled-lr",
    "--sgd-momentum 5": "at least 0 and below 1",
    "--num-workers -1": "at least 0",
    "--tensorboard-log-interval 0": "at least 1",
    "--loss-scale -1 --fp16": "above 0",
    "--window-attn-skip-freq 0 --window-size 8,0": "at least 1",
    "--moe-layer-freq 0 --num-experts 4": "at least 1",
    "--distributed-timeout-minutes 0": "at least 1",
    "--empty-unused-memory-level 9": "0, 1 or 2",
    "--recompute-num-layers -1": "at least 1",
    "--seq-length 99999999999999999999": "at most 16777216",
    "--train-iters 99999999999999999999": "at most 9223372036854775807",
    "--save=": "--save is empty: give a value, or leave it out",
    "--load= --no-load-optim": "--load is empty",
    "--micro-batch-size 0": "--micro-batch-size 0: must be at least 1",
    "--hidden-size 0": "0: must be at least 1",
    "--global-batch-size -4": "at least 1",
    "--make-vocab-size-divisible-by 0": "at least 1",
    "--vocab-size -1": "at least 1",
    "--num-query-groups -1": "at least 1",
    "--expert-model-parallel-size 0": "at least 1",
    "--num-experts 4 --moe-router-topk -1": "at least 1",
    "--embedding-init-method-std -1": "at least 0",
    "--softmax-scale 0": "above 0",
    "--logit-scale -1": "above 0",
    "--use-rope-scaling --rope-scaling-factor 0": "above 0",
}


@pytest.mark.parametrize("words", TAKEN)
def test_numbers_at_the_border_are_taken(words: str) -> None:
    check_numbers(parse_args([*BASE.split(), *words.split()]))


@pytest.mark.parametrize("words", REFUSED)
def test_numbers_that_mean_nothing_are_refused(words: str) -> None:
    """They were taken, and megatron-core or PyTorch met them later, or nothing did."""
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        validate(parse_args([*BASE.split(), *words.split()]), 1)


@pytest.mark.parametrize(
    "split", ["-1,1,0", "nan,1", "inf,1,1", "1;1;0", "1,,1", "1,-1,1", "1e3,1,1", "", "1,1,x"]
)
def test_a_split_of_other_words_than_shares_is_refused(split: str) -> None:
    """A minus sign was left out, so that -1,1,0 trained on half of the documents."""
    with pytest.raises(ConfigError, match=re.escape(f"--split {split}: expected shares")):
        check_split("data", split, 1000)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = str(tmp_path_factory.mktemp("blend") / "a")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(10):
        builder.add_document(torch.arange(40), [40])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("0 A 1 A", "the weight of A is 0; expected a number above 0"),
        ("-1 A 2 A", "the weight of A is -1"),
        ("nan A 1 A", "the weight of A is nan"),
        ("1 A inf A", "the weight of A is inf"),
    ],
)
def test_a_blend_without_weights_that_count_is_refused(prefix: str, words: str, said: str) -> None:
    """It ended behind the start, in an error without a text."""
    given = [prefix if word == "A" else word for word in words.split()]
    args = parse_args(["--split=1,0,0", "--data-path", *given])
    with pytest.raises(ConfigError, match=re.escape(said.replace(" A ", f" {prefix} "))):
        check_data(args, "gpt")
    check_data(parse_args(["--split=1,0,0", "--data-path", "0.3", prefix, "2", prefix]), "gpt")
