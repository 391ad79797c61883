"""Slices are refused with what they cannot do, before a run starts."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch.estimate_command import main as estimate
from megatron.dpp_train.options.validate_slices import check_slices
from megatron.dpp_train.preflight.check import BAD_INPUT


def checked(**changes: Any) -> Any:
    """Settings of a run over chats with slices of 4,096 tokens, checked."""
    usual = {
        "dpp_slice_tokens": "4096", "use_dpp": True, "variable_lengths": True,
        "micro_batch_size": 1, "dpp_length_buckets": "off", "order": "drawn", "num_experts": None,
        "expert_model_parallel_size": 1, "data_parallel_size": 2, "dpp_cuda_graphs": "auto",
        "moe_router_load_balancing_type": "aux_loss", "length_multiple": 4, "given": {},
        "context_parallel_size": 1, "mtp_num_layers": None, "multi_latent_attention": False,
        "window_size": None, "reset_attention_mask": False,
        "pipeline_model_parallel_size": 2, "fine_grained_activation_offloading": False,
    }  # fmt: skip
    args = argparse.Namespace(**usual | changes)
    check_slices(args)  # type: ignore[arg-type]
    return args


def test_the_trainer_cuts_sequences_of_unlike_length_alone() -> None:
    assert checked().slice_tokens == 4096
    assert checked(dpp_slice_tokens="auto").slice_tokens == 0
    alone = {"use_dpp": False, "pipeline_model_parallel_size": 1}
    for changes in ({"variable_lengths": False}, alone, {"dpp_slice_tokens": "off"}):
        assert checked(**changes).slice_tokens is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_parallel_size": 2}, "with --context-parallel-size: keys would cross ranks"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers: it predicts tokens of the next slice"),
        ({"multi_latent_attention": True}, "--multi-latent-attention: its keys"),
        ({"use_dpp": False}, "4096 needs the dynamic schedule: static ones run whole"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading: act"),
        ({"reset_attention_mask": True}, "--reset-attention-mask: a slice attends to all keys"),
        ({"window_size": (8, 0)}, "--window-size: a slice attends to all keys"),
        ({"dpp_cuda_graphs": "on"}, "--dpp-cuda-graphs on: keys grow"),
        ({"num_experts": 4, "moe_router_load_balancing_type": ["seq_aux_loss"]},
         "--moe-router-load-balancing-type seq_aux_loss, which needs all slices"),
        ({"num_experts": 4, "expert_model_parallel_size": 2},
         "--expert-model-parallel-size 2 over replicas of unlike lengths"),
        ({"micro_batch_size": 2}, "--micro-batch-size 2: a sequence that is cut"),
        ({"given": {"packing_budget": "--packing-budget"}}, "--packing-budget: rows of packed"),
        ({"dpp_length_buckets": "geometric"}, "--dpp-length-buckets geometric"),
        ({"order": "planned"}, "--order planned, whose planner knows no slices"),
        ({"dpp_slice_tokens": "1000"}, "slices of 1000 tokens: expected a multiple of 64"),
        ({"length_multiple": 3}, "slices of 4096 tokens: expected a multiple of 192"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_slices_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        checked(**changes)


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
    assert estimate(words) == BAD_INPUT
    assert "--dpp-slice-tokens: only for GPT" in capsys.readouterr().err
