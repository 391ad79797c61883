"""Workers of data loaders."""

from __future__ import annotations

import gc
from functools import partial

import torch

from megatron.dpp.train.exits import prepare_worker

collected: list[int] = []


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        collected.append(1)


class Collecting(torch.utils.data.Dataset[int]):
    """A set whose only item is the number of inherited objects that its reader collected."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return len(collected)


def test_a_worker_collects_nothing_that_it_inherits() -> None:
    """Objects that belong to threads of the rank crashed a worker that collected them."""
    gc.collect()
    collected.clear()
    gc.disable()
    try:
        Loop()
        loader = torch.utils.data.DataLoader(
            Collecting(),
            num_workers=1,
            worker_init_fn=partial(prepare_worker, outlives_sigterm=False),
        )
        assert [int(item) for item in loader] == [0]
    finally:
        gc.enable()
    gc.collect()
    assert collected, "this process still collects it"
