"""Experts whose matrix products run as one grouped product each, for the local layers.

megatron-core's ``SequentialMLP`` runs one expert after the other; its grouped classes need
Transformer Engine or an extension, and hold their weights in another form. ``GroupedExperts`` is a
``SequentialMLP``: same parameters, same names, same checkpoints, same first random numbers. Its
products are PyTorch's ``grouped_mm``.

The weights of a layer's experts lie behind each other in one storage, so a product needs no copy of
them. Where the distributed optimizer moves them into its own buffers, they are copied for each
product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron.dpp.core.wgrad.own_way import product_is_own, untouched
from megatron.dpp.errors import ConfigError

grouped_mm: Callable[..., torch.Tensor] | None = getattr(
    F, "grouped_mm", getattr(torch, "_grouped_mm", None)
)
"""PyTorch's grouped product, None where this PyTorch has none."""
_ALIGNED_BYTES = 16
"""Multiple that a GPU's kernel asks of the bytes of a row."""

NODE = torch.zeros((), requires_grad=True)
"""An input of products that defer, in the place of their weights. It gets no gradient itself."""
_NODE_ACCUMULATES = torch.autograd.graph.get_gradient_edge(NODE).node


class Defer(Protocol):
    """Takes what weight gradients need."""

    def takes(self, weights: list[Any]) -> bool:
        """True if a product with these weights defers."""
        ...

    def __call__(self, tokens: torch.Tensor, grad_output: torch.Tensor, ends: torch.Tensor) -> None:
        """Take the operands: input, output gradient, ends of the experts' tokens."""
        ...


def wants_leaves() -> bool:
    """In the backward of a product of :data:`NODE`: True if the pass accumulates gradients of
    leaves, and not only asks for those of some tensors, as ``torch.autograd.grad`` does.
    """
    wanted: bool = torch._C._will_engine_execute_node(_NODE_ACCUMULATES)
    return wanted


class GroupedLinear:
    """One linear layer of all experts, without bias.

    Args:
        layers: this layer of each expert.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.defer: Defer | None = None

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """The weight of each expert, [out, in]."""
        return [layer.weight for layer in self.layers]

    def lay_out(self) -> None:
        """Put the weights behind each other into one storage."""
        together = torch.stack([weight.detach() for weight in self.weights])
        for weight, place in zip(self.weights, together, strict=True):
            weight.data = place

    def together(self) -> torch.Tensor:
        """All weights, [experts, out, in]; a view where they lie at equal distances."""
        weights = [weight.detach() for weight in self.weights]
        starts = [weight.storage_offset() for weight in weights]
        steps = {end - start for start, end in itertools.pairwise(starts)}
        storages = {weight.untyped_storage().data_ptr() for weight in weights}
        if len(storages) > 1 or len(steps) != 1 or min(steps) < weights[0].numel():
            return torch.stack(weights)
        shape = (len(weights), *weights[0].shape)
        return weights[0].as_strided(shape, (steps.pop(), *weights[0].stride()))

    def __call__(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The product of each expert's tokens with its weight.

        Args:
            tokens: [tokens, in], those of the first expert first.
            ends: int32 [experts], the end of each expert's tokens.
        """
        weights: list[torch.Tensor] = [*self.weights]
        # Without a gradient of its input all layers before it are frozen: none waits for its B.
        waited_for = torch.is_grad_enabled() and tokens.requires_grad
        defer = self.defer if waited_for and self.defer and self.defer.takes(weights) else None
        if defer is not None:
            weights = [NODE]
        output: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            tokens, ends, self, defer, *weights
        )
        return output


class _Product(torch.autograd.Function):
    """A grouped product. With :data:`NODE` for all weights, their gradients are deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        ends: torch.Tensor,
        linear: GroupedLinear,
        defer: Defer | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        assert grouped_mm is not None
        ctx.save_for_backward(tokens, ends)
        ctx.linear, ctx.defer = linear, defer
        return grouped_mm(tokens, linear.together().transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        assert grouped_mm is not None
        tokens, ends = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_tokens = None
        if ctx.needs_input_grad[0]:
            grad_tokens = grouped_mm(grad_output, ctx.linear.together(), offs=ends)
        if ctx.defer is not None:
            if wants_leaves():
                ctx.defer(tokens.detach(), grad_output, ends)
            return grad_tokens, None, None, None, None
        return grad_tokens, None, None, None, *weight_gradients(tokens, grad_output, ends)


@torch.no_grad()
def weight_gradients(
    tokens: torch.Tensor, grad_output: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The gradient of each expert's weight, [out, in], all by one product."""
    assert grouped_mm is not None
    return grouped_mm(grad_output.t(), tokens, offs=ends).unbind()


