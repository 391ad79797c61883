"""The settings of a run that loaders of sequences take: workers, padding, plans."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.dpp.sim.batches import LengthCosts
from megatron.dpp_train.data import sequences
from megatron.dpp_train.exits import prepare_worker
from tests.data.test_sequences import LENGTHS, chats, dataset

__all__ = ["chats"]

ARGS = {
    "virtual_pipeline_model_parallel_size": None, "use_dpp": True, "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1, "micro_batch_size": 1, "packing": "none",
    "packing_budget": 0, "length_multiple": 4, "length_buckets": (), "order": "planned",
    "slice_tokens": None, "holds_whole": True,
    "seq_length": 8, "global_batch_size": 2, "num_workers": 2, "device": "cpu", "seed": 3,
    "distributed_timeout_minutes": 10,
    "exit_signal_handler": True, "mmap_bin_files": True,
    "dataloader_type": "single", "data_sharding": True,
}  # fmt: skip


class Lengths:
    """A data set of sequences that only have lengths."""

    def __len__(self) -> int:
        return 4

    def length(self, number: int) -> int:
        return 5 + number


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sequences, "length_costs", lambda _: LengthCosts())
    monkeypatch.setattr(sequences.mpu, "get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(sequences, "pipeline_model", lambda args: "model")
    monkeypatch.setattr(sequences, "OrderPlanner", lambda model: f"planner of {model}")
    return argparse.Namespace(**ARGS)


def planner(loader: Any) -> Any:
    return next((value for value in vars(loader.plans).values() if value == "planner of model"), 0)


def test_an_evaluation_keeps_its_order_and_a_row_its_multiple(args: Any) -> None:
    made = sequences.sequence_loader(args, Lengths(), 0, reads=False)
    plain = sequences.sequence_loader(args, Lengths(), 0, reads=False, plain=True)
    assert made is not None and plain is not None
    assert planner(made) == "planner of model" and planner(plain) == 0
    for loader in (made, plain):
        assert loader.plans.settings.shape((5,)) == (1, 8)


@pytest.mark.parametrize("outlives", [True, False])
def test_workers_are_as_many_as_asked_for_and_prepared(
    args: Any, outlives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.exit_signal_handler = outlives
    made: list[dict[str, Any]] = []
    kind = torch.utils.data.DataLoader
    monkeypatch.setattr(kind, "__init__", lambda self, data, **options: made.append(options))
    monkeypatch.setattr(kind, "__iter__", lambda self: iter(["one"]))
    loader = sequences.sequence_loader(args, Lengths(), 0, reads=True, plain=True)
    assert loader is not None and next(iter(loader)).sample == "one"
    assert made[0]["num_workers"] == 2
    assert made[0]["worker_init_fn"].func is prepare_worker
    assert made[0]["worker_init_fn"].keywords == {"outlives_sigterm": outlives}


def test_orders_of_two_epochs_are_kept(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may reach into the next epoch; all before it are forgotten."""
    made, drawn, size = dataset(chats), list[int](), len(LENGTHS)
    random = sequences.np.random.default_rng
    monkeypatch.setattr(
        sequences.np.random, "default_rng", lambda seeds: drawn.append(seeds[-1]) or random(seeds)
    )
    for number in range(4 * size, size, -1):
        made.length(number)
    assert drawn == [4, 3, 2, 1]
    made.length(2 * size)
    assert drawn == [4, 3, 2, 1], "the last two are kept"
    made.length(3 * size)
    assert drawn == [4, 3, 2, 1, 3]
