"""Lengths and rows that hosts have packed reach the schedule before a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from megatron.dpp import plugin
from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.errors import ConfigError
from megatron.dpp.plugin_lengths import packed_lengths, read_ahead
from megatron.dpp.runtime.dynamic import DppSchedule
from tests.plugin.test_plugin import keywords, with_arguments

LENGTHS = [9, 20, 7, 3, 11]


def rollout(host: str, rows: Sequence[Sequence[int]], offset: int = 0, **more: Any) -> Any:
    """An iterator of slime's or miles'."""
    kind = type("DataIterator", (SimpleNamespace,), {"__module__": f"{host}.data"})
    return kind(
        rollout_data={"total_lengths": LENGTHS, **more}, micro_batch_indices=rows, offset=offset
    )


def step(iterator: Any, count: int, sizes: tuple[int, int] = (1, 1), **more: Any) -> dict[str, Any]:
    """Keywords of a call."""
    names = ("tensor_model_parallel_size", "context_parallel_size")
    return keywords(config=dict(zip(names, sizes, strict=True))) | {
        "data_iterator": [iterator], "num_microbatches": count, **more
    }  # fmt: skip


@pytest.mark.parametrize("host", ["slime.backends", "miles.backends"])
@pytest.mark.parametrize(
    ("sizes", "arguments", "expected"),
    [
        ((1, 1), {}, [[20, 3], [7, 3]]),
        ((1, 1), {"data_pad_size_multiplier": 8}, [[20, 3, 1], [7, 3, 6]]),
        ((2, 1), {"data_pad_size_multiplier": 8}, [[20, 3, 9], [7, 3, 6]]),
        ((1, 2), {}, [[20, 4], [8, 4]]),
        ((1, 2), {"allgather_cp": True}, [[20, 3, 1], [7, 3]]),
        ((1, 1), {"qkv_format": "bshd"}, None),
    ],
)
def test_a_rollouts_rows_have_the_hosts_padding(
    host: str, sizes: tuple[int, int], arguments: dict[str, Any], expected: list[list[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with_arguments(monkeypatch, **arguments)
    rows = [[0], [1, 3], [2, 3], [4]]
    assert packed_lengths(step(rollout(host, rows, offset=1), 2, sizes)) == expected
    pictures = rollout(host, rows, multimodal_train_inputs=[])
    assert packed_lengths(step(pictures, 2, sizes)) is None


@pytest.mark.parametrize(
    ("sizes", "settings", "expected"),
    [
        ((1, 1), {}, [[3, 9], [5]]),
        ((2, 1), {}, [[4, 10], [6]]),
        ((1, 2), {}, [[4, 12], [8]]),
        ((1, 1), {"use_remove_padding": False}, None),
        ((1, 1), {"pad_to_length": True}, None),
        ((1, 1), {"dynamic_context_parallel": True}, None),
        ((1, 1), {"fp8": "e4m3"}, None),
    ],
)
def test_verls_rows_are_read_from_a_copy_of_its_iterator(
    sizes: tuple[int, int], settings: dict[str, Any], expected: list[list[int]] | None
) -> None:
    values = {"use_remove_padding": True, "pad_to_length": False, "fp8": None} | settings
    kind = type("Engine", (SimpleNamespace,), {
        "__module__": "verl.workers", "forward_step": lambda self, *given, **_: None
    })  # fmt: skip
    engine = kind(engine_config=SimpleNamespace(**values), tf_config=SimpleNamespace(**values))
    nested = [
        torch.nested.nested_tensor([torch.zeros(n) for n in row], layout=torch.jagged)
        for row in ([3, 9], [5])
    ]
    batches = iter([{"input_ids": one} for one in nested])
    call = step(batches, 2, sizes, forward_step_func=partial(engine.forward_step, a=1))
    assert packed_lengths(call) == expected
    assert len(list(batches)) == 2


def test_nemo_rls_rows_have_the_length_of_the_call() -> None:
    def forward(*_: Any) -> None: ...

    forward.__module__ = "nemo_rl.models.megatron.train"
    call = step(iter([0]), 3, forward_step_func=partial(forward, a=1), seq_length=32)
    assert packed_lengths(call | {"micro_batch_size": 2}) == [[32, 32]] * 3


def test_another_hosts_lengths_are_not_read() -> None:
    assert packed_lengths(step(iter([]), 2)) is None


@pytest.fixture
def installed() -> Iterator[dict[str, Any]]:
    """An installation with an adapter that gives the sizes of the mapping."""
    known: dict[str, Any] = {"sizes": [9, 23, 7]}
    with plugin.installed(DppConfig(split_backward="off"), lengths=lambda step: known["sizes"]):
        yield known


def test_lengths_that_an_adapter_knows_are_announced_before_a_training_step(
    installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dynamic_calls: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    told: list[Any] = []
    monkeypatch.setattr(DppSchedule, "announce", lambda self, sizes: told.append(sizes))
    run = schedules.get_forward_backward_func()
    run(**keywords(forward_only=True))
    assert not told
    run(**keywords())
    plugin.announce([1, 2, 3])
    run(**keywords())
    assert told == [[9, 23, 7], [1, 2, 3]], "what the host says itself wins"
    installed["sizes"] = [[4, 5], [3], [2, 1]]
    run(**keywords())
    assert told.pop() == [9, 3, 3]
    installed["sizes"] = None
    run(**keywords())
    del installed["sizes"]  # as of a host whose names have changed
    run(**keywords())
    assert len(told) == 2 and "lengths are not read ahead: 'sizes'" in caplog.text


TOKENS = torch.zeros(1, 8)
BATCHES = (
    {"tokens": TOKENS, "cu_seqlens": torch.tensor([[0, 3, 8, 8, 8]])},
    {"tokens": TOKENS, "cu_seqlens": torch.tensor([[0, 8, 8, 8, 8]])},
    {"tokens": TOKENS, "cu_seqlens": torch.tensor([[0, 1, 2, 3, 8]])},
    {"tokens": TOKENS, "cu_seqlens": torch.tensor([[0, 5, 8, 8, 8]])},
)
ROWS = [[3, 5], [8], [1, 1, 1, 5]]


@pytest.mark.parametrize("name", ["sft", "dataloader_inter_document_masking"])
@pytest.mark.parametrize("as_list", [False, True])
def test_megatrons_batches_tell_their_sequences(
    name: str, as_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_arguments(monkeypatch, **{name: True})
    own = iter(BATCHES)
    step = keywords(data_iterator=[None, own] if as_list else own)
    assert read_ahead(step) == ROWS
    given = step["data_iterator"][1] if as_list else step["data_iterator"]
    assert list(given) == list(BATCHES), "the forward steps read them again"


def test_several_samples_of_a_batch_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with_arguments(monkeypatch, sft=True)
    both = {
        "tokens": torch.zeros(2, 8), "cu_seqlens": torch.tensor([[0, 3, 8], [0, 8, 8]]),
        "cu_seqlens_padded": torch.tensor([[0, 4, 8], [0, 8, 8]]),
    }  # fmt: skip
    step = keywords(data_iterator=iter([both]), num_microbatches=1)
    assert read_ahead(step) == [[4, 4, 8]], "sequences with their padding"


def forward_step(state: Any, *_: Any) -> None:
    """A forward step of Megatron-Bridge's form."""


