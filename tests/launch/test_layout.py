"""Layouts that ``train`` accepts, and the nearest to one that it refuses."""

from __future__ import annotations

import itertools

import pytest

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.launch.layout import Divisible, Layout, nearest_layout, possible_layouts
from tests.launch.test_train import args_of


def test_nearest_layout_is_possible_and_near() -> None:
    for tensor, pipeline in itertools.product(range(1, 9), repeat=2):
        asked = Layout(tensor=tensor, pipeline=pipeline)
        model = Divisible(num_layers=24, num_heads=16)
        near = nearest_layout(asked, 8, model)
        possible = list(possible_layouts(8, model))
        assert near in possible
        assert near == asked or asked not in possible


def test_experts_and_sequences_are_dealt_out() -> None:
    args = args_of("--mode 3d --procs 4 --pp 2 --ep 2 --model sample-experts")
    assert (args.expert_model_parallel_size, args.data_parallel, args.use_dpp) == (2, 2, True)
    args = args_of("--mode 3d --procs 8 --tp 2 --pp 2 --ep 4 --model sample-experts")
    assert (args.expert_tensor_parallel_size, args.sequence_parallel) == (1, True)
    assert args_of("--mode 3d --procs 4 --cp 2").context_parallel_size == 2
    for words, said in {
        "--procs 4 --ep 2": "expert parallelism needs --num-experts",
        "--procs 6 --ep 3 --model sample-experts": "4 experts cannot be divided by 3",
        "--procs 2 --ep 4 --model sample-experts": "2 ranks of a stage cannot be divided by 4",
        "--procs 4 --pp 2 --cp 4": "1 x 2 x 4 = 8 does not divide 4 ranks",
    }.items():
        with pytest.raises(ConfigError, match=said):
            args_of(f"--mode 3d {words}")
