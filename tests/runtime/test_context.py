"""A row of tokens cut over context-parallel ranks gives what the whole row gives."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp_train.model import context, packed
from megatron.dpp_train.model.layers import SdpaAttention
from megatron.dpp_train.model.packed import PackedSelfAttention, packed_params

TOKENS, HEADS, GROUPS, SIZE = 24, 4, 2, 8
SCALE = 0.3


def places(rank: int, ranks: int) -> list[int]:
    """Tokens of a rank: an early and a late chunk, so that all ranks have as much to do."""
    size = TOKENS // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return [*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]


class Ranks:
    """Ranks that hold parts of known rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self._number, self._rows = number, list[torch.Tensor]()
        monkeypatch.setattr(context, "gather_from_sequence_parallel_region", self._gather)

    def group(self, rank: int) -> Any:
        return SimpleNamespace(rank=lambda: rank, size=lambda: self._number)

    def groups(self) -> list[Any]:
        return [self.group(rank) for rank in range(self._number)]

    def part(self, row: torch.Tensor, rank: int) -> torch.Tensor:
        self._rows.append(row)
        return row[places(rank, self._number)]

    def _gather(self, part: torch.Tensor, group: Any) -> torch.Tensor:
        """The parts of all ranks, one behind the other."""
        own = places(group.rank(), self._number)
        (row,) = {id(row): row for row in self._rows if torch.equal(row[own], part)}.values()
        return torch.cat([row[places(rank, self._number)] for rank in range(self._number)])


def drawn() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(TOKENS, 1, n, SIZE, generator=generator) for n in (HEADS, GROUPS, GROUPS)]


def whole(tensors: list[torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
    """Attention of the whole row under a mask."""
    q, k, v = (each.permute(1, 2, 0, 3) for each in tensors)
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=SCALE, enable_gqa=True
    )
    return output.permute(2, 0, 1, 3).reshape(TOKENS, 1, -1)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_row_is_cut_and_put_together_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, row = Ranks(monkeypatch, number), torch.arange(TOKENS)
    for rank, group in enumerate(ranks.groups()):
        assert context.own_part(row, group).tolist() == places(rank, number)
        assert torch.equal(context.gathered(ranks.part(row, rank), group), row)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_rank_attends_as_its_part_of_the_whole_row(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, tensors = Ranks(monkeypatch, number), drawn()
    expected = whole(tensors, CAUSAL)
    for rank, group in enumerate(ranks.groups()):
        parts = [ranks.part(each, rank) for each in tensors]
        found = context.attend(*parts, group, scale=SCALE)
        torch.testing.assert_close(found, expected[places(rank, number)])
        dropped = context.attend(*parts, group, scale=SCALE, dropout=0.5)
        assert not torch.allclose(dropped, found)


def attention(group: Any, **changes: Any) -> SdpaAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, cuda_graph_scope=[],
        attention_dropout=0.0, context_parallel_size=2,
    )  # fmt: skip
    return SdpaAttention(
        config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE,
        pg_collection=SimpleNamespace(cp=group), **changes,
    )  # fmt: skip


def test_a_document_is_cut_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed documents do not see each other, whatever ranks they are on."""
    ranks, tensors = Ranks(monkeypatch, 2), drawn()
    params = packed_params(torch.tensor([0, 7, 20, TOKENS], dtype=torch.int32), 13)
    document = torch.tensor([0] * 7 + [1] * 13 + [2] * 4)
    own = CAUSAL & (document[:, None] == document)
    for rank, group in enumerate(ranks.groups()):
        layer, parts = attention(group), [ranks.part(each, rank) for each in tensors]
        found = layer(*parts, None, packed_seq_params=params)
        torch.testing.assert_close(found, whole(tensors, own)[places(rank, 2)])
        plain = layer(*parts, None)
        torch.testing.assert_close(plain, whole(tensors, CAUSAL)[places(rank, 2)])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_token_gets_the_rotation_of_its_place_in_its_document(
    ranks: int, sequence_parallel: bool, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        packed.SelfAttention, "forward", lambda *_, **options: given.append(options)
    )
    starts, parts = (
        torch.tensor([0, 7, 20, TOKENS], dtype=torch.int32),
        2 if sequence_parallel else 1,
    )
    position = torch.tensor([*range(7), *range(13), *range(4)])
    table = torch.arange(100)
    for rank in range(ranks):
        group = SimpleNamespace(rank=functools.partial(int, rank), size=lambda: ranks)
        monkeypatch.setattr(packed.parallel_state, "get_context_parallel_group", lambda g=group: g)
        layer = PackedSelfAttention.__new__(PackedSelfAttention)
        torch.nn.Module.__init__(layer)
        layer.config = SimpleNamespace(
            tensor_model_parallel_size=2, sequence_parallel=sequence_parallel,
            context_parallel_size=ranks,
        )  # fmt: skip
        params = packed_params(starts, 13)
        hidden = torch.zeros(TOKENS // ranks // parts, 1, 4)
        rotations = (table, -table) if several else table
        layer.forward(hidden, None, rotary_pos_emb=rotations, packed_seq_params=params)
        found = given[-1]["rotary_pos_emb"]
        own = position[places(rank, ranks)]
        expected = (own, -own) if several else (own,)
        for one, other in zip(found if several else [found], expected, strict=True):
            assert torch.equal(one, other)
        assert given[-1]["packed_seq_params"].qkv_format != "thd" == params.qkv_format
    layer.forward(hidden, None, rotary_pos_emb=table)
    assert given[-1] == {"rotary_pos_emb": table, "packed_seq_params": None}
