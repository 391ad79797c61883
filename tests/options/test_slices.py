"""Slices are refused with what they cannot do, before a run starts."""

from __future__ import annotations

import re

import pytest

from megatron.dpp.errors import BAD_USAGE, ConfigError
from megatron.dpp_train.launch.estimate_command import main as estimate
from megatron.dpp_train.options.arguments import parse_args, warnings_of
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate import validate

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8192 --vocab-size 100 "
    "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --train-iters 1 --eval-iters 0 --transformer-impl local "
    "--device cpu --position-embedding-type rope --disable-bias-linear --no-bias-gelu-fusion "
)
FIXED, CHATS = "--mock-data ", "--sft --data-path x "
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall "
PIPELINE = "--use-dpp --pipeline-model-parallel-size 2 "


def checked(more: str, world: int = 4, slices: str = "4096") -> RunConfig:
    """The settings of a run in slices, checked."""
    return validate(parse_args(f"{MODEL} --dpp-slice-tokens {slices} {more}".split()), world)


def test_the_trainer_cuts_sequences_of_unlike_length_alone() -> None:
    assert checked(PIPELINE + CHATS).slice_tokens == 4096
    assert checked(PIPELINE + CHATS, slices="auto").slice_tokens == 0
    assert checked(PIPELINE + CHATS, slices="off").slice_tokens is None
    for more in (PIPELINE + FIXED, CHATS):
        assert checked(more).slice_tokens is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (FIXED + "--context-parallel-size 2", "with --context-parallel-size 2: keys would cross"),
        (FIXED + "--mtp-num-layers 1", "--mtp-num-layers 1: it predicts tokens of the next slice"),
        (FIXED + "--fine-grained-activation-offloading", "--fine-grained-activation-offloading"),
        (FIXED + "--reset-attention-mask", "--reset-attention-mask: a slice attends to all keys"),
        (FIXED + "--window-size 8,0", "--window-size 8,0: a slice attends to all keys"),
        (FIXED + "--softmax-type learnable", "--softmax-type learnable: the kernels of slices"),
        (FIXED + "--qk-clip", "--qk-clip: it reads the scores"),
        (FIXED + "--fp8-dot-product-attention", "--fp8-dot-product-attention: keys of earlier"),
        (FIXED + "--fp8-multi-head-attention", "--fp8-multi-head-attention: keys of earlier"),
        (FIXED + "--experimental-attention-variant gated_delta_net",
         "--experimental-attention-variant gated_delta_net: its attention is not plain"),
        (FIXED + "--multi-latent-attention", "--multi-latent-attention"),
        (FIXED + "--dpp-cuda-graphs on", "--dpp-cuda-graphs on: keys grow"),
        (FIXED + EXPERTS + "--moe-router-load-balancing-type seq_aux_loss",
         "--moe-router-load-balancing-type seq_aux_loss, which needs all slices"),
        (FIXED + EXPERTS + "--moe-router-load-balancing-type global_aux_loss",
         "--moe-router-load-balancing-type global_aux_loss, which needs all slices"),
        (CHATS + EXPERTS + "--expert-model-parallel-size 2",
         "--expert-model-parallel-size 2 over replicas of unlike lengths"),
        (CHATS + "--micro-batch-size 2", "--micro-batch-size 2: a sequence that is cut"),
        (CHATS + "--packing even --packing-budget 9000", "--packing-budget: rows of packed"),
        (CHATS + "--dpp-length-buckets geometric", "--dpp-length-buckets geometric"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_slices_is_refused(more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        checked(PIPELINE + more)


def test_slices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="4096 needs the dynamic schedule: static ones run whole"):
        checked("--pipeline-model-parallel-size 2 " + FIXED)
    with pytest.raises(ConfigError, match="slices of 1000 tokens: expected a multiple of 64"):
        checked(PIPELINE + CHATS, slices="1000")
    tensor = "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 8184 "
    assert checked(PIPELINE + CHATS + tensor, world=8).slice_tokens == 4096


@pytest.mark.parametrize(
    "more",
    [
        FIXED + EXPERTS + "--expert-model-parallel-size 2",
        CHATS + EXPERTS,
        FIXED + "--tensor-model-parallel-size 2 --sequence-parallel",
        CHATS + "--use-distributed-optimizer",
        FIXED + "--num-virtual-stages-per-pipeline-rank 2",
        *(FIXED + f"--recompute-granularity {how}" for how in (
            "selective", "full --recompute-method uniform --recompute-num-layers 1")),
    ],
)  # fmt: skip
def test_what_goes_with_slices_is_not_refused(more: str) -> None:
    assert checked(PIPELINE + more).dpp_slice_tokens == "4096"


def test_a_capacity_of_experts_is_that_of_a_slice_and_said_so() -> None:
    more = PIPELINE + FIXED + EXPERTS + "--moe-expert-capacity-factor 1.5"
    (said,) = warnings_of(checked(more))
    assert said.startswith("--moe-expert-capacity-factor 1.5 counts the tokens of a slice with")
    assert warnings_of(checked(more, slices="off")) == []


def estimated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    model = ["--ranks", "2", "--model", "sample", "--seq-length", "512", *words]
    assert estimate(model) == 0
    return capsys.readouterr().out


def test_an_estimate_counts_slices(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["--pipeline-model-parallel-size", "2", "--use-dpp", "--dpp-slice-tokens"]
    cut = estimated(capsys, *pipeline, "128")
    assert "\nslices        4 of 128 tokens; shorter sequences than 512" in cut
    assert " keys  backward" in cut and "of one slice at a time" in cut
    whole = estimated(capsys, *pipeline, "384")
    assert "\nslices        none: 512 tokens are not cut" in whole and "keys" not in whole
    alone = estimated(capsys, "--dpp-slice-tokens", "128")
    assert "\nslices        none: without a dynamic pipeline" in alone


def test_bert_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Its dry run passed, and its ranks ended."""
    words = ["--arch", "bert", "--model", "sample", "--dpp-slice-tokens", "64"]
    assert estimate(words) == BAD_USAGE
    assert "--dpp-slice-tokens: only for GPT" in capsys.readouterr().err
