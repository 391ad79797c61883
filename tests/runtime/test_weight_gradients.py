"""Deferred weight gradients of linear layers, over groups that only compute."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.core.wgrad import accumulate, product
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.core.wgrad.product import gather_buffers
from megatron.dpp.errors import ConfigError


class Linear(torch.nn.Module):
    """A linear layer as megatron-core calls it: by ``_forward_impl``, with these options."""

    gradient_accumulation_fusion = False

    def __init__(self, size: int = 2, bias: bool = False, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, size))
        self.bias = torch.nn.Parameter(torch.randn(size)) if bias else None
        usual = {"sequence_parallel": False, "allreduce_dgrad": False, "tp_group": "tp"}
        self.options = usual | options

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
        return torch.nn.functional.linear(input, weight, options["bias"])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._forward_impl(
            input=value, weight=self.weight, bias=self.bias, **self.options
        )
        return output


class Chunk(torch.nn.Module):
    """A model chunk of transformer layers."""

    def __init__(self, *layers: torch.nn.Module, autocast: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(enable_autocast=autocast)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(layers)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:
            value = layer(value)
        return value


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(product, "CLASSES", (Linear,))


def inputs(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, 1, 2, generator=generator).requires_grad_() for _ in range(number)]


def test_weights_wait_for_their_w_and_get_what_a_fused_backward_gives() -> None:
    """Pieces count from the last layer, and the memory that is held falls with each of them."""
    chunk = Chunk(Linear(bias=True), Linear(), torch.nn.Identity())
    given, expected = inputs(2), inputs(2)
    for value in expected:
        chunk(value).square().sum().backward()
    grads = [p.grad for p in chunk.parameters()]
    chunk.zero_grad()
    store = WeightGradients([chunk])
    assert store.num_pieces == (3,)
    held: list[int] = []
    with store.bound():
        outputs = [chunk(value).square().sum() for value in given]
        for microbatch, output in enumerate(outputs):
            with store.collect(0, microbatch):
                output.backward()
            held.append(store.held_bytes)
        weights = [layer.weight for layer in chunk.decoder.layers[:2]]  # type: ignore[union-attr]
        assert all(weight.grad is None for weight in weights)
        for piece in range(3):
            store.run(0, 0, piece)
            held.append(store.held_bytes)
            assert [weight.grad is not None for weight in weights] == [piece == 2, piece >= 1]
        for piece in range(3):
            store.run(0, 1, piece)
    layer = 2 * 3 * 2 * 4  # input and gradient of three tokens, two floats each
    assert held == [2 * layer, 4 * layer, 4 * layer, 3 * layer, 2 * layer]
    assert store.held_bytes == 0
    for parameter, grad in zip(chunk.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)  # type: ignore[arg-type]
    for value, other in zip(given, expected, strict=True):
        assert torch.equal(value.grad, other.grad)  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        store.run(0, 1, 0)


def test_what_waits_for_its_w_keeps_no_graph_and_is_noticed_if_left_out() -> None:
    chunk = Chunk(Linear(), Linear())
    store = WeightGradients([chunk])
    with store.bound():
        with store.divert() as deferred:
            chunk(inputs(1)[0]).sum().backward()
        works: list[Any] = [work for layer in deferred.values() for work in layer]
        kept = [each.input.get("") for work in works for each in work.products]
        assert len(kept) == 2 and all(tensor.grad_fn is None for tensor in kept)
        with store.collect(0, 0):
            chunk(inputs(1)[0]).sum().backward()
        with pytest.raises(AssertionError, match=r"weight gradients left over: \[1\]"):
            store.run(0, 0, 1)


@pytest.mark.parametrize("way", ["grad", "backward"])
def test_a_loss_that_asks_for_the_gradient_of_a_deferred_weight_is_refused(way: str) -> None:
    """It would get None."""
    chunk: Any = Chunk(Linear())
    store, weight = WeightGradients([chunk]), chunk.decoder.layers[0].weight
    (value,) = inputs(1)
    with store.bound():
        loss = chunk(value).sum()
        assert torch.autograd.grad(loss, value, retain_graph=True)[0].any()
        with pytest.raises(ConfigError, match=r"gradient of decoder.layers.0.weight, which is def"):
            if way == "grad":
                torch.autograd.grad(loss, weight, allow_unused=True)
            else:
                loss.backward(inputs=[weight])


@pytest.mark.parametrize("collected", [1, 2])
def test_passes_are_added_one_by_one_as_autograd_does(collected: int) -> None:
    """One within a forward runs at once, behind what earlier ones have deferred; several that one
    backward collects have a sum each.
    """
    chunk: Any = Chunk(Linear())
    said: list[str] = []
    store, weight = WeightGradients([chunk], said.append), chunk.decoder.layers[0].weight
    before, added = torch.full((2, 2), 3e3), []
    for deferred in (True, False):
        weight.grad = before.clone()
        with store.bound() if deferred else contextlib.nullcontext():
            first, second = (chunk(value).square().sum() for value in inputs(2))
            with store.collect(0, 0) if deferred else contextlib.nullcontext():
                first.backward()
                if collected == 2:
                    second.backward()
            if collected == 1:
                second.backward()
            if deferred:
                store.run(0, 0, 0)
        added.append(weight.grad)
    assert torch.equal(*added)
    assert [("a backward pass of its own" in line) for line in said] == [True] * (collected == 1)


def test_the_model_is_its_own_again_after_a_step_and_after_an_error() -> None:
    chunk = Chunk(Linear())
    store = WeightGradients([chunk])
    with pytest.raises(ValueError, match="of the step"), store.bound():
        assert "_forward_impl" in vars(chunk.decoder.layers[0])  # type: ignore[index]
        raise ValueError("of the step")
    assert "_forward_impl" not in vars(chunk.decoder.layers[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("how", "defers"),
    [
        ("usual", True),
        ("behind frozen layers", False),  # autograd would not come to a deferred one
        ("behind frozen layers, with a trained bias", True),
        ("a product of another dtype", False),
        ("under autocast", False),
    ],
)
def test_calls_that_cannot_wait_compute_their_gradient_within_b(how: str, defers: bool) -> None:
    """It is that of the layer alone."""
    more = {"output_dtype": torch.float64} if "dtype" in how else {}
    layer, said = Linear(bias="bias" in how, **more), list[str]()
    chunk: Any = Chunk(layer)
    store, value = WeightGradients([chunk], said.append), inputs(1)[0]
    value = value.detach() if "frozen" in how else value
    around = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how)
    with around:
        chunk(value).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with store.bound(), store.divert() as deferred:
        with around:
            output = chunk(value).sum()
        output.backward()
        assert bool(deferred) is defers
        assert defers or torch.equal(layer.weight.grad, expected)  # type: ignore[arg-type]
    assert said == [
        "dynamic pipeline: the weight gradient of decoder.layers.0 is computed within B: autocast "
        "is on"
    ] * ("autocast" in how)


def test_a_bias_gets_the_sum_over_all_rows_of_an_input_of_any_rank() -> None:
    """Experts take [tokens, h], attention [s, b, h]."""
    chunk = Chunk(Linear(bias=True))
    store = WeightGradients([chunk])
    for shape in ((6, 2), (3, 2, 2)):
        chunk.zero_grad()
        with store.bound():
            chunk(torch.ones(shape, requires_grad=True)).sum().backward()
        rows = float(math.prod(shape[:-1]))
        assert chunk.decoder.layers[0].bias.grad.tolist() == [rows, rows]  # type: ignore[union-attr]


def hooked(weight: Any, hook: Any) -> None:
    """Hook the node that accumulates a gradient, as DistributedDataParallel does."""
    weight.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    weight.node.register_hook(hook)


def test_a_fused_product_is_told_to_the_wrapper_after_it_was_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DistributedDataParallel counts a weight by its hook, and reads no ``grad`` of it then."""
    told: list[str] = []

    def add(weight: Any, total_input: torch.Tensor, grad_output: torch.Tensor) -> None:
        assert weight.grad is None and total_input.shape == grad_output.shape == (3, 2)
        told.append("added")

    monkeypatch.setattr(product, "add_product", add)
    monkeypatch.setattr(Linear, "gradient_accumulation_fusion", True)
    layer = Linear()
    hooked(layer.weight, lambda *_: told.append(f"hook {list(layer.weight.grad.shape)}"))  # type: ignore[union-attr]
    chunk: Any = Chunk(layer)
    store = WeightGradients([chunk])
    with store.bound():
        output = chunk(inputs(1)[0]).sum()
        with store.collect(0, 0):
            output.backward()
        assert not told
        store.run(0, 0, 0)
    assert told == ["added", "hook [2, 2]"]
    assert layer.weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_each_chunk_counts_its_own_layers_that_defer() -> None:
    """Those with a trained weight in a decoder's or an encoder's block, without autocast."""
    frozen, absent, bare, encoder = Linear(), Linear(), torch.nn.Module(), Chunk(Linear(), Linear())
    frozen.weight.requires_grad_(False)
    absent.weight = None  # type: ignore[assignment]
    bare.config = SimpleNamespace()
    encoder.encoder = encoder.decoder
    del encoder.decoder
    chunks: list[torch.nn.Module] = [
        Chunk(Linear(), Linear()), Chunk(torch.nn.Identity()), Chunk(frozen), Chunk(absent), bare,
        Chunk(Linear(), autocast=True), encoder,
    ]  # fmt: skip
    assert WeightGradients(chunks).num_pieces == (2, 0, 0, 0, 0, 0, 2)
    assert WeightGradients(chunks[::-1]).num_pieces == (2, 0, 0, 0, 0, 0, 2)


