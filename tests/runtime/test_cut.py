"""The cut of a step into units, and the model that is bound to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.dpp.config import DppConfig
from megatron.dpp.core.call import StepCall
from megatron.dpp.core.cut import Cut, WholeSteps, weighted_aux_loss
from megatron.dpp.core.slices import Slices, Unit, attend_in_slice, why_not_sliced
from megatron.dpp.errors import ConfigError
from megatron.dpp.memory import saved_bytes
from megatron.dpp.runtime.slicing import Slicing
from megatron.dpp.schedule.caps import slice_size

USUAL = {
    "num_moe_experts": None, "multi_latent_attention": False, "mtp_num_layers": None,
    "context_parallel_size": 1, "window_size": None, "num_query_groups": 2, "kv_channels": 4,
    "tensor_model_parallel_size": 1, "params_dtype": torch.float32,
    "calculate_per_token_loss": False, "moe_router_load_balancing_type": "aux_loss",
}  # fmt: skip


class Attention(torch.nn.Module):
    """A layer's core attention, as a host may build it."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.softmax_scale, self.dropout, self.may_be_sliced = 0.5, 0.0, True
        self.config = SimpleNamespace(**USUAL)
        for name, value in given.items():
            setattr(self, name, value)

    def forward(self, *_: Any) -> str:
        return "uncut"


def cut_of(rows: list[list[int]], tokens: int, **more: int) -> Cut:
    """Rows in slices of so many tokens."""
    found = Cut.of(rows, lambda _: tokens, **more)
    assert found is not None
    return found


class Rotary(torch.nn.Module):
    """Rotary embeddings that count their calls."""

    num_calls = 0

    def forward(self, length: int) -> torch.Tensor:
        self.num_calls += 1
        return torch.arange(length)


class Chunk(torch.nn.Module):
    """A chunk of one layer."""

    def __init__(self, core: Attention) -> None:
        super().__init__()
        self.config, self.rotary_pos_emb = core.config, Rotary()
        layer = torch.nn.Module()
        layer.self_attention = torch.nn.Module()
        layer.self_attention.core_attention = core
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])


def test_rotary_embeddings_of_all_slices_come_from_one_table() -> None:
    chunk, units = Chunk(Attention()), cut_of([[10], [4]], 4).units
    rotary: Any = chunk.rotary_pos_emb
    slices = Slices([chunk])
    with slices.bound():
        for unit in units[:3]:
            with slices.running(0, unit):
                assert rotary(4).tolist() == list(range(unit.begin, unit.end))
        packed = Unit(0, 4, 8, 10, (0, 2, 6))
        with slices.running(0, packed):
            assert rotary(4).tolist() == [2, 3, 0, 1]
        assert rotary.num_calls == 1
        with slices.running(0, units[3]):
            assert rotary(4).tolist() == [0, 1, 2, 3], "a whole row has its own"
    assert rotary.num_calls == 2 and "forward" not in vars(rotary)


def test_keys_of_fewer_groups_than_tensor_parallel_ranks_count() -> None:
    """Each rank has a whole group then; they counted as none under the memory cap."""
    core = Attention()
    for ranks, groups in ((1, 2), (2, 1), (4, 1)):
        core.config.tensor_model_parallel_size = ranks
        assert Slices([Chunk(core)]).keys_per_token == 2 * groups * 4 * (4 + 4)


def test_attention_is_bound_within_cut_units_alone() -> None:
    core = Attention()
    slices, (first, second) = Slices([Chunk(core)]), cut_of([[6]], 3).units
    q = torch.randn(3, 1, 2, 4)
    with slices.bound():
        with slices.running(0, first):
            assert core(q, q, q).shape == (3, 1, 8)
        assert core(q, q, q) == "uncut"
        with slices.running(0, second):
            core(q, q, q)
        assert len(slices.keys) == 1 and slices.keys.num_bytes == 2 * q.nbytes * 2
    slices.keys.free(0, second)
    assert core(q, q, q) == "uncut" and not len(slices.keys)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"may_be_sliced": False}, "Attention is not known to be plain causal attention"),
        ({"attn_mask_type": AttnMaskType.no_mask}, "attends with the mask no_mask"),
        ({"forward": print}, "a host has replaced the forward of Attention"),
    ],
)
def test_other_attention_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Slices([Chunk(Attention(**given))])


