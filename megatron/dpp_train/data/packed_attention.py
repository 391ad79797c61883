"""Attention of megatron-core's local layers over packed rows, each document by itself.

Transformer Engine's layers take packed rows as they are. megatron-core's local attention refuses
them; :class:`PackedDotProductAttention` stands in its place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.core.models import backends
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron.dpp.core.varlen import DocumentBounds, attend_documents, can_take


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's parameters of one packed row, with the documents' bounds on the host.

    Args:
        bounds: first token of each document with its padding, and the row's end.
    """

    bounds: tuple[int, ...] = ()

    @classmethod
    def of(cls, starts: torch.Tensor, bounds: tuple[int, ...]) -> PackedRow:
        """The parameters of a row; ``starts`` are ``bounds`` as int32 on the device."""
        longest = max(end - begin for begin, end in itertools.pairwise(bounds))
        return cls(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            cu_seqlens_q_padded=starts,
            cu_seqlens_kv_padded=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            bounds=bounds,
        )


class PackedDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's local attention, for packed rows too: a GPU's kernel for documents of unlike
    length where one can take the layer, otherwise one document after the other."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend; see megatron-core's ``DotProductAttention.forward``. The tensors of a packed row
        are [t, heads, head size], its result [t, 1, hidden]."""
        attend = super().forward
        if packed_seq_params is None:
            found: torch.Tensor = attend(query, key, value, attention_mask, *args, **options)
            return found
        if self._is_plain and can_take(query, self._dropout):
            starts, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            bounds = DocumentBounds(starts, starts, longest, longest)
            output = attend_documents(query, key, value, bounds, scale=self.softmax_scale)
            return output.reshape(len(query), 1, -1)
        ends = getattr(packed_seq_params, "bounds", ()) or packed_seq_params.cu_seqlens_q.tolist()
        q, k, v = (tensor.unsqueeze(1) for tensor in (query, key, value))
        parts = [
            attend(q[begin:end], k[begin:end], v[begin:end], None, *args, **options)
            for begin, end in itertools.pairwise(ends)
            if end > begin
        ]
        return torch.cat(parts)

    @property
    def _dropout(self) -> float:
        return float(self.config.attention_dropout) if self.training else 0.0

    @property
    def _is_plain(self) -> bool:
        """True for causal attention without a window or a further logit, which kernels know."""
        return (
            self.attn_mask_type == AttnMaskType.causal
            and self.config.window_size is None
            and self.softmax_offset is None
            and not self.config.apply_query_key_layer_scaling
        )


@contextlib.contextmanager
def for_local_layers() -> Iterator[None]:
    """Let models that are built in the block have local layers that take packed rows."""
    with mock.patch.object(backends, "DotProductAttention", PackedDotProductAttention):
        yield
