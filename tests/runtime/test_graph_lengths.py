"""Graphs of several lengths, and the slots that they share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron.dpp.core.graphs import slots as graphs
from megatron.dpp.core.graphs.pools import Pools, Slot
from tests.runtime.graphed import Chunk, graphed_chunk  # noqa: F401  (a fixture)
from tests.runtime.rerun import Rerun


def forwards(made: graphs.ChunkGraphs, chunk: Chunk, *lengths: int) -> list[torch.Tensor | None]:
    """One step over microbatches of these lengths, all in flight at once; their gradients."""
    inputs = [torch.ones(length, 2, 4, requires_grad=True) for length in lengths]
    with made.bound(torch.empty(8, 2, 4)):
        outputs = [chunk.decoder(hidden_states=hidden) for hidden in inputs]
        for output in outputs:
            output.sum().backward()
    return [hidden.grad for hidden in inputs]


def test_each_named_length_has_graphs_of_its_own(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot takes a MiB per row here."""
    add = Pools.add
    monkeypatch.setattr(Pools, "add", lambda s, slot, _: add(s, slot, slot.rows << 20))
    replays: list[Rerun] = []
    said: list[str] = []
    made = graphs.ChunkGraphs(
        [chunk], None, said.append, lambda chunks: True, partial(Rerun, replays=replays),
        rows=[2, 4, 8],
    )  # fmt: skip
    found = forwards(made, chunk, 2, 4, 8, 3)
    assert len(replays) == 6, "F and B of three lengths; 3 is none of them"
    chunk.decoder.layers[0].weight.grad = None
    eager = torch.ones(8, 2, 4, requires_grad=True)
    chunk.decoder(hidden_states=eager).sum().backward()
    for grad in found:
        assert grad is not None and torch.equal(grad, eager.grad[: len(grad)])  # type: ignore[index]
    assert said == [
        "CUDA graphs: chunk 0 microbatches that are not of one of the lengths 2, 4, 8 run without "
        "graphs (length_buckets names lengths)",
        "CUDA graphs: memory for 3 chunk activations of 3 lengths, 14 MiB together",
    ]
    replays.clear()
    assert all(torch.equal(grad, found[1]) for grad in forwards(made, chunk, 4, 4, 4)[:2])
    assert len(replays) == 6 and len(said) == 3, "the second 4 uses the slot of the 8"
    assert said[-1].endswith("memory for 4 chunk activations of 3 lengths, 18 MiB together")


def test_a_slot_serves_shorter_microbatches_and_is_captured_for_them_between_steps(
    chunk: Chunk,
) -> None:
    """Slots of each length alone had room for a part of the microbatches; others ran eagerly."""
    replays: list[Rerun] = []
    captured: list[Any] = []

    def capture(function: Any, pool: Any) -> Rerun:
        captured.append(function)
        return Rerun(function, pool, replays=replays)

    made = graphs.ChunkGraphs(
        [chunk], None, print, lambda chunks: True, capture, rows=[2, 4, 8], most=lambda: 4 / 3
    )
    forwards(made, chunk, 8, 8)
    assert len(captured) == 4
    forwards(made, chunk, 2, 4)
    assert len(captured) == 12, "2 and 4 in both slots"
    for rows in ((4, 2), (2, 2), (8, 4)):
        replays.clear()
        assert all(grad is not None for grad in forwards(made, chunk, *rows))
        assert len(replays) == 4
    assert len(captured) == 12


def test_the_longest_length_is_captured_only_if_it_is_named(chunk: Chunk) -> None:
    replays: list[Rerun] = []
    said: list[str] = []
    made = graphs.ChunkGraphs(
        [chunk], None, said.append, lambda chunks: True, partial(Rerun, replays=replays), rows=[4],
    )  # fmt: skip
    forwards(made, chunk, 4, 8)
    assert len(replays) == 2
    assert any("not of one of the lengths 4 run without graphs" in line for line in said)


def test_slots_of_several_lengths_stop_at_one_and_a_half_times_the_cap(chunk: Chunk) -> None:
    replays: list[Rerun] = []
    said: list[str] = []
    made = graphs.ChunkGraphs(
        [chunk], None, said.append, lambda chunks: True, partial(Rerun, replays=replays),
        rows=[4, 8], most=lambda: 1.0,
    )  # fmt: skip
    forwards(made, chunk, 8, 4, 4, 8)  # 12 of 1.5 times 8 rows are taken by the first two
    assert len(replays) == 4
    assert any("memory of the activation cap is spent" in line for line in said)
    replays.clear()
    assert all(grad is not None for grad in forwards(made, chunk, 4, 8))
    assert len(replays) == 4, "slots that are there are used again"


def test_a_slot_is_added_only_where_all_of_it_fits() -> None:
    """8 rows are taken of 10: another 4 would be 2 too many, 2 fit."""
    pools = Pools(torch.zeros(8, 1, 2), [2, 4, 8], most=lambda: 5 / 6)
    taken: dict[int, bool] = {}
    for rows in (8, 4, 2):
        slot = pools.take("block", rows)
        taken[rows] = slot is not None
        if slot is not None:
            pools.add(slot, 1)
    assert taken == {8: True, 4: False, 2: True}


def test_the_shortest_free_slot_that_holds_a_microbatch_is_taken() -> None:
    pools = Pools(torch.zeros(8, 1, 2), [2, 4, 8])
    for rows in (8, 2, 4):
        pools.give_back(Slot(torch.zeros(rows, 1, 2)))
    taken = [pools.take("block", rows) for rows in (4, 2, 2, 4)]
    assert [slot.rows for slot in taken if slot is not None] == [4, 2, 8, 4]


@pytest.mark.parametrize(
    ("rows", "num_bytes", "eager", "expected"),
    [
        (16, 900, 100, 900),  # measured, whatever it is beside the activation
        (2, 60, 400, 480),  # as bytes per row
        (1, 60, 400, 800),  # a pool's own memory weighs too much
        (8, 150, 400, 400),
        (4, 60, 0, 240),
    ],
)
def test_a_slot_is_estimated_from_shorter_ones_within_what_the_activation_allows(
    rows: int, num_bytes: int, eager: float, expected: float
) -> None:
    pools = Pools(torch.zeros(16, 1, 2), [1, 2, 4, 8, 16])
    assert pools.slot_bytes(eager) == 0
    for length in (1, rows):
        pools.add(Slot(torch.zeros(length, 1, 2)), num_bytes)
    assert pools.slot_bytes(eager) == expected
