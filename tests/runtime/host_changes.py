"""Changes that hosts make to the modules of a model, before training and between steps.

A change is a function of a random generator and of a rank's model chunks. Ranks may change unlike
layers. Each works under megatron-core's static schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch.nn.utils import parametrize

from megatron.dpp.core.compat import replaced

Change = Callable[[random.Random, list[Any]], None]
CHANGES: dict[str, Change] = {}
_PRODUCT = "linear_with_grad_accumulation_and_async_allreduce"


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


def linears(chunks: list[Any]) -> list[tuple[Any, str]]:
    """The linear layers in the transformer layers, as (parent, name)."""
    kinds = layers.ColumnParallelLinear | layers.RowParallelLinear
    return [
        (parent, name)
        for chunk in chunks
        for parent in chunk.modules()
        for name, child in parent.named_children()
        if isinstance(child, kinds) and name.startswith("linear")
    ]


def chosen(rng: random.Random, chunks: list[Any]) -> Any:
    parent, name = rng.choice(linears(chunks))
    return getattr(parent, name)


def held(module: Any) -> torch.Tensor:
    """The weight that a module's property is computed from."""
    found = {**vars(module), **module._parameters}
    if "weight" not in found:  # between two changes
        raise AttributeError("weight")
    weight: torch.Tensor = found["weight"]
    return weight


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight on a coarse grid, whose gradient goes to all but its largest elements."""
    inside = (weight.abs() < weight.detach().abs().max()).to(weight.dtype)
    return weight * inside + ((weight * 16).round() / 16 - weight * inside).detach()


@change
def replace_forward(rng: random.Random, chunks: list[Any]) -> None:
    module = chosen(rng, chunks)
    original = module.forward
    module.forward = lambda *args: (original(*args)[0] * 0.5, None)


@change
def replace_the_product_of_a_layer(rng: random.Random, chunks: list[Any]) -> None:
    module = chosen(rng, chunks)
    original = module._forward_impl
    module._forward_impl = lambda input, weight, **rest: original(input, rounded(weight), **rest)


@change
def replace_the_products_in_a_forward(rng: random.Random, chunks: list[Any]) -> None:
    """As ModelOpt quantises: the functional is another one while the forward runs."""
    module = chosen(rng, chunks)
    original = module.forward

    def product(function: Any, input: Any, weight: Any, *args: Any, **rest: Any) -> Any:
        return function(input, rounded(weight), *args, **rest)

    def forward(*args: Any) -> Any:
        with replaced(layers, _PRODUCT, product):
            return original(*args)

    module.forward = forward


@change
def call_with_another_weight(rng: random.Random, chunks: list[Any]) -> None:
    """In some calls only: a forward reads its weight once or twice."""
    module, calls = chosen(rng, chunks), []

    class Counting(type(module)):  # type: ignore[misc]
        @property
        def weight(self) -> torch.Tensor:
            calls.append(0)
            own = held(self)
            return rounded(own) if len(calls) % 3 else own

    if "weight" in module._parameters:
        module.__class__ = Counting


@change
def swap_the_weight_of_a_call(rng: random.Random, chunks: list[Any]) -> None:
    """In every second call the module has a computed weight, outside of its parameters."""
    module, calls = chosen(rng, chunks), []
    original = module.forward

    def forward(*args: Any) -> Any:
        calls.append(0)
        if len(calls) % 2 or "weight" not in module._parameters:
            return original(*args)
        own = module._parameters.pop("weight")
        module.__dict__["weight"] = rounded(own)
        try:
            return original(*args)
        finally:
            del module.__dict__["weight"]
            module._parameters["weight"] = own

    module.forward = forward


@change
def wrap(rng: random.Random, chunks: list[Any]) -> None:
    """As LoRA does, with the wrapped layer's weight frozen or not."""

    class Adapted(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.to_wrap = inner
            out, size = inner.weight.shape
            self.down = torch.nn.Parameter(torch.full((2, size), 0.1))
            self.up = torch.nn.Parameter(torch.full((out, 2), 0.1))

        def forward(self, x: torch.Tensor) -> Any:
            output, bias = self.to_wrap(x)
            return output + x @ self.down.t() @ self.up.t(), bias

    parent, name = rng.choice(linears(chunks))
    inner = getattr(parent, name)
    for parameter in inner.parameters():
        parameter.requires_grad_(rng.random() < 0.5)
    setattr(parent, name, Adapted(inner))


@change
def hook_the_forward(rng: random.Random, chunks: list[Any]) -> None:
    chosen(rng, chunks).register_forward_hook(
        lambda module, given, output: (output[0] * 0.75, output[1])
    )


@change
def round_the_weight_for_a_forward(rng: random.Random, chunks: list[Any]) -> None:
    module, kept = chosen(rng, chunks), []

    def before(module: Any, given: Any) -> None:
        kept.append(module.weight.data)
        module.weight.data = rounded(module.weight.data)

    def after(module: Any, given: Any, output: Any) -> None:
        module.weight.data = kept.pop()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


@change
def hook_the_backward(rng: random.Random, chunks: list[Any]) -> None:
    """Of a layer or of what is around it; it changes the gradients that are there."""
    parent, name = rng.choice(linears(chunks))
    module = rng.choice([parent, getattr(parent, name)])

    def after(module: Any, grad_input: Any, grad_output: Any) -> None:
        for parameter in module.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.mul_(0.5)

    module.register_full_backward_hook(after)


@change
def hook_a_weight(rng: random.Random, chunks: list[Any]) -> None:
    weight = chosen(rng, chunks).weight
    if weight.requires_grad:
        weight.register_hook(lambda gradient: gradient * 0.5)


@change
def hook_a_weight_after_accumulation(rng: random.Random, chunks: list[Any]) -> None:
    def halve(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    weight = chosen(rng, chunks).weight
    if weight.requires_grad and weight.is_leaf:
        weight.register_post_accumulate_grad_hook(halve)


@change
def hook_an_output(rng: random.Random, chunks: list[Any]) -> None:
    def after(module: Any, given: Any, output: Any) -> None:
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: gradient.mul_(0.5))

    chosen(rng, chunks).register_forward_hook(after)


@change
def freeze(rng: random.Random, chunks: list[Any]) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            if rng.random() < 0.5:
                parameter.requires_grad_(False)


@change
def freeze_all_layers(rng: random.Random, chunks: list[Any]) -> None:
    for parent, name in linears(chunks):
        for parameter in getattr(parent, name).parameters():
            parameter.requires_grad_(False)


@change
def thaw(rng: random.Random, chunks: list[Any]) -> None:
    for chunk in chunks:
        chunk.requires_grad_(True)


@change
def tie(rng: random.Random, chunks: list[Any]) -> None:
    places = linears(chunks)
    first = getattr(*rng.choice(places))
    for parent, name in places:
        other = getattr(parent, name)
        if other is not first and other.weight.shape == first.weight.shape:
            other.__dict__.pop("weight", None)
            if "weight" in other._parameters and "weight" in first._parameters:
                other._parameters["weight"] = first._parameters["weight"]


@change
def run_a_layer_twice(rng: random.Random, chunks: list[Any]) -> None:
    parent, _ = rng.choice(linears(chunks))
    original = parent.forward
    parent.forward = lambda *args, **rest: (
        (original(*args, **rest)[0] + original(*args, **rest)[0]) * 0.5,
        *original(*args, **rest)[1:],
    )


@change
def parametrise(rng: random.Random, chunks: list[Any]) -> None:
    class Rounded(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return rounded(weight)

    module = chosen(rng, chunks)
    if "weight" in module._parameters:
        parametrize.register_parametrization(module, "weight", Rounded())


@change
def quantise(rng: random.Random, chunks: list[Any]) -> None:
    """As ModelOpt does: a class made at run time, whose weight is a property."""
    for parent, name in linears(chunks):
        module = getattr(parent, name)
        if "weight" in module._parameters and rng.random() < 0.5:
            weight = property(lambda self: rounded(held(self)))
            kind = type(module)
            module.__class__ = type(f"Quant{kind.__name__}", (kind,), {"weight": weight})


@change
def subclass(rng: random.Random, chunks: list[Any]) -> None:
    module = chosen(rng, chunks)

    class Halved(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            output, bias = super().forward(*args)
            return output * 0.5, bias

    module.__class__ = Halved


@change
def move_main_grad(rng: random.Random, chunks: list[Any]) -> None:
    weight = chosen(rng, chunks).weight
    if hasattr(weight, "main_grad"):
        weight.main_grad = weight.main_grad.clone()


@change
def offload(rng: random.Random, chunks: list[Any]) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.clone()


@change
def replace_a_weight(rng: random.Random, chunks: list[Any]) -> None:
    module = chosen(rng, chunks)
    if "weight" in module._parameters:
        module.weight = torch.nn.Parameter(module.weight.detach().clone())


@change
def replace_a_layer(rng: random.Random, chunks: list[Any]) -> None:
    """By a plain one."""

    class Plain(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    parent, name = rng.choice(linears(chunks))
    out, size = getattr(parent, name).weight.shape
    made = Plain(size, out, bias=False)
    torch.nn.init.constant_(made.weight, 0.01)
    setattr(parent, name, made)


@change
def detach_an_input(rng: random.Random, chunks: list[Any]) -> None:
    chosen(rng, chunks).register_forward_pre_hook(lambda module, given: (given[0].detach(),))


@change
def ask_for_a_gradient_in_a_forward(rng: random.Random, chunks: list[Any]) -> None:
    """Of a layer's input, for a statistic that scales its output."""
    parent, name = rng.choice(linears(chunks))
    module = getattr(parent, name)
    original = module.forward

    def forward(x: torch.Tensor, *args: Any) -> Any:
        output, bias = original(x, *args)
        if output.requires_grad and x.requires_grad:
            (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
            output = output * (1 + slope.abs().mean())
        return output, bias

    module.forward = forward


@change
def use_a_weight_elsewhere(rng: random.Random, chunks: list[Any]) -> None:
    """A penalty on a weight: autograd would add up both gradients."""

    def after(module: Any, given: Any, output: Any) -> Any:
        return output[0] + 1e-3 * module.weight.square().mean(), output[1]

    chosen(rng, chunks).register_forward_hook(after)


@change
def compute_a_layer_by_hand(rng: random.Random, chunks: list[Any]) -> None:
    """In every second call."""
    module, calls = chosen(rng, chunks), []
    original = module.forward

    def forward(x: torch.Tensor, *args: Any) -> Any:
        calls.append(0)
        output, bias = original(x, *args)
        return (torch.nn.functional.linear(x, module.weight), bias) if len(calls) % 2 else (
            output, bias
        )  # fmt: skip

    module.forward = forward


@change
def draw_noise(rng: random.Random, chunks: list[Any]) -> None:
    """As NEFTune does."""
    chosen(rng, chunks).register_forward_hook(
        lambda module, given, output: (output[0] + 0.01 * torch.rand_like(output[0]), output[1])
    )


@change
def patch_the_autograd_function(rng: random.Random, chunks: list[Any]) -> None:
    """For the rest of the process, as MindSpeed does; the worker puts the function back."""
    function, name = layers.LinearWithGradAccumulationAndAsyncCommunication, "backward"
    own = getattr(function, name)

    def halved(ctx: Any, gradient: torch.Tensor) -> Any:
        return own(ctx, gradient * 0.5)

    setattr(function, name, staticmethod(halved))


@change
def hook_the_node_of_a_weight(rng: random.Random, chunks: list[Any]) -> None:
    """Before or after autograd adds, as megatron-core does; what is added changes."""
    weight = chosen(rng, chunks).weight
    if not (weight.requires_grad and weight.is_leaf):
        return
    weight.kept_node = node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    if rng.random() < 0.5:
        node.register_prehook(lambda given: tuple(each * 0.5 for each in given))
        return

    def after(*_: Any) -> None:
        for gradient in (weight.grad, getattr(weight, "main_grad", None)):
            if gradient is not None:
                gradient.mul_(0.75)

    node.register_hook(after)


@change
def make_gradients_views_of_a_buffer(rng: random.Random, chunks: list[Any]) -> None:
    """Only where no wrapper has buffers of its own."""
    for chunk in chunks:
        trained = [p for p in chunk.parameters() if p.requires_grad and not hasattr(p, "main_grad")]
        chunk.flat = torch.zeros(sum(p.numel() for p in trained))
        parts = chunk.flat.split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=False):  # none without parameters
            parameter.grad = part.view_as(parameter)


def quantise_with_modelopt(rng: random.Random, chunks: list[Any]) -> None:
    """INT8 weights of all linear layers in the transformer layers, by NVIDIA's package."""
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]

    wanted = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*layers*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
    ]
    for chunk in chunks:
        mtq.quantize(chunk, {"quant_cfg": wanted, "algorithm": "max"}, None)


CHANGES["quantise_with_modelopt"] = quantise_with_modelopt

Loss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""A host's loss from the usual one, the model's output and the model."""


def _weight(model: Any) -> torch.Tensor:
    parent, name = linears([model])[-1]
    return next(getattr(parent, name).parameters())


def gradient_of_a_weight(loss: torch.Tensor, output: torch.Tensor, model: Any) -> torch.Tensor:
    weight = _weight(model)
    if not weight.requires_grad:
        return loss
    (found,) = torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
    return loss if found is None else loss * (1 + found.norm())


def gradient_of_the_output(loss: torch.Tensor, output: torch.Tensor, model: Any) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, output, retain_graph=True)
    return loss * (1 + found.norm())


def own_backward(loss: torch.Tensor, output: torch.Tensor, model: Any) -> torch.Tensor:
    (loss * 0.01).backward(retain_graph=True)
    return loss


def noise(loss: torch.Tensor, output: torch.Tensor, model: Any) -> torch.Tensor:
    return loss * (1 + 0.01 * torch.rand(()))


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (gradient_of_a_weight, gradient_of_the_output, own_backward, noise)
}
