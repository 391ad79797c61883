"""Packed sequences: several documents in one microbatch, each with its own positions and attention.

A forward step passes megatron-core's ``PackedSeqParams`` in the format ``thd`` to the model, made
by :func:`packed_params`. Transformer Engine's layers take it as it is. The local layers are built
from the attention here, as megatron-core's own refuses packed sequences.

On GPUs nothing here reads a tensor on the host, so that a task can be launched ahead of its input.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron.dpp.core.varlen import KERNELS, Bounds, kernels_for
from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model import context
from megatron.dpp_train.model.masks import mark_softmax_offset, masked

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
"""Masks of causal attention."""
_OWN_FORMAT = "documents"
"""Format of the parameters between the attention classes here: [t, 1, heads, size], with rotary
embeddings of each token.
"""


def packed_params(
    cu_seqlens: torch.Tensor, max_seqlen: int, documents: Documents | None = None
) -> PackedSeqParams:
    """The parameters of one packed microbatch.

    Args:
        cu_seqlens: int32 [n + 1], the first token of each of n documents, and the number of tokens.
            Padding is a document, too.
        max_seqlen: tokens of the longest document.
        documents: what :func:`documents_of` gives for them, if not the plain one.
    """
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=int(max_seqlen),
        max_seqlen_kv=int(max_seqlen),
    )
    if documents is not None:
        params._documents = documents
    return params


def positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The position of each of ``tokens`` tokens in its document, [tokens]."""
    return Documents(cu_seqlens, tokens).positions(tokens)


class Documents:
    """The documents of one packed microbatch, with tensors that all its layers share.

    Args:
        starts: int32 [n + 1], see :func:`packed_params`.
        longest: tokens of the longest document.
    """

    def __init__(self, starts: torch.Tensor, longest: int) -> None:
        self.starts, self.longest = starts, longest
        self._positions: torch.Tensor | None = None
        self._allowed: dict[tuple[bool, int | None], torch.Tensor] = {}
        self._bounds: list[int] = []

    def positions(self, tokens: int) -> torch.Tensor:
        """The position of each token in its document."""
        if self._positions is None:
            places = self._places(tokens)
            self._positions = (places - self.starts[self._numbers(places)]).long()
        return self._positions

    def allowed(self, tokens: int, *, causal: bool, window: int | None = None) -> torch.Tensor:
        """The mask of one attention over all documents, [tokens, tokens]: True where a query may
        see a key.

        Args:
            window: tokens before a query that it may see; None for all.
        """
        kind = causal, window
        if kind not in self._allowed:
            places = self._places(tokens)
            numbers = self._numbers(places)
            same = numbers[:, None] == numbers[None, :]
            if causal:
                same &= places[:, None] >= places
            if window is not None:
                same &= places[:, None] <= places + window
            self._allowed[kind] = same
        return self._allowed[kind]

    def bounds(self, tokens: int) -> list[tuple[int, int]]:
        """First and last token of each document, read on the host.

        Raises:
            ConfigError: the documents are not those of this microbatch.
        """
        if not self._bounds:
            bounds = [int(bound) for bound in self.starts.tolist()]
            lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
            wrong = (bounds[0], bounds[-1]) != (0, tokens) or min(lengths, default=0) < 0
            if wrong or max(lengths, default=0) > self.longest:
                raise ConfigError(
                    f"cu_seqlens {bounds} with max_seqlen {self.longest} and {tokens} tokens: it "
                    "must grow from 0 to the number of tokens, and max_seqlen must hold the "
                    "longest document"
                )
            self._bounds = bounds
        return list(itertools.pairwise(self._bounds))

    def _places(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens, dtype=self.starts.dtype, device=self.starts.device)

    def _numbers(self, places: torch.Tensor) -> torch.Tensor:
        """The number of each token's document; tokens after the last one count as one more."""
        return torch.searchsorted(self.starts[1:], places, right=True)