class _Together:
    """All experts as one: an expert's own forward runs with the grouped layers."""

    def __init__(self, expert: Any, first: Any, second: Any) -> None:
        self._expert, self.linear_fc1, self.linear_fc2 = expert, first, second

    def __getattr__(self, name: str) -> Any:
        return getattr(self._expert, name)


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """A rank's experts of one layer, with grouped products.

    Raises:
        ConfigError: this PyTorch has no such product, or not for these weights.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        names = ("linear_fc1", "linear_fc2")
        # A tuple: torch would register modules that a list or a dict of its own holds.
        self.linears = tuple(
            GroupedLinear([getattr(expert, name) for expert in self.local_experts])
            for name in names
        )
        self._kinds = {type(expert) for expert in self.local_experts}
        self._kinds |= {type(layer) for linear in self.linears for layer in linear.layers}
        if len(self.local_experts) > 1:
            self._leave_fusion()
        self._check()
        self._lay_out()

    def _leave_fusion(self) -> None:
        """Let no weight gradient be added within a product: where no expert has a token, one after
        the other would do so, and DDP would drop the gradients of later grouped products.
        """
        for linear in self.linears:
            for layer in linear.layers:
                layer.gradient_accumulation_fusion = False

    def _check(self) -> None:
        if grouped_mm is None:
            raise ConfigError(
                f"moe_grouped_gemm with transformer_impl='local': PyTorch {torch.__version__} has "
                "no torch.nn.functional.grouped_mm; leave it out"
            )
        if self.config.add_bias_linear:
            raise ConfigError(
                "moe_grouped_gemm: grouped products add no bias; add add_bias_linear=False"
            )
        for linear in self.linears:
            weight = linear.weights[0]
            rows = [size * weight.element_size() for size in weight.shape]
            fits = all(row % _ALIGNED_BYTES == 0 for row in rows)
            if weight.is_cuda and not (weight.dtype == torch.bfloat16 and fits):
                raise ConfigError(
                    f"moe_grouped_gemm: experts of {list(weight.shape)} in {weight.dtype}: GPUs "
                    "have grouped products for bf16 and sizes that are multiples of 8; leave it "
                    "out"
                )

    def _lay_out(self) -> None:
        for linear in self.linears:
            linear.lay_out()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert or move the parameters, as ``to`` and ``bfloat16`` do, and keep them together."""
        done = super()._apply(fn, recurse)
        self._lay_out()
        return done

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run all experts; see megatron-core's ``SequentialMLP.forward``."""
        tokens, probs = permuted_local_hidden_states, permuted_probs
        if len(self.local_experts) == 1 or not len(tokens) or not self.are_as_built():
            alone: tuple[torch.Tensor, torch.Tensor | None]
            alone = super().forward(tokens, tokens_per_expert, probs)
            return alone
        if self.config.moe_apply_probs_on_input:
            tokens = (probs.unsqueeze(-1) * tokens).to(tokens.dtype)
            probs = torch.ones_like(probs)
        ends = self.ends_of(tokens, tokens_per_expert)
        first, second = (_without_bias(linear, ends) for linear in self.linears)
        expert = self.local_experts[0]
        output, _ = type(expert).forward(_Together(expert, first, second), tokens, probs)
        return output, None

    def are_as_built(self) -> bool:
        """True if no host has changed an expert: a grouped product calls none of their forwards."""
        first, second = self.linears
        kind = torch.nn.Parameter
        rows = zip(self.local_experts, first.layers, second.layers, strict=True)
        return product_is_own() and all(
            expert.linear_fc1 is one
            and expert.linear_fc2 is other
            and untouched(expert, self._kinds)
            and all(untouched(layer, self._kinds) for layer in (one, other))
            and all(type(layer._parameters.get("weight")) is kind for layer in (one, other))
            for expert, one, other in rows
        )

    def ends_of(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """The end of each expert's tokens, int32 on the device of ``tokens``."""
        if self.config.moe_pad_expert_input_to_capacity:  # equal parts: a graph has no copy to them
            count = len(self.local_experts)
            part = len(tokens) // count
            return torch.arange(1, count + 1, dtype=torch.int32, device=tokens.device) * part
        ends = tokens_per_expert.cumsum(0).to(torch.int32)
        return ends.to(tokens.device, non_blocking=True)


def _without_bias(
    linear: GroupedLinear, ends: torch.Tensor
) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
    """A linear layer as an expert calls it."""
    return lambda tokens: (linear(tokens, ends), None)
