"""Transformer Engine's linear layers as a host built them, whose weight gradients wait for a W.

Their autograd functions ask the ``wgrad_store`` of their module if weight gradients wait, and put
the product and its operands there. A forward of such a module runs here with a store of ours, and
with other tensors over the memory of its weights (:class:`_Aside`). Autograd thus ends at those:
neither its accumulators nor DistributedDataParallel's hooks on the real weights run within B,
however the host built them. The W computes the product, and then runs the hook as B would have.

A bias that the product adds has its gradient from the same product; a bias that is added outside of
the product stays with B.

This holds for Transformer Engine 2.7 to 2.20 by its sources.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_te_version, is_te_min_version

from megatron.dpp.core import compat
from megatron.dpp.core.wgrad import accumulate
from megatron.dpp.core.wgrad.deferrable import (
    NODE,
    Deferrable,
    LayerWork,
    WaitingTensor,
    wants_leaves,
)
from megatron.dpp.core.wgrad.own_way import is_written_in, why_weight
from megatron.dpp.memory import tensors_in

SINCE = "2.7.0"
"""The first version with a ``wgrad_store``."""
_ASIDES = "dpp_asides"
"""Attribute of a parameter that a capture computes with: what stood for it there."""
_OVERLAPS = (
    *("ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_ag_fprop", "ub_overlap_rs_dgrad"),
    *("ub_bulk_dgrad", "ub_bulk_wgrad"),
)


def weights_of(module: Any) -> list[str]:
    """The names of a layer's weights: one, or one of each expert."""
    if "num_gemms" in vars(module):
        return [f"weight{number}" for number in range(module.num_gemms)]
    return list(getattr(module, "weight_names", ["weight"]))


def _biases_of(module: Any, weights: list[str]) -> list[str]:
    """The names of the trained biases that a layer's product adds."""
    if not module.use_bias or module.return_bias or getattr(module, "gemm_bias_unfused_add", False):
        return []
    names = [name.replace("weight", "bias") for name in weights]
    return [name for name in names if module._parameters[name].requires_grad]


def _kinds() -> tuple[Any, ...]:
    package = sys.modules.get("transformer_engine.pytorch")
    names = ("Linear", "LayerNormLinear", "GroupedLinear")
    return tuple(getattr(package, name) for name in names if hasattr(package, name))


def _is_written(kind: Any, kinds: tuple[Any, ...]) -> bool:
    """True if this is a class of Transformer Engine, or megatron-core's of it, as written."""
    for part in kind.__mro__:
        home = sys.modules.get(part.__module__)
        function = getattr(home, f"_{part.__name__}", None)  # of autograd
        owners = [part, function] if isinstance(function, type) else [part]
        ways = [
            getattr(owner, way)
            for owner in owners
            for way in ("forward", "backward")
            if way in vars(owner)
        ]
        named = getattr(home, part.__name__, None) is part
        if not named or not all(is_written_in(way, home) for way in ways):
            return False
        if part in kinds:
            return True
        if part.__module__ != compat.TE_LAYERS:
            return False
    return False


class _Aside(torch.autograd.Function):
    """Tensors over the memory of a layer's weights and biases, for its product. Their gradients
    end here.
    """

    @staticmethod
    def forward(ctx: Any, node: torch.Tensor, layer: TELayer, *given: Any) -> Any:
        ctx.layer, ctx.num_weights = layer, len(layer.weights)
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for (parameter,) in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        biases = gradients[ctx.num_weights :]
        for bias, gradient in zip(ctx.layer.biases, biases, strict=True):
            if gradient is not None:
                ctx.layer.store.add(bias, [gradient])
        return (None,) * (2 + len(gradients))


class _Store:
    """In the place of a module's ``wgrad_store``."""

    def __init__(self, layer: TELayer) -> None:
        self._layer = layer

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: list[Any], product: Callable[..., Any]) -> None:
        """Take what a backward pass leaves: [input, output gradient, weight gradients of experts]
        and the product of these.
        """
        layer = self._layer
        if layer.grouped and not layer.fused:
            tensors[2] = tensors[2][0].new_empty(0)  # the W takes memory for gradients, not B
        if wants_leaves():
            layer.leave(_Deferred(layer, [_Product.of(tensors, product)]))
        elif layer.fused:
            product(*tensors)  # it adds by itself, whatever the pass asks for


