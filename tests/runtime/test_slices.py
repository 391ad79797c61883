"""The attention of slices has the numbers of the uncut row, at the doors of ``core.slices``."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.dpp.core.cut import Cut
from megatron.dpp.core.slices import Keys, RowKeys, Slices, Unit, attend_in_slice
from megatron.dpp.core.varlen import DocumentSpan, attend
from tests.runtime.test_cut import USUAL, Chunk

HEADS, SIZE, TOKENS = 4, 8, 30


class Layer(torch.nn.Module):
    """Attention between two products, and a store of its rows' keys."""

    def __init__(self, groups: int, batch: int) -> None:
        super().__init__()
        self.groups, self.batch = groups, batch
        self.qkv = torch.nn.Linear(16, (HEADS + 2 * groups) * SIZE)
        self.out = torch.nn.Linear(HEADS * SIZE, 16)
        self.keys = Keys()

    def forward(self, hidden: torch.Tensor, unit: Unit) -> torch.Tensor:
        parts = self.qkv(hidden).unflatten(-1, (-1, SIZE))
        q, k, v = parts.split([HEADS, self.groups, self.groups], dim=2)

        def kernel(*given: torch.Tensor) -> torch.Tensor:
            return attend(*given, unit.spans, scale=0.4)

        if not unit.is_cut:
            return self.out(kernel(q, k, v))  # type: ignore[no-any-return]
        row = self.keys.row(0, unit, 0, k, v)
        return self.out(attend_in_slice(q, k, v, row, unit, kernel))  # type: ignore[no-any-return]


def trained(
    layers: list[Layer], units: list[Unit], *, again: bool = False, weights: Any = 1.0
) -> list[torch.Tensor]:
    """Output and all gradients of one row, whose slices run forward in order and backward in
    reverse.
    """
    torch.manual_seed(5)
    hidden = torch.randn(TOKENS, layers[0].batch, 16)
    losses, gradients, parts = [], [], []
    for layer in layers:
        layer.zero_grad()
    for unit in units:
        part = hidden[unit.begin : unit.end].clone().requires_grad_()
        run = functools.partial(through, layers, unit)
        if again:  # the first run has no graph
            output = torch.utils.checkpoint.checkpoint(run, part, use_reentrant=True)
        else:
            output = run(part)
        parts.append(output.detach())
        losses.append(((output * weights[unit.begin : unit.end]).square().sum(), part))
    for loss, part in reversed(losses):
        loss.backward()
        gradients.append(part.grad)
    for layer in layers:
        layer.keys.free(0, units[0])
        assert not len(layer.keys) and not layer.keys.num_bytes
    own = [p.grad for layer in layers for p in layer.parameters()]
    return [torch.cat(parts), torch.cat(gradients[::-1]), *own]  # type: ignore[list-item]


