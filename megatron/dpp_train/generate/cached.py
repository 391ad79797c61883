"""Attention that keeps keys and values between forwards, for generation.

The tokens of a forward are packed into one row, whatever their sequences: first all tokens of the
prompts, then one token of each sequence. Sequences of unlike length need no padding. Positions,
rotary embeddings and the first forward are those of packed sequences (``packed``).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.model import packed
from megatron.dpp_train.model.masks import masked, window_of


class Cache:
    """Keys and values of several sequences.

    Args:
        room: tokens that each sequence may have.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put(
        self, layer: int, rows: torch.Tensor, places: torch.Tensor, *new: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the key and the value of each token.

        Args:
            rows, places: sequence and position of each token, [t].
            new: key and value, [t, groups, size].

        Returns:
            All keys and values of the layer, [sequences, room, groups, size].
        """
        if layer not in self._layers:
            count = int(rows.max()) + 1
            key, value = (each.new_zeros(count, self.room, *each.shape[1:]) for each in new)
            self._layers[layer] = key, value
        for kept, each in zip(self._layers[layer], new, strict=True):
            kept[rows, places] = each
        return self._layers[layer]

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all sequences but these, which get the numbers 0, 1, ..."""
        for layer, (key, value) in self._layers.items():
            self._layers[layer] = key[rows], value[rows]


class Step(packed.Documents):
    """The tokens of one forward, and the cache that they read and extend.

    Args:
        starts: int32 [n + 1], the first token of each sequence, and the number of tokens.
        longest: tokens of the longest sequence, with those in the cache.
        places: position of each token, [t].
        first: True for the forward of the prompts.
    """

    def __init__(
        self, starts: torch.Tensor, longest: int, places: torch.Tensor, cache: Cache, *, first: bool
    ) -> None:
        super().__init__(starts, longest)
        self._positions = places
        self._rows = self._numbers(self._places(len(places))).long()
        self._cache, self._first = cache, first

    def attend(
        self,
        layer: int,
        scale: float,
        *tensors: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer to the tokens before, which are in the cache.

        Args:
            window, sinks: see ``model.masks``.
            tensors: query [t, 1, heads, size], key and value [t, 1, groups, size].

        Returns:
            [t, 1, heads * size].
        """
        query, key, value = tensors
        places = self.positions(len(query))
        kept = self._cache.put(layer, self._rows, places, key[:, 0], value[:, 0])
        if self._first:
            return packed.attend(query, key, value, self, scale=scale, window=window, sinks=sinks)
        keys, values = (each[:, : self.longest].transpose(1, 2) for each in kept)
        seen = torch.arange(self.longest, device=places.device) <= places[:, None]
        if window is not None:
            seen &= torch.arange(self.longest, device=places.device) >= places[:, None] - window
        output = masked(
            query.transpose(1, 2), keys, values, seen[:, None, None], scale=scale, sinks=sinks
        )
        return output.reshape(len(query), 1, -1)


class CachedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention in place of a layer's own: with a :class:`Step` it reads and extends the
    cache, else it attends to packed sequences.
    """

    def __init__(self, own: Any, layer: int) -> None:
        super().__init__(config=own.config)
        self._layer = layer
        self._scale = own.config.softmax_scale or own.config.kv_channels**-0.5
        self._window = window_of(own.config, layer + 1)
        self._sinks = own.softmax_offset

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> torch.Tensor:
        """Attend; see megatron-core's ``DotProductAttention.forward``."""
        q, k, v = packed.as_packed(query, key, value)
        documents = packed.documents_of(packed_seq_params)
        if isinstance(documents, Step):
            return documents.attend(
                self._layer, self._scale, q, k, v, window=self._window, sinks=self._sinks
            )
        return packed.attend(
            q, k, v, documents, scale=self._scale, window=self._window, sinks=self._sinks
        )


def use_cache(model: Any) -> None:
    """Let the attention of a GPT model read and extend a cache.

    Raises:
        ConfigError: its attention is of another kind.
    """
    for number, layer in enumerate(model.decoder.layers):
        attention = layer.self_attention
        if not isinstance(attention, packed.PackedSelfAttention):
            raise ConfigError(
                f"{type(attention).__name__}: generate and evaluate take plain attention alone"
            )
        attention.core_attention = CachedAttention(attention.core_attention, number)


def step_params(
    starts: torch.Tensor, places: torch.Tensor, longest: int, cache: Cache, *, first: bool
) -> PackedSeqParams:
    """The ``packed_seq_params`` of a forward; see :class:`Step`."""
    step = Step(starts, longest, places, cache, first=first)
    return packed.packed_params(starts, cache.room, step)  # one rotary table for all steps
