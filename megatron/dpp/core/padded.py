"""Microbatches padded to few lengths at the model's door, so that CUDA graphs can replay them.

The first stage pads tokens, and every later one gets activations of the padded length. Causal
attention does not see what follows a row, and losses or logits are cut back to it: what the host's
forward step gets is as long as what it gave. Numbers are those of a host that pads its rows itself
and gives the padding no loss.

The documents of a packed row (``packed_seq_params``) get company: one of the padding, and empty
ones up to one of few numbers. Kernels learn the bounds on the device, and on the host the number
of documents and the longest length alone, which is the row's here.
"""

from __future__ import annotations

import bisect
import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from megatron.dpp.core.model import NOT_OF_TOKENS, gpt_of, rebound, tokens_changed

_FEWEST, _TIMES = 16, 4
"""Numbers of documents in a packed row are the least and its multiples by powers of this."""
_BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_PER_ROW: dict[str, Any] = {
    "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "total_tokens": None,
    "seq_idx": None, "pad_between_seqs": False,
}  # fmt: skip
"""What a packed row does not say, or says otherwise, when its documents fill it."""


def why_not_padded(chunks: Sequence[torch.nn.Module], config: Any, context_size: int) -> str | None:
    """The reason why rows of these chunks are not padded; None if they can be.

    Args:
        config: megatron-core's configuration of the model.
        context_size: ranks that share a sequence.
    """
    if any(gpt_of(chunk) is None for chunk in chunks):
        return "a chunk is no GPTModel, whose attention is causal"
    if config.num_moe_experts:
        return "routers would count padding"
    if config.mtp_num_layers:
        return "multi-token prediction reads behind a row"
    if context_size > 1:
        return "ranks share each sequence"
    return None


class PaddedRows:
    """Pads the rows of some chunks for a step.

    Args:
        chunks: each a GPT within its wrappers, for which :func:`why_not_padded` is None.
        lengths: ascending; a row that is longer than the last one is not padded.
        parts: ranks among which a sequence is divided between stages.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], lengths: Sequence[int], parts: int
    ) -> None:
        self._models = [model for chunk in chunks if (model := gpt_of(chunk)) is not None]
        self._lengths, self._parts = list(lengths), parts

    def bound(self) -> AbstractContextManager[None]:
        """Let the models take padded rows in the block."""
        return rebound((model, self._forward_of(model)) for model in self._models)

    def _forward_of(self, model: Any) -> Callable[..., Any]:
        own = model.forward
        names = tuple(inspect.signature(own).parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            length, padded = self._lengths_of(model, given)
            packed = given.get("packed_seq_params")
            stays = padded < max(1, length) or (padded == length and packed is None)
            if stays or any(given.get(name) is not None for name in NOT_OF_TOKENS):
                return own(*args, **kwargs)
            if packed is not None:
                packed = _filling(packed, padded)
                if packed is None:
                    return own(*args, **kwargs)
                given["packed_seq_params"] = packed
            output = own(**_padded(given, padded - length))
            return output[:, :length].contiguous() if model.post_process else output

        return forward

    def _lengths_of(self, model: Any, given: dict[str, Any]) -> tuple[int, int]:
        """Tokens of a row as the host gave it, and with padding. A stage that gets activations
        takes the length that the first one chose."""
        rows = given.get("input_ids" if model.pre_process else "labels")
        if rows is None:
            rows = given.get("input_ids")
        hidden = None if model.pre_process else model.decoder.input_tensor
        arrived = 0 if hidden is None else len(hidden) * self._parts
        if rows is None or rows.dim() != 2:
            return (0, 0) if model.post_process else (arrived, arrived)
        length = rows.shape[1]
        if not model.pre_process:
            return length, arrived
        place = bisect.bisect_left(self._lengths, length)
        return length, self._lengths[place] if place < len(self._lengths) else length


def _filling(packed: Any, tokens: int) -> Any:
    """A packed row's parameters whose documents fill ``tokens``; None where a row is more than its
    documents, one after the other.
    """
    bounds = [found for name in _BOUNDS if (found := getattr(packed, name, None)) is not None]
    alone = getattr(packed, "cp_group", None) is None and packed.qkv_format == "thd"
    if not (alone and bounds and all(each is bounds[0] for each in bounds)):
        return None
    number = _FEWEST
    while number < len(bounds[0]):  # its documents and one more
        number *= _TIMES
    filled = F.pad(bounds[0], (0, number + 1 - len(bounds[0])), value=tokens)
    told = _PER_ROW | dict.fromkeys(_BOUNDS[:2], filled)
    told |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), tokens)
    found = copy.copy(packed)
    vars(found).update((name, value) for name, value in told.items() if name in vars(packed))
    return found


def _padded(given: dict[str, Any], more: int) -> dict[str, Any]:
    """Arguments of rows with ``more`` tokens behind them, which no token before them sees."""
    wider = tokens_changed(given, lambda _, rows: F.pad(rows, (0, more)))
    if given.get("attention_mask") is not None:  # [b or 1, 1, s, s], True where it hides a key
        wider["attention_mask"] = F.pad(given["attention_mask"], (0, more, 0, more), value=True)
    return wider