def documents_of(params: PackedSeqParams) -> Documents:
    """The documents of a packed microbatch, the same object for all layers of a chunk."""
    found = getattr(params, "_documents", None)
    if found is None:
        found = Documents(params.cu_seqlens_q, params.max_seqlen_q)
        params._documents = found
    return found


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """megatron-core's self-attention for packed sequences, too: each token gets the rotary
    embedding of its position without a wait for the device.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """Attend; see megatron-core's ``Attention.forward``."""
        if packed_seq_params is not None:
            config = self.config
            parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
            parts *= config.context_parallel_size
            places = documents_of(packed_seq_params).positions(hidden_states.shape[0] * parts)
            if config.context_parallel_size > 1:
                places = context.own_part(places, parallel_state.get_context_parallel_group())
            if isinstance(rotary_pos_emb, torch.Tensor):
                rotary_pos_emb = rotary_pos_emb[places]
            elif rotary_pos_emb is not None:
                rotary_pos_emb = tuple(each[places] for each in rotary_pos_emb)
            packed_seq_params = copy.copy(packed_seq_params)  # shares the documents
            packed_seq_params.qkv_format = _OWN_FORMAT
        return super().forward(
            hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params, **options,
        )  # fmt: skip


class PackedDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's local attention, which attends to each document of a packed microbatch
    alone.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            mark_softmax_offset(self.softmax_offset)

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
        """Attend; see megatron-core's ``DotProductAttention.forward``."""
        attend = super().forward
        if packed_seq_params is None:
            output: torch.Tensor = attend(query, key, value, attention_mask, *args, **options)
            return output
        q, k, v = as_packed(query, key, value)
        bounds = documents_of(packed_seq_params).bounds(len(q))
        parts = [
            attend(q[begin:end], k[begin:end], v[begin:end], None, *args, **options)
            for begin, end in bounds
            if end > begin
        ]
        return torch.cat(parts)


def as_packed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value of a packed microbatch as [t, 1, heads, size].

    Raises:
        ConfigError: the microbatch has several rows.
    """
    packed = [tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in tensors]
    if packed[0].shape[1] != 1:
        raise ConfigError(
            f"packed sequences with --micro-batch-size {packed[0].shape[1]}: a packed microbatch "
            "is one row, so --micro-batch-size must be 1"
        )
    return packed


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scale: float,
    dropout: float = 0.0,
    mask_type: AttnMaskType = AttnMaskType.causal,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention within each document; query [t, 1, np, hn], key and value [t, 1, ng, hn].

    A GPU runs the first of these that is there: PyTorch's variable-length attention,
    flash-attention's, PyTorch's attention with a mask. A CPU attends to one document at a time.

    Args:
        window, sinks: see ``masks``; with one of them a mask is used.

    Returns:
        [t, 1, np * hn].
    """
    causal, tokens = mask_type in CAUSAL, len(query)
    if window is not None or sinks is not None:
        allowed = documents.allowed(tokens, causal=causal, window=window)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = masked(q, k, v, allowed, scale=scale, dropout=dropout, sinks=sinks)
        return output.permute(2, 0, 1, 3).reshape(tokens, 1, -1)
    names = kernels_for(query, dropout)
    if names:
        q, k, v = (tensor.squeeze(1) for tensor in (query, key, value))
        starts, longest = documents.starts, documents.longest
        bounds = Bounds(starts, starts, longest, longest)
        output = KERNELS[names[0]](q, k, v, bounds, causal=causal, scale=scale, dropout=dropout)
        return output.reshape(tokens, 1, -1)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    sdpa = functools.partial(
        F.scaled_dot_product_attention, dropout_p=dropout, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    if query.is_cuda:
        output = sdpa(q, k, v, attn_mask=documents.allowed(tokens, causal=causal))
    else:
        parts = [
            sdpa(*(each[:, :, begin:end] for each in (q, k, v)), is_causal=causal)
            for begin, end in documents.bounds(tokens)
            if end > begin
        ]
        output = torch.cat(parts, dim=2)
    return output.permute(2, 0, 1, 3).reshape(tokens, 1, -1)