def through(layers: list[Layer], unit: Unit, hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden = hidden + layer(hidden, unit)
    return hidden


def units_at(cuts: tuple[int, ...], starts: tuple[int, ...] = (0,)) -> list[Unit]:
    bounds = (0, *cuts, TOKENS)
    return [Unit(0, a, b, TOKENS, starts) for a, b in itertools.pairwise(bounds)]


def layers_of(groups: int, batch: int) -> list[Layer]:
    torch.manual_seed(3)
    return [Layer(groups, batch) for _ in range(2)]


WEIGHTS = torch.linspace(-1, 1, TOKENS)[:, None, None]


@pytest.mark.parametrize("cuts", [(), (15,), (8, 20), (8, 16, 24), (1, 2, 9, 29)])
@pytest.mark.parametrize(("groups", "batch"), [(4, 1), (2, 3), (1, 1)])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_slices_have_the_numbers_of_the_row(
    cuts: tuple[int, ...], groups: int, batch: int, again: bool
) -> None:
    layers = layers_of(groups, batch)
    expected = trained(layers, units_at(()), weights=WEIGHTS)
    got = trained(layers, units_at(cuts), again=again, weights=WEIGHTS)
    for one, other in zip(got, expected, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if again:
        kept = trained(layers, units_at(cuts), weights=WEIGHTS)
        assert all(map(torch.equal, got, kept)), "what is computed again is bitwise what is kept"


@pytest.mark.parametrize("starts", [(0, 5, 12, 26), (0, 10), (0, 3, 4, 15, 20)])
@pytest.mark.parametrize("cuts", [(10,), (7, 15), (4, 10, 22, 28)])
def test_documents_of_a_packed_row_straddle_cuts(
    starts: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    layers = layers_of(2, 1)
    expected = trained(layers, units_at((), starts), weights=WEIGHTS)
    alone = [
        trained_alone(layers, begin, end) for begin, end in itertools.pairwise((*starts, TOKENS))
    ]
    torch.testing.assert_close(torch.cat(alone), expected[0], rtol=1e-5, atol=1e-5)
    got = trained(layers, units_at(cuts, starts), weights=WEIGHTS)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def trained_alone(layers: list[Layer], begin: int, end: int) -> torch.Tensor:
    torch.manual_seed(5)
    hidden = torch.randn(TOKENS, 1, 16)[begin:end]
    return through(layers, Unit(0, 0, end - begin, end - begin), hidden).detach()


def test_a_slice_without_a_loss_passes_gradients_of_its_keys_on() -> None:
    """The prompt of an answer: its own loss is 0, and later slices read its keys."""
    layers, weights = layers_of(2, 1), WEIGHTS.clone()
    weights[:12] = 0
    expected = trained(layers, units_at(()), weights=weights)
    got = trained(layers, units_at((12, 20)), weights=weights)
    assert got[1][:12].abs().max() > 1e-3
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_later_slices_keys_invalidate_no_earlier_graph() -> None:
    """Writes into the store, and the views of it, have version counters of their own."""
    keys, (first, second) = Keys(), units_at((15,))
    q, k, v = (torch.randn(15, 1, 2, SIZE, requires_grad=True) for _ in range(3))
    row = keys.row(0, first, 0, k, v)
    kernels = [functools.partial(attend, spans=u.spans, scale=1.0) for u in (first, second)]
    output = attend_in_slice(q, k, v, row, first, kernels[0])
    later = attend_in_slice(q, k, v, row, second, kernels[1])
    later.sum().backward()
    output.sum().backward()


def test_without_gradients_no_graph_is_kept() -> None:
    keys, (first, _) = Keys(), units_at((15,))
    q, k, v = (torch.randn(15, 1, 2, SIZE, requires_grad=True) for _ in range(3))
    graphs: list[bool] = []

    def kernel(*given: torch.Tensor) -> torch.Tensor:
        output = attend(*given, first.spans, scale=1.0)
        graphs.append(output.requires_grad)
        return output

    row = keys.row(0, first, 0, k, v)
    with torch.no_grad():
        attend_in_slice(q, k, v, row, first, kernel)
    attend_in_slice(q, k, v, row, first, kernel)
    assert graphs == [False, True]


def test_gradients_of_a_slices_keys_are_added_in_fp32() -> None:
    """Each later slice adds its own: two eps / 2 of bf16 beside 1 would both be lost in bf16."""
    first, second, third = (Unit(0, n, n + 1, 3) for n in range(3))
    half = torch.finfo(torch.bfloat16).eps / 2
    key = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    row = Keys().row(0, first, 0, key, key)
    for unit, value in ((third, 1.0), (second, half), (first, half)):
        own = row.share(unit, [torch.full((unit.end, 1, 1, 2), value).bfloat16()] * 2)
    assert all(grad.dtype == torch.bfloat16 for grad in own)
    assert all(grad.unique().tolist() == [1 + 2 * half] for grad in own)


class Core(DotProductAttention):  # type: ignore[misc]
    """megatron-core's attention of a layer, without process groups."""

    def __init__(self, *, scales: bool) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(**USUAL, apply_query_key_layer_scaling=scales)
        self.softmax_scale, self.layer_number, self.attention_dropout = 0.2, 3, torch.nn.Dropout(0)


@pytest.mark.parametrize("scales", [True, False])
def test_scores_that_megatron_scales_by_the_layer_are_scaled_back(scales: bool) -> None:
    core: Any = Core(scales=scales)
    unit, drawn = Unit(0, 0, 3, 6), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 1, 2, 4, generator=drawn) for _ in range(3))
    slices = Slices([Chunk(core)])
    with slices.bound(), slices.running(0, unit):
        output = core(q, k, v)
    expected = attend(q, k, v, unit.spans, scale=0.2 * (3 if scales else 1))
    torch.testing.assert_close(output, expected)


def units_of(lengths: list[int], tokens: int) -> tuple[Unit, ...]:
    cut = Cut.of([[length] for length in lengths], lambda _: tokens)
    assert cut is not None
    return cut.units


def test_units_cover_rows_in_order() -> None:
    found = units_of([10, 4], 4)
    assert [(u.row, u.begin, u.end) for u in found] == [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    assert [u.is_cut for u in found] == [True, True, True, False]
    assert [u.is_last for u in found] == [False, False, True, True]


@pytest.mark.parametrize(
    ("unit", "spans", "places"),
    [
        ((0, 4, (0,)), [(0, 4, 0, 4)], [range(4)]),
        ((4, 7, (0,)), [(0, 3, 0, 7)], [range(4, 7)]),
        ((4, 7, (0, 2, 6)), [(0, 2, 0, 4), (2, 3, 4, 5)], [range(2, 4), range(1)]),
        ((4, 7, (0, 4)), [(0, 3, 0, 3)], [range(3)]),
    ],
)
def test_a_units_documents_have_their_keys_and_places(
    unit: tuple[int, int, tuple[int, ...]], spans: list[tuple[int, ...]], places: list[range]
) -> None:
    begin, end, starts = unit
    found = Unit(0, begin, end, 10, starts)
    assert list(found.spans) == spans and list(found.places) == places


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's thread is the first
@pytest.mark.parametrize(
    "spans", [[(0, 64, 0, 192)], [(0, 64, 0, 64)], [(0, 20, 0, 100), (20, 64, 100, 144)]]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_kernels_of_a_gpu_attend_to_earlier_keys(
    spans: list[tuple[int, ...]], dtype: torch.dtype, bound: float
) -> None:
    found = [DocumentSpan(*span) for span in spans]
    num_keys, drawn = found[-1].last_key, torch.Generator().manual_seed(3)
    exact = [
        torch.randn(n, 1, h, 64, generator=drawn).to(dtype).float().requires_grad_()
        for n, h in ((64, 4), (num_keys, 2), (num_keys, 2))
    ]
    expected = attend(*exact, found, scale=0.125)
    probe = torch.randn(expected.shape, generator=drawn)
    wanted = [expected, *torch.autograd.grad(expected, exact, probe)]
    inputs = [each.detach().cuda().to(dtype).requires_grad_() for each in exact]
    output = attend(*inputs, found, scale=0.125)
    got = [output, *torch.autograd.grad(output, inputs, probe.cuda().to(dtype))]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=2 * bound, atol=2 * bound)


def test_a_unit_knows_the_keys_before_it() -> None:
    """Of its first document alone: the others have none in earlier slices."""
    assert [unit.earlier_keys for unit in units_of([40], 16)] == [0.0, 16.0, 32.0]
    assert Unit(0, 0, 16, 16).earlier_keys == 0.0
    assert Unit(0, 16, 32, 40, (0, 6, 24)).earlier_keys == 10 * 8 / 16


def test_gradients_of_later_slices_add_up_in_32_bits() -> None:
    none = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    row, units = RowKeys(4, none, none), [Unit(0, i, i + 1, 4) for i in range(4)]
    for place, value in ((3, 256.0), (2, 1.0), (1, 1.0)):
        row.share(units[place], [none.expand(place + 1, 1, 1, 1) + value] * 2)
    assert [float(each) for each in row.share(units[0], [none] * 2)] == [258.0, 258.0]
