"""Megatron-core's configurations of a run, by its flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.dpp_train.model import configs
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate import validate

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --device cpu "
    "--max-position-embeddings 8 --transformer-impl local --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --pipeline-model-parallel-size 2"
)


def settled(flags: str = "", data: str = "--mock-data") -> RunConfig:
    """The checked arguments of a run of two ranks."""
    words = f"{FLAGS} {data} {flags}".split()
    return configs.settled(validate(parse_args(words), 2, "gpt"))


@pytest.mark.parametrize(
    ("flag", "field", "usual", "given"),
    [
        ("--accumulate-allreduce-grads-in-fp32 --bf16", "grad_reduce_in_fp32", False, True),
        ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_grad", True, False),
        ("--ddp-average-in-collective", "average_in_collective", False, True),
        ("--ddp-pad-buckets-for-high-nccl-busbw", "pad_buckets_for_high_nccl_busbw", False, True),
        ("--ddp-reduce-scatter-with-fp32-accumulation", "reduce_scatter_with_fp32_accumulation",
         False, True),
        ("--overlap-grad-reduce", "overlap_grad_reduce", False, True),
        ("--use-distributed-optimizer", "use_distributed_optimizer", False, True),
    ],
)  # fmt: skip
def test_gradients_are_reduced_as_the_flags_say(
    flag: str, field: str, usual: bool, given: bool
) -> None:
    assert getattr(configs.ddp_config(settled(), 100), field) is usual
    assert getattr(configs.ddp_config(settled(flag), 100), field) is given


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("", None),
        ("--ddp-bucket-size 7", None),
        ("--overlap-grad-reduce", 40_000_000),
        ("--overlap-grad-reduce --ddp-bucket-size 7", 7),
        ("--overlap-grad-reduce --ddp-num-buckets 4", 25),
    ],
)
def test_buckets_divide_the_parameters_where_reductions_overlap(
    flags: str, size: int | None
) -> None:
    assert configs.ddp_config(settled(flags), 100).bucket_size == size


@pytest.mark.parametrize(
    ("ranks", "context", "size"), [(64, 1, 64_000_000), (1, 64, 64_000_000), (4, 2, 40_000_000)]
)
def test_buckets_grow_with_the_ranks_that_hold_the_same_parameters(
    ranks: int, context: int, size: int
) -> None:
    args = settled("--overlap-grad-reduce").with_(
        data_parallel_size=ranks, context_parallel_size=context
    )
    assert configs.ddp_config(args, 100).bucket_size == size


@pytest.mark.parametrize(
    ("flags", "first", "last"),
    [
        ("", None, None),
        ("--decoder-first-pipeline-num-layers 1", 1, None),
        ("--decoder-last-pipeline-num-layers 1", None, 1),
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1", 3, 1),
    ],
)
def test_the_ends_of_the_pipeline_have_the_layers_that_they_are_given(
    flags: str, first: int | None, last: int | None
) -> None:
    made = configs.transformer_config(settled(flags))
    assert made.num_layers_in_first_pipeline_stage == first
    assert made.num_layers_in_last_pipeline_stage == last


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (10, 5),  # batches of 2, 2, 2 and 4, and one that begins where the samples end
        (12, 5),  # the last batch of the ramp ends behind the samples
        (19, 5),
        (20, 6),
    ],
)
def test_a_ramp_counts_each_of_its_batches_and_whole_ones_alone_behind_it(
    samples: int, expected: int
) -> None:
    flags = f"--train-samples {samples} --rampup-batch-size 2 2 12 --global-batch-size 6"
    words = f"{FLAGS} --mock-data {flags}".replace("--train-iters 1", "").split()
    args = configs.settled(validate(parse_args(words), 2, "gpt"))
    assert args.train_iters == expected


@pytest.mark.parametrize(
    ("flags", "groups"), [("--num-query-groups 1", 2), ("--group-query-attention", 1)]
)
def test_heads_share_keys_only_where_it_is_asked(flags: str, groups: int) -> None:
    assert configs.transformer_config(settled(flags)).num_query_groups == groups


def test_outputs_are_freed_once_they_are_sent() -> None:
    assert configs.transformer_config(settled()).deallocate_pipeline_outputs is True


def test_xavier_initialisation_is_that_of_all_layers() -> None:
    """Else those that end a block begin with smaller weights."""
    xavier = torch.nn.init.xavier_uniform_
    for flags, expected in (("--init-method-xavier-uniform", True), ("", False)):
        made = configs.transformer_config(settled(flags))
        assert (made.init_method is xavier) is (made.output_layer_init_method is xavier) is expected


def test_each_set_has_the_data_of_its_own_flag() -> None:
    paths = {"train": "2 a 3 b", "valid": "1 c", "test": "4 d"}
    data = " ".join(f"--{name}-data-path {words}" for name, words in paths.items())
    values: dict[str, Any] = configs.dataset_values(settled(data=data), None)
    assert values["blend_per_split"] == [(["a", "b"], [2, 3]), (["c"], [1]), (["d"], [4])]
    assert not values["blend"]