class TELayer(Deferrable):
    """A linear layer of Transformer Engine's, or one of all experts."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        module = self.module
        self._names = weights_of(module)
        self.weights = [module._parameters[name] for name in self._names]
        biases = _biases_of(module, self._names)
        self._names += biases
        self.parameters = [module._parameters[name] for name in self._names]
        self.biases: list[Any] = [module._parameters[name] for name in biases]
        self.fused = bool(module.fuse_wgrad_accumulation)
        self.grouped = "num_gemms" in vars(module)
        self.adds_alone = self.fused and not self.grouped and not biases and len(self.weights) == 1
        """A W is one product that adds to one weight, and nothing else."""
        self.adjacent: accumulate.Adjacent | None = None
        self._store = _Store(self)
        self._asides: dict[str, Any] = {}

    @property
    def places(self) -> Sequence[int]:
        """The place of each weight's gradient among those of all."""
        return range(len(self.weights)) if self.adjacent is None else self.adjacent.places

    @staticmethod
    def takes(module: torch.nn.Module) -> bool:
        return getattr(module, "wgrad_store", None) is not None

    @staticmethod
    def why_not(module: Any, uses: Callable[[torch.Tensor], int]) -> str | None:
        weights = [module._parameters.get(name) for name in weights_of(module)]
        if not all(weight is None or weight.requires_grad for weight in weights):
            return ""
        kinds, config = _kinds(), getattr(module, "config", None)
        if not isinstance(module, kinds) or not _is_written(type(module), kinds):
            return f"its class is {type(module).__name__}"
        if "forward" in vars(module):
            return "its forward was replaced"
        if not is_te_min_version(SINCE):
            return f"Transformer Engine {get_te_version()} is older than {SINCE}"
        if any(getattr(module, name, False) for name in _OVERLAPS):
            return "tp_comm_overlap computes it with its communication"
        offloads = ("cpu_offloading", "fine_grained_activation_offloading")
        if any(getattr(config, name, False) for name in offloads):
            return "activations are offloaded"
        if any(getattr(config, name, None) for name in ("fp8", "fp4")):
            return "it is faster there in 8 bit, and was not timed in 4"
        if compat.te_debugs():
            return "Transformer Engine's debug mode is on"
        names = weights_of(module)
        if any(name not in module._parameters for name in names) or names[0][:6] != "weight":
            return "its weight is a part of another"
        return next(filter(None, (why_weight(module, uses, name) for name in names)), None)

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Let the module's forwards defer for one step."""
        inner = self.module.forward
        self._asides = self._aside(self.parameters)
        if self.grouped and not self.fused:
            self.adjacent = accumulate.Adjacent.of(self.weights)
        self.module.forward = lambda *args, **options: self._forward(inner, args, options)
        try:
            yield
        finally:
            del self.module.forward
            self._asides = {}

    def _aside(self, parameters: Sequence[Any]) -> dict[str, Any]:
        """Tensors to compute with in the place of these parameters, by name."""
        with torch.enable_grad():
            given = _Aside.apply(NODE, self, *((p,) for p in parameters))  # type: ignore[no-untyped-call]
        for tensor, parameter in zip(given, parameters, strict=True):
            tensor.__dict__.update(parameter.__dict__)  # Megatron's marks, and main_grad
        return dict(zip(self._names, given, strict=True))

    def _forward(self, inner: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        module = self.module
        table = module._parameters
        given = [table[name] for name in self._names]
        value = next(iter((*args, *options.values())))
        # Where all layers before it are frozen, none waits for its B.
        leads = isinstance(value, torch.Tensor) and value.requires_grad
        if not (leads and self.defers(value, given)):
            return inner(*args, **options)
        asides = self._asides
        if given[0] is not self.parameters[0]:  # in a capture, which needs its own
            asides = self._aside(given)
            vars(given[0]).setdefault(_ASIDES, []).append(asides)
        own, vars(module)["wgrad_store"] = vars(module)["wgrad_store"], self._store
        table.update(asides)
        try:
            return inner(*args, **options)
        finally:
            table.update(zip(self._names, given, strict=True))
            vars(module)["wgrad_store"] = own


class _Product(NamedTuple):
    """The product and operands that one call's backward has left."""

    tensors: list[Any]
    compute: Callable[..., Any]
    kept: list[WaitingTensor]
    num_bytes: int

    @classmethod
    def of(cls, tensors: list[Any], compute: Callable[..., Any]) -> _Product:
        kept = [WaitingTensor(tensor) for tensor in tensors_in(tensors[:2])]
        return cls(tensors, compute, kept, sum(tensor.num_bytes for tensor in kept))


class _Deferred(LayerWork):
    @torch.no_grad()
    def compute(self) -> None:
        layer = self.layer
        sums: list[torch.Tensor | None] = []
        for each in self.products:
            for kept in each.kept:
                kept.get(layer.name)
            if layer.adds_alone:
                each.compute(*each.tensors)
                continue
            sums = [_sum(*pair) for pair in zip_longest(sums, self._gradients(each))]
        for weight in layer.weights if layer.fused else ():
            layer.store.add(weight, [])
        if layer.adjacent is not None:
            layer.adjacent.add(sums.pop(0))
        known = layer.biases if layer.fused or layer.adjacent is not None else layer.parameters
        for parameter in known if sums else ():
            gradient = sums.pop(0)
            if gradient is not None:
                layer.store.add(parameter, [gradient])

    def _gradients(self, product: _Product) -> list[torch.Tensor | None]:
        """Of the weights, unless they were added: in one tensor where they are adjacent. And of the
        biases, None where B had them.
        """
        layer, (given, gradient, *into) = self.layer, product.tensors
        weights: list[Any] = []
        if layer.grouped and not layer.fused:
            packed = into[0].new_empty((len(layer.weights), *layer.weights[0].shape))
            weights = [packed[place] for place in layer.places]
            into = [weights]
        first, second, *_ = product.compute(given, gradient, *into)
        if layer.adjacent is not None:
            weights = [packed]
        elif not (layer.grouped or layer.fused):
            weights = [first]
        biases = list(second or ()) if layer.grouped else [second]
        return [*weights, *(None if b is None or not b.numel() else b for b in biases)]


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


@contextmanager
def adding(modules: Iterable[Any]) -> Iterator[None]:
    """Make modules add weight gradients to ``main_grad``, which they overwrite in an iteration's
    first microbatch and a graph would overwrite in all.
    """
    firsts = [module for module in modules if getattr(module, "is_first_microbatch", False)]
    for module in firsts:
        module.is_first_microbatch = False
    try:
        yield
    finally:
        for module in firsts:
            module.is_first_microbatch = True
