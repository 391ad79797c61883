"""Graphs of several lengths, and the slots that they share."""

from __future__ import annotations

import pytest
import torch

from megatron.dpp.core.graphs.pools import Pools, Slot
from tests.runtime.graphed import Captures, Chunk, graphs_of, step

pytestmark = pytest.mark.usefixtures("captured_at_once")


def test_each_named_length_has_graphs_of_its_own(
    chunk: Chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot takes a MiB per row here."""
    add = Pools.add
    monkeypatch.setattr(Pools, "add", lambda s, slot, _: add(s, slot, slot.rows << 20))
    captures = Captures()
    made, said = graphs_of(chunk, capture=captures, rows=[2, 4, 8])
    found = step(made, chunk, lengths=[2, 4, 8, 3], longest=8)
    assert len(captures.replays) == 6, "F and B of three lengths; 3 is none of them"
    chunk.decoder.layers[0].weight.grad = None
    eager = torch.ones(8, 2, 4, requires_grad=True)
    chunk.decoder(hidden_states=eager).sum().backward()
    for grad in found:
        assert torch.equal(grad, eager.grad[: len(grad)])  # type: ignore[index]
    assert said == [
        "CUDA graphs: chunk 0 microbatches that are not of one of the lengths 2, 4, 8 run without "
        "graphs (DppConfig(length_buckets=...) names lengths)",
        "CUDA graphs: memory for 3 chunk activations of 3 lengths, 14 MiB together",
    ]
    captures.replays.clear()
    again = step(made, chunk, lengths=[4, 4, 4], longest=8)
    assert all(torch.equal(grad, found[1]) for grad in again)
    assert len(captures.replays) == 6 and len(said) == 3, "the second 4 uses the slot of the 8"
    assert said[-1].endswith("memory for 4 chunk activations of 3 lengths, 18 MiB together")


def test_a_slot_serves_shorter_microbatches_and_is_captured_for_them_between_steps(
    chunk: Chunk,
) -> None:
    """Slots of each length alone had room for a part of the microbatches; others ran eagerly."""
    captures = Captures()
    made, _ = graphs_of(chunk, capture=captures, rows=[2, 4, 8], most=lambda: 4 / 3)
    step(made, chunk, lengths=[8, 8], longest=8)
    assert captures.number == 4
    step(made, chunk, lengths=[2, 4], longest=8)
    assert captures.number == 12, "2 and 4 in both slots"
    for rows in ((4, 2), (2, 2), (8, 4)):
        captures.replays.clear()
        step(made, chunk, lengths=rows, longest=8)
        assert len(captures.replays) == 4
    assert captures.number == 12


@pytest.mark.parametrize(
    ("rows", "most", "lengths", "replays", "line"),
    [
        # The longest length is captured only if it is named.
        ([4], None, (4, 8), 2, "not of one of the lengths 4 run without graphs"),
        # 12 of 1.5 times 8 rows are taken by the first two; slots that are there are used again.
        ([4, 8], 1.0, (8, 4, 4, 8), 4, "the activation cap has no memory left"),
    ],
)
def test_lengths_without_a_slot_run_eagerly_and_are_named(
    chunk: Chunk, rows: list[int], most: float | None, lengths: tuple[int, ...], replays: int,
    line: str,
) -> None:  # fmt: skip
    captures, bound = Captures(), None if most is None else lambda: most
    made, said = graphs_of(chunk, capture=captures, rows=rows, most=bound)
    for step_lengths in (lengths, lengths[:2]):
        captures.replays.clear()
        step(made, chunk, lengths=step_lengths, longest=8)
        assert len(captures.replays) == replays
    assert any(line in each for each in said)


def test_the_shortest_free_slot_is_taken_and_one_is_added_where_all_of_it_fits() -> None:
    """8 rows are taken of 10: another 4 would be 2 too many, 2 fit."""
    pools = Pools(torch.zeros(8, 1, 2), [2, 4, 8])
    for rows in (8, 2, 4):
        pools.give_back(Slot(torch.zeros(rows, 1, 2)))
    taken = [pools.take("block", rows) for rows in (4, 2, 2, 4)]
    assert [slot.rows for slot in taken if slot is not None] == [4, 2, 8, 4]
    pools, fits = Pools(torch.zeros(8, 1, 2), [2, 4, 8], most=lambda: 5 / 6), {}
    for rows in (8, 4, 2):
        slot = pools.take("block", rows)
        fits[rows] = slot is not None
        if slot is not None:
            pools.add(slot, 1)
    assert fits == {8: True, 4: False, 2: True}


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