def test_transformer_engines_kernels_are_aligned_bottom_right() -> None:
    class Engine(Attention):
        __module__ = "transformer_engine.pytorch.attention"
        asked: ClassVar[list[tuple[int, int, str]]] = []

        def forward(self, q: Any, k: Any, v: Any, mask: Any, attn_mask_type: AttnMaskType) -> Any:
            assert mask is None
            self.asked.append((len(q), len(k), attn_mask_type.name))
            return q.flatten(2)

    core = Engine(attn_mask_type="causal")
    core.config.attention_dropout = 0.0
    slices = Slices([Chunk(core)])
    q = torch.randn(3, 1, 2, 4)
    with slices.bound():
        for unit in cut_of([[6]], 3).units:
            with slices.running(0, unit):
                core(q, q, q, None)
    assert core.asked == [(3, 3, "causal"), (3, 6, "causal_bottom_right")]


@pytest.mark.parametrize(
    ("name", "value"),
    [("context_parallel_size", 2), ("mtp_num_layers", 1), ("multi_latent_attention", True),
     ("window_size", (8, 0)), ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"])],
)  # fmt: skip
def test_settings_that_do_not_go_with_slices_are_named(name: str, value: Any) -> None:
    assert why_not_sliced(SimpleNamespace(**USUAL)) is None
    reason = why_not_sliced(SimpleNamespace(**{**USUAL, "num_moe_experts": 4, name: value}))
    assert reason is not None and "does not work with slices" in reason


def test_saved_bytes_are_those_within_a_slices_attention_without_the_keys() -> None:
    core = Attention()
    slices, (unit, _) = Slices([Chunk(core)]), cut_of([[6]], 3).units
    q, k, v = (torch.randn(3, 1, 2, 4, requires_grad=True) for _ in range(3))
    row = slices.keys.row(0, unit, 0, k, v)
    kept = torch.randn(3, 1, 2, 4)

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query * kept + key[:3] * value[:3]

    output = attend_in_slice(q, k, v, row, unit, kernel)
    everything = saved_bytes([output], torch.nn.Identity())
    apart = saved_bytes([output], torch.nn.Identity(), slices.keys.storages)
    assert apart == kept.nbytes and everything == apart + slices.keys.num_bytes


def test_the_auxiliary_loss_of_a_slice_weighs_its_tokens() -> None:
    cut = cut_of([[10]] * 2, 4, batch=3)
    assert [cut.share(number) for number in range(3)] == [0.4, 0.4, 0.2]
    config = SimpleNamespace(num_moe_experts=4, calculate_per_token_loss=False)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor([8.0])
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    with weighted_aux_loss(config, cut.share(2)):
        assert scale.item() == pytest.approx(1.6)
    assert scale.item() == 8.0
    config.calculate_per_token_loss = True  # megatron-core weighs it by tokens then
    with weighted_aux_loss(config, cut.share(2)):
        assert scale.item() == 8.0
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.mark.parametrize(
    ("tokens", "length", "multiple", "expected"),
    [
        (4096, 4096, 1, 4096), (4096, 6144, 1, 6144), (4096, 8192, 1, 4096), (4096, 10000, 1, 3392),
        (4, 16, 1, 4), (6, 16, 1, 6), (3, 16, 2, 6), (64, 270, 1, 64), (128, 1070, 1, 192),
    ],
)  # fmt: skip
def test_slices_have_equal_tokens_and_the_last_is_not_short_if_that_can_be(
    tokens: int, length: int, multiple: int, expected: int
) -> None:
    found = slice_size(length, tokens, multiple)
    assert found == expected and (found == length or found % multiple == 0)
    room = found + 64 <= 1.5 * tokens
    assert length % found == 0 or length % found >= found / 2 or not room


def test_a_cuts_units_are_those_of_its_geometry() -> None:
    cut = cut_of([[10]] * 2, 4, batch=3)
    assert cut.sizes == (12, 12, 6) * 2 and cut.longest == 30 and cut.groups == (3, 3)


def test_packed_rows_are_cut_alone_where_they_are_long() -> None:
    cut = cut_of([[3, 9, 4], [5]], 6, longest=12)
    assert Cut.of([[3, 2], [5]], lambda _: 6) is None, "no row is long enough"
    assert [(unit.row, unit.begin, unit.end) for unit in cut.units] == [
        (0, 0, 6), (0, 6, 12), (0, 12, 16), (1, 0, 5)
    ]  # fmt: skip
    assert cut.sizes == (6, 6, 4, 5) and cut.longest == 16 and cut.units[0].starts == (0, 3, 12)


def test_announced_rows_serve_one_step() -> None:
    slicing = Slicing(DppConfig(), print)
    call = StepCall(
        forward_step_func=print, data_iterator=[], model=[torch.nn.Linear(1, 1)],
        num_microbatches=3, seq_length=6, micro_batch_size=1,
    )  # fmt: skip
    slicing.announce([[4], [6]])
    assert slicing.cut(call, take=False) is call
    with pytest.raises(ConfigError, match="announce: 2 rows for a step of 3 microbatches"):
        slicing.cut(call, take=True)
    assert slicing.cut(call, take=True) is call


class Model(GPTModel):  # type: ignore[misc]
    """A stage in the middle of a host's pipeline, which returns what it was given."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.post_process = False

    def forward(
        self, input_ids: Any, position_ids: Any, attention_mask: Any, packed_seq_params: Any = None
    ) -> Any:
        return input_ids, packed_seq_params


def packed(ends: list[int] | None, padded: list[int] | None = None) -> PackedSeqParams:
    own, all_of = (None if each is None else torch.tensor(each) for each in (ends, padded))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=own, cu_seqlens_kv=own, cu_seqlens_q_padded=all_of
    )


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (packed([0, 3, 10]), None),
        (packed([0, 3, 10, 10, 10]), None),  # padded to a fixed number
        (packed([0, 2, 8], padded=[0, 3, 10]), None),
        (packed([0, 3]), None),  # the padding behind it is a sequence
        (packed([0, 3, 10, -1, -1]), None),
        (packed([0, 4, 10]), r"passes cu_seqlens of sequences of \[4, 6\] tokens"),
        (packed([0, 3, 9, 12]), r"of \[3, 6, 1, 2\] tokens"),
        (packed(None), "passes none in packed_seq_params"),
        (None, "passes none in packed_seq_params"),
    ],
)
def test_a_row_whose_sequences_are_not_those_announced_is_refused(
    params: Any, said: str | None
) -> None:
    model, slices = Model(), SimpleNamespace(unit=None)
    cut = cut_of([[3, 7]], 5)
    tokens = torch.arange(10)[None]
    with WholeSteps(slices, [model]).bound():  # type: ignore[arg-type]
        for unit in cut.units:
            slices.unit = unit
            if said is None:
                got, passed = model(tokens, None, None, packed_seq_params=params)
                assert got.tolist() == [list(range(unit.begin, unit.end))] and passed is None
        slices.unit = cut.units[0]
        if said is not None:
            told = rf"microbatch 0 counts as sequences of \[3, 7\] tokens, .* {said}: announce"
            with pytest.raises(ConfigError, match=told):
                model(tokens, None, None, packed_seq_params=params)
        slices.unit = None
        assert model(tokens, None, None, packed_seq_params=params) == (tokens, params)


def test_packed_rows_that_nobody_announced_are_named() -> None:
    model, slices = Model(), SimpleNamespace(unit=cut_of([[10]], 5).units[0])
    with (
        WholeSteps(slices, [model]).bound(),  # type: ignore[arg-type]
        pytest.raises(ConfigError, match=r"sequences of \[10\] tokens, .* of \[3, 7\] tokens: ann"),
    ):
        model(torch.zeros(1, 10), None, None, packed_seq_params=packed([0, 3, 10]))


@pytest.mark.parametrize(
    ("more", "named", "words"),
    [((), {"input_ids": 1}, "multiple values for argument 'input_ids'"),
     ((None, None), {}, "too many positional arguments")],
)  # fmt: skip
def test_an_argument_too_many_is_named_as_without_slices(
    more: tuple[Any, ...], named: dict[str, Any], words: str
) -> None:
    model, slices = Model(), SimpleNamespace(unit=cut_of([[10]], 5).units[0])
    with (
        WholeSteps(slices, [model]).bound(),  # type: ignore[arg-type]
        pytest.raises(TypeError, match=words),
    ):
        model(torch.zeros(1, 10), None, None, *more, **named)