def test_bridges_data_set_tells_that_it_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = {"tokens": TOKENS, "cu_seqlens_q": torch.tensor([0, 3, 7]),
              "cu_seqlens_q_padded": torch.tensor([0, 4, 8])}  # fmt: skip
    data = SimpleNamespace(enable_in_batch_packing=True)
    state = SimpleNamespace(cfg=SimpleNamespace(dataset=data))
    step = keywords(
        data_iterator=iter([packed]), num_microbatches=1,
        forward_step_func=partial(forward_step, state),
    )  # fmt: skip
    assert read_ahead(step) is None, "another host's"
    monkeypatch.setattr(forward_step, "__module__", "megatron.bridge.training.gpt_step")
    assert read_ahead(step) == [[4, 4]]
    data.enable_in_batch_packing = False
    assert read_ahead(step) is None


def test_stages_in_the_middle_must_know_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    with_arguments(monkeypatch, sft=True)
    monkeypatch.setattr(compat, "VERSION", "0.16.1")
    assert read_ahead(keywords(data_iterator=iter(BATCHES))) == ROWS
    with pytest.raises(
        ConfigError, match=r"sft=True: Megatron-LM 0\.16\.1 does not tell stages in"
    ):
        read_ahead(keywords(4, data_iterator=iter(BATCHES)))
    monkeypatch.setattr(compat, "VERSION", "0.17.1")
    assert read_ahead(keywords(4, data_iterator=iter(BATCHES))) == ROWS


def test_rows_are_read_for_slices_alone_and_stay_for_megatrons_own_schedule(
    monkeypatch: pytest.MonkeyPatch,
    told: list[Any],
    dynamic_calls: list[Any],
    static_calls: list[Any],
) -> None:
    with_arguments(monkeypatch, sft=True)
    for tokens, expected in ((0, []), (4, [([8, 8, 8], ROWS), ((), ())])):
        with plugin.installed(DppConfig(split_backward="off", slice_tokens=tokens)):
            run = schedules.get_forward_backward_func()
            run(**keywords(data_iterator=iter(BATCHES), a_newer_keyword=1))
        *_, given = static_calls.pop()
        assert told == expected and list(given["data_iterator"]) == list(BATCHES)


@pytest.mark.parametrize(
    ("host", "config", "settings", "said"),
    [
        ({"reset_attention_mask": True}, {}, {}, r"slice_tokens=4.*reset_attention_mask"),
        ({}, {"mtp_num_layers": 1}, {}, "mtp_num_layers=1 does not work with slices"),
        ({}, {}, {"cuda_graphs": "on"}, r"cuda_graphs='on'.*does not go with slices"),
    ],
)
def test_models_and_hosts_that_cannot_be_cut_are_named(
    host: dict[str, Any], config: dict[str, Any], settings: dict[str, Any], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with_arguments(monkeypatch, **host)
    with (
        plugin.installed(DppConfig(split_backward="off", slice_tokens=4, **settings), strict=True),
        pytest.raises(ConfigError, match=said),
    ):
        schedules.get_forward_backward_func()(
            **keywords(config={"num_moe_experts": None, **config})
        )
