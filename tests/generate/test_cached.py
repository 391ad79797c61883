"""Keys and values that are kept between forwards give what one forward over all tokens gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.generate import cached
from megatron.dpp_train.generate.cached import Cache, CachedAttention, step_params
from megatron.dpp_train.model import packed

HEADS, GROUPS, SIZE, SCALE = 4, 2, 8, 0.7
LENGTHS = (3, 5, 2)
"""Tokens of each prompt; two more of each sequence follow."""


def drawn() -> list[list[torch.Tensor]]:
    """Query, key and value of each sequence, [tokens, 1, heads, size]."""
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(n + 2, 1, k, SIZE, generator=generator) for k in (HEADS, GROUPS, GROUPS)]
        for n in LENGTHS
    ]


def whole(tensors: list[torch.Tensor]) -> torch.Tensor:
    starts = torch.tensor([0, len(tensors[0])], dtype=torch.int32)
    documents = packed.Documents(starts, len(tensors[0]))
    return packed.attend(*tensors, documents, scale=SCALE)  # type: ignore[arg-type]


def attention(**changes: Any) -> CachedAttention:
    config: Any = SimpleNamespace(
        softmax_scale=SCALE, kv_channels=SIZE, window_size=None, window_attn_skip_freq=None
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return CachedAttention(SimpleNamespace(config=config, softmax_offset=None), 0)


def step(sequences: list[list[torch.Tensor]], spans: list[tuple[int, int]], cache: Cache,
         *, first: bool) -> list[torch.Tensor]:  # fmt: skip
    """One forward over a span of each sequence; the outputs of each."""
    rows = [[each[begin:end] for each in one] for one, (begin, end) in
            zip(sequences, spans, strict=True)]  # fmt: skip
    sizes = [end - begin for begin, end in spans]
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int()
    places = torch.cat([torch.arange(*span) for span in spans])
    longest = max(end for _, end in spans)
    params = step_params(starts, places, longest, cache, first=first)
    assert params.max_seqlen_q == cache.room, "one rotary table for all steps"
    joined = [torch.cat(each) for each in zip(*rows, strict=True)]
    output = attention()(*joined, None, packed_seq_params=params)
    return list(output.split(sizes))


def test_each_token_sees_its_own_sequence_up_to_itself() -> None:
    """Also after sequences have ended, whose rows others take."""
    sequences, cache = drawn(), Cache(7)
    expected = [whole(one) for one in sequences]
    found = step(sequences, [(0, n) for n in LENGTHS], cache, first=True)
    for one, other, length in zip(found, expected, LENGTHS, strict=True):
        torch.testing.assert_close(one, other[:length])
    found = step(sequences, [(n, n + 1) for n in LENGTHS], cache, first=False)
    for one, other, length in zip(found, expected, LENGTHS, strict=True):
        torch.testing.assert_close(one, other[length : length + 1])
    left = [2, 0]
    cache.keep(torch.tensor(left))
    spans = [(LENGTHS[i] + 1, LENGTHS[i] + 2) for i in left]
    found = step([sequences[i] for i in left], spans, cache, first=False)
    for one, number in zip(found, left, strict=True):
        torch.testing.assert_close(one, expected[number][-1:])


@pytest.mark.parametrize(("given", "scale"), [(SCALE, SCALE), (None, SIZE**-0.5)])
def test_scores_have_the_models_scale_or_the_usual_one(given: float | None, scale: float) -> None:
    (one, *_) = drawn()
    starts = torch.tensor([0, len(one[0])], dtype=torch.int32)
    params = packed.packed_params(starts, len(one[0]))
    found = attention(softmax_scale=given)(*one, None, packed_seq_params=params)
    documents = packed.Documents(starts, len(one[0]))
    torch.testing.assert_close(found, packed.attend(*one, documents, scale=scale))  # type: ignore[arg-type]


def test_attention_of_another_kind_is_refused() -> None:
    layer = SimpleNamespace(self_attention=SimpleNamespace())
    with pytest.raises(ConfigError, match="take plain attention alone"):
        cached.use_cache(SimpleNamespace(decoder=SimpleNamespace(layers=[layer])))
