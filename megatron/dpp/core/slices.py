"""Attention across the slices of one row: a long sequence runs through a pipeline as several units.

A :class:`Unit` is a slice ``[begin, end)`` of a row of tokens. Its queries attend to the keys of
the row up to ``end``, so keys and values of earlier slices wait in a store (:class:`Keys`), and
later slices leave the gradients of theirs there. All of it happens within one autograd function:
the graph of a slice stays closed, and backwards, weight gradients and recompute need to know
nothing of other slices. Slices run forward in order and backward in reverse.

:class:`Slices` rebinds the attention and the rotary embeddings of a model for one step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import get_model_config

from megatron.dpp.core.model import attribute_of, balancing_of, decoder_block, rebound, unusual
from megatron.dpp.core.varlen import DocumentSpan, attend
from megatron.dpp.errors import ConfigError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of query [s, b, np, hn] to key and value [k, b, ng, hn]."""

_CAUSAL = ("causal", "padding_causal")
"""Names of the masks of causal attention."""


@dataclass(frozen=True)
class Unit:
    """One slice of a row of tokens.

    Args:
        row: number of the row, one group of units.
        begin, end: the tokens ``[begin, end)`` of the row.
        total: tokens of the row.
        starts: first token of each of the row's documents, ascending from 0. Attention leaves no
            document.
    """

    row: int
    begin: int
    end: int
    total: int
    starts: tuple[int, ...] = (0,)

    @property
    def is_cut(self) -> bool:
        """True if the row has other slices."""
        return self.end - self.begin < self.total

    @property
    def is_last(self) -> bool:
        """True for the row's last slice, whose backward is the first one."""
        return self.end == self.total

    @functools.cached_property
    def first_key(self) -> int:
        """The first token of the row that the unit's queries attend to."""
        return max(start for start in self.starts if start <= self.begin)

    @functools.cached_property
    def spans(self) -> tuple[DocumentSpan, ...]:
        """Each document's queries in the unit, and its keys from :attr:`first_key` on."""
        ends = (*self.starts[1:], self.total)
        found = []
        for start, stop in zip(self.starts, ends, strict=True):
            if stop > self.begin and start < self.end:
                end = min(stop, self.end)
                queries = max(start, self.begin) - self.begin, end - self.begin
                found.append(DocumentSpan(*queries, start - self.first_key, end - self.first_key))
        return tuple(found)

    @functools.cached_property
    def earlier_keys(self) -> float:
        """Keys of earlier slices to which the mean query of the unit attends."""
        first = self.spans[0]
        earlier = first.num_keys - first.num_queries
        return earlier * first.num_queries / (self.end - self.begin)

    @functools.cached_property
    def places(self) -> tuple[range, ...]:
        """The places of the tokens in their documents, one range for each document."""
        return tuple(range(at.num_keys - at.num_queries, at.num_keys) for at in self.spans)


