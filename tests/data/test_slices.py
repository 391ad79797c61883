"""Batches of sequences that are cut into slices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.sim.lengths import LengthCosts
from megatron.dpp_train.data import sequences
from tests.data.test_sequences import dataset, write_chats


def test_a_loader_of_slices_gives_each_token_once_with_the_weights_of_its_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows run longest first; what is padded or packed belongs to a row's last slice."""
    data = dataset(write_chats(tmp_path / "x", [400, 30, 50, 170, 90, 61, 10, 20]), 8,
                   sequence_length=399)  # fmt: skip
    monkeypatch.setattr(sequences, "length_costs", lambda _: LengthCosts())
    monkeypatch.setattr(sequences.mpu, "get_data_parallel_rank", lambda: 0)
    args: Any = argparse.Namespace(
        virtual_pipeline_model_parallel_size=None, use_dpp=True, data_parallel_size=1,
        pipeline_model_parallel_size=2, micro_batch_size=1, packing="even", packing_budget=399,
        length_multiple=2, length_buckets=(), order="drawn", seq_length=399, slice_tokens=64,
        holds_whole=True,
        global_batch_size=8, num_workers=0, device="cpu", seed=1, exit_signal_handler=False,
        mmap_bin_files=True,
    )  # fmt: skip
    made = list(sequences.SequenceLoader(args, data, 0, reads=True))
    assert len(made) == made[0].num_units
    rows = {each.slice.row: each.slice.total for each in made if each.slice is not None}
    assert [rows[0], rows[1]] == [400, 170], "169 tokens of a row are padded to 170"
    assert sequences.longest_unit(args) == 96
    total, seen = 0.0, 0
    for each in made:
        assert each.slice is not None and each.sample is not None
        assert each.shape == (1, each.slice.end - each.slice.begin) and each.shape[1] <= 96
        assert all(tensor.shape == each.shape for tensor in each.sample.values())
        if each.slice.is_cut:
            places = each.sample["position_ids"][0]
            assert places[0] == each.slice.begin and places[-1] >= each.slice.end - 2
        total += float(each.sample["loss_weights"].sum()) * each.share
        seen += int((each.sample["tokens"] != 0).sum())
    assert total == pytest.approx(len(rows)), "a row weighs one on the mean"
    whole = [sum(1 for token in data[i]["tokens"][:-1] if token) for i in range(8)]
    assert seen == sum(whole)
    step = sequences.next_step(iter(made))
    assert step == made
    assert all(each.is_weighted for each in made)
    args.slice_tokens, args.packing = 448, "none"
    uncut = list(sequences.SequenceLoader(args, data, 0, reads=True))
    assert not any(each.is_weighted for each in uncut), "their bits are those without slices"