def test_wrappers_that_reduce_gradients_in_other_ways_are_refused() -> None:
    chunk = Chunk(Linear())
    chunk.start_grad_sync = lambda: None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="weight gradients cannot be deferred under Chunk"):
        WeightGradients([chunk])


@pytest.mark.parametrize("own", [True, False])
def test_gradients_are_added_as_autograd_does(own: bool) -> None:
    """Into the ``grad`` that is there, and with the hooks of its node."""
    seen: list[Any] = []
    weight: Any = Linear().weight

    def hook(*_: Any) -> None:
        seen.append(weight.grad.clone())

    hook.__module__ = "megatron.core.distributed" if own else __name__
    hooked(weight, hook)
    kept = []
    for value in (1.0, 2.0):
        accumulate.add(weight, [torch.full((2, 2), value, dtype=torch.float64)])
        kept.append(weight.grad)
    assert [each[0, 0].item() for each in seen] == [1.0, 3.0]
    assert kept[0] is kept[1] and kept[0].dtype == torch.float32
    buffer = torch.ones(4)
    weight.grad = buffer.view(2, 2)
    accumulate.add(weight, [torch.ones(2, 2)])
    assert buffer.tolist() == [2.0] * 4


@pytest.mark.parametrize("there", [True, False])
def test_gather_buffers_are_those_of_megatron_core(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    memory = SimpleNamespace(buffer={"a": torch.zeros(1)})
    monkeypatch.setattr(product.parallel_state, "get_global_memory_buffer", lambda: memory)
    monkeypatch.setattr(product.parallel_state, "model_parallel_is_initialized", lambda: there)
    assert len(gather_buffers()) == (1 if there else 0)


# Collections -------------------------------------------------------------------


def test_work_goes_to_the_innermost_collection_and_then_again_to_the_one_around_it() -> None:
    store, work = WeightGradients([Chunk(Linear())]), [Any, Any]
    waiting: Any = [SimpleNamespace(num_bytes=lambda: 0) for _ in work]
    with store.divert() as outer:
        with store.divert() as inner:
            store.defer(0, waiting[0])
        store.defer(0, waiting[1])
    assert (inner, outer) == ({0: [waiting[0]]}, {0: [waiting[1]]})