class RowKeys:
    """Keys and values of one row in one layer, [total, b, ng, hn], and their gradients.

    Every view and every write has a version counter of its own, so that a later slice's keys do not
    invalidate what autograd keeps of an earlier one.
    """

    def __init__(self, total: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._kept = [each.new_empty(total, *each.shape[1:]) for each in (key, value)]
        self._grads: list[torch.Tensor] = []

    def put(self, unit: Unit, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a slice's keys and values."""
        for kept, new in zip(self._kept, (key, value), strict=True):
            kept.data[unit.begin : unit.end].copy_(new)

    def seen_by(self, unit: Unit) -> list[torch.Tensor]:
        """Views of the keys and values that a slice attends to."""
        return [kept.data[unit.first_key : unit.end] for kept in self._kept]

    def share(self, unit: Unit, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Leave the gradients of earlier slices' keys and values.

        Args:
            grads: of what :meth:`seen_by` gives.

        Returns:
            Gradients of the slice's own keys and values, with those that later slices have left.
        """
        num_earlier = unit.begin - unit.first_key
        own = [grad[num_earlier:] for grad in grads]
        if self._grads:
            own = [
                (new + kept[unit.begin : unit.end]).to(new.dtype)
                for new, kept in zip(own, self._grads, strict=True)
            ]
        if num_earlier:
            if not self._grads:
                wide = torch.promote_types(self._kept[0].dtype, torch.float32)
                self._grads = [torch.zeros_like(kept, dtype=wide) for kept in self._kept]
            for kept, new in zip(self._grads, grads, strict=True):
                kept[unit.first_key : unit.begin] += new[:num_earlier]
        return own

    @property
    def num_bytes(self) -> int:
        """Memory that the row takes."""
        return sum(each.nbytes for each in (*self._kept, *self._grads))

    @property
    def storages(self) -> set[int]:
        """Addresses of keys and values."""
        return {each.untyped_storage().data_ptr() for each in self._kept}


class Keys:
    """The store of one rank: rows by chunk, row and layer, from F to B of a row's first slice."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], dict[int, RowKeys]] = {}
        self.peak_bytes = 0
        """Most memory since :meth:`clear`, as far as its rows were freed."""

    def row(self, chunk: int, unit: Unit, layer: int, key: Any, value: Any) -> RowKeys:
        """The keys of a unit's row; they are allocated at its first slice."""
        rows = self._rows.setdefault((chunk, unit.row), {})
        if layer not in rows:
            if unit.begin:
                raise AssertionError(f"slice at {unit.begin} of row {unit.row} before its first")
            rows[layer] = RowKeys(unit.total, key, value)
        return rows[layer]

    def free(self, chunk: int, unit: Unit) -> None:
        """Forget a row whose slices have all run."""
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)  # it grows from one to the next
        self._rows.pop((chunk, unit.row), None)

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return sum(row.num_bytes for rows in self._rows.values() for row in rows.values())

    @property
    def storages(self) -> set[int]:
        """Addresses of the memory of all keys and values."""
        rows = (row for rows in self._rows.values() for row in rows.values())
        return set().union(*(row.storages for row in rows))

    def __len__(self) -> int:
        return len(self._rows)


class SlicedAttention(torch.autograd.Function):
    """One layer's attention of a slice; see the module."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        row: RowKeys, unit: Unit, kernel: Attend, wants_grad: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Keep keys and values, and attend. Without gradients (recompute's first run, evaluation)
        no graph is built.
        """
        row.put(unit, key, value)
        leaves = [query.detach(), *row.seen_by(unit)]
        if not wants_grad:
            return kernel(*leaves)
        with torch.enable_grad():
            output = kernel(*(leaf.requires_grad_() for leaf in leaves))
        ctx.nested, ctx.leaves, ctx.row, ctx.unit = output, leaves, row, unit
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the slice's own query, key and value."""
        dq, *seen = torch.autograd.grad(ctx.nested, ctx.leaves, gradient)
        dk, dv = ctx.row.share(ctx.unit, seen)
        ctx.nested = ctx.leaves = None
        return dq, dk, dv, None, None, None, None


def attend_in_slice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    row: RowKeys, unit: Unit, kernel: Attend,
) -> torch.Tensor:  # fmt: skip
    """A slice's attention: query [s, b, np, hn], its own key and value [s, b, ng, hn].

    Returns:
        What ``kernel`` returns.
    """
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return SlicedAttention.apply(query, key, value, row, unit, kernel, wants)  # type: ignore[no-any-return, no-untyped-call]


class Slices:
    """The attention layers and rotary embeddings of one rank's chunks, bound to units for a step.

    Args:
        chunks: the rank's model chunks, wrapped or bare, in chunk order.

    Raises:
        ConfigError: a layer's attention cannot be cut.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.keys = Keys()
        """Of the rows whose slices are under way."""
        self.unit: Unit | None = None
        """The slice that runs; None for a unit that is not cut."""
        self._chunk = 0
        self._forwards: list[tuple[Any, Callable[..., Any]]] = []
        most = 0
        for chunk in chunks:
            block = decoder_block(chunk)
            layers = block.layers if block is not None else ()
            most = max(most, len(layers))
            for number, layer in enumerate(layers):
                core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
                if core is None:
                    raise ConfigError(f"slices: {type(layer).__name__} has no self-attention")
                self._forwards.append((core, self._attention_of(core, number)))
            rotary = attribute_of(chunk, "rotary_pos_emb")
            if rotary is not None:
                self._forwards.append((rotary, _Table(rotary, lambda: self.unit)))

        config = get_model_config(chunks[0])
        groups = max(1, config.num_query_groups // config.tensor_model_parallel_size)
        element = config.params_dtype.itemsize
        self.keys_per_token: int = most * 2 * groups * config.kv_channels * (element + 4)
        """Bytes of keys, values and their gradients per token of a cut row, in one chunk."""

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """Let the model attend across slices in the block, in which no row is under way yet."""
        self.keys.clear()  # a step may have failed
        return rebound(self._forwards)

    @contextlib.contextmanager
    def running(self, chunk: int, unit: Unit) -> Iterator[None]:
        """Run F or B of one unit in the block; units that are not cut run as without slices."""
        before = self._chunk, self.unit
        self._chunk, self.unit = chunk, unit if unit.is_cut else None
        try:
            yield
        finally:
            self._chunk, self.unit = before

    def _attention_of(self, core: Any, layer: int) -> Callable[..., Any]:
        own, kernel = core.forward, _kernel_of(core)

        def forward(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            unit = self.unit
            if unit is None:
                return own(query, key, value, *rest, **options)
            if len(query) != unit.end - unit.begin:
                raise AssertionError(f"{len(query)} queries of a slice {unit}")
            row = self.keys.row(self._chunk, unit, layer, key, value)
            return attend_in_slice(query, key, value, row, unit, functools.partial(kernel, unit))

        return forward


class _Table:
    """The rotary embeddings of a unit's tokens, cut from one table: megatron-core's cache holds 32
    entries, and every slice has an offset of its own.
    """

    def __init__(self, rotary: Any, unit: Callable[[], Unit | None]) -> None:
        self._own, self._unit = rotary.forward, unit
        self._table: torch.Tensor | None = None

    def __call__(self, length: int, *rest: Any, **options: Any) -> torch.Tensor:
        unit = self._unit()
        if unit is None:
            return self._own(length, *rest, **options)  # type: ignore[no-any-return]
        if self._table is None or len(self._table) < unit.total:
            self._table = self._own(unit.total)
        assert self._table is not None
        parts = [self._table[at.start : at.stop] for at in unit.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # nothing waits for the device


def _kernel_of(core: Any) -> Callable[..., torch.Tensor]:
    """The attention of a module over a unit's keys: ``kernel(unit, query, key, value)``.

    Raises:
        ConfigError: it is none that is known to be causal attention and no more.
    """
    if "forward" in vars(core):
        raise ConfigError(f"slices: a host has replaced the forward of {type(core).__name__}")
    mask = getattr(core, "attn_mask_type", AttnMaskType.causal)
    name = mask if isinstance(mask, str) else mask.name  # Transformer Engine's is a text
    if name not in _CAUSAL:
        raise ConfigError(f"slices: {type(core).__name__} attends with the mask {name}")
    if any(kind.__module__.startswith("transformer_engine") for kind in type(core).__mro__):
        return _by_engine(core)
    if not isinstance(core, DotProductAttention) and not getattr(core, "may_be_sliced", False):
        raise ConfigError(
            f"slices: {type(core).__name__} is not known to be plain causal attention: use "
            "megatron-core's DotProductAttention or Transformer Engine's"
        )
    scale = float(core.softmax_scale)
    if isinstance(core, DotProductAttention) and core.config.apply_query_key_layer_scaling:
        scale *= core.layer_number
    drops = getattr(core, "attention_dropout", None)
    share = float(drops.p if drops is not None else core.dropout)

    def kernel(unit: Unit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dropout = share if core.training else 0.0
        with _random_draws(core.config, dropout):
            return attend(q, k, v, unit.spans, scale=scale, dropout=dropout)

    return kernel


def _random_draws(config: Any, dropout: float) -> contextlib.AbstractContextManager[None]:
    """The random state from which attention draws, as in megatron-core's."""
    if dropout > 0.0 and not config.sequence_parallel:
        fork: contextlib.AbstractContextManager[None]
        fork = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork
    return contextlib.nullcontext()


def _by_engine(core: Any) -> Callable[..., torch.Tensor]:
    """Transformer Engine's attention, through megatron-core's own class."""
    own, drops = core.forward, float(core.config.attention_dropout)

    def kernel(unit: Unit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if len(unit.spans) > 1:
            scale = getattr(core.config, "softmax_scale", None) or q.shape[-1] ** -0.5
            with _random_draws(core.config, dropout := drops if core.training else 0.0):
                return attend(q, k, v, unit.spans, scale=scale, dropout=dropout)
        mask = AttnMaskType.causal if len(q) == len(k) else AttnMaskType.causal_bottom_right
        output: torch.Tensor = own(q, k, v, None, attn_mask_type=mask)
        return output

    return kernel


def why_not_sliced(config: Any) -> str | None:
    """The reason why a model of this config cannot be cut; None if it can."""
    reasons = unusual(config, _USUAL)
    if config.num_moe_experts:
        of_all = sorted(balancing_of(config) & {"seq_aux_loss", "global_aux_loss"})
        reasons += [f"moe_router_load_balancing_type={kind!r}" for kind in of_all]
    return f"{reasons[0]} does not work with slices" if reasons else None


_USUAL: dict[str, Any] = {
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "context_parallel_size": 1,
    "cuda_graph_impl": "none",
    "window_size": None,
    "softmax_type": "vanilla",
    "qk_clip": False,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
    "overlap_moe_expert_parallel_comm": False,
    "experimental_attention_variant": None,
    "num_microbatches_with_partial_activation_checkpoints": None,
}
"""Settings of megatron-core with the value that slices can honour: other attention than plain
causal one, what counts on whole sequences, and what moves activations.
"""
