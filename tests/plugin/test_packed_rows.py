"""Packed rows that are read from a host's iterators before a step."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core.pipeline_parallel")

from megatron.core.pipeline_parallel import schedules

from megatron.dpp import DppConfig, plugin
from megatron.dpp.core import compat
from megatron.dpp.errors import ConfigError
from megatron.dpp.plugin_lengths import read_ahead
from tests.plugin.test_plugin import keywords, with_arguments

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
        forward_step_func=functools.partial(forward_step, state),
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


@pytest.mark.parametrize("masks", [True, False])
def test_slices_of_a_host_that_masks_documents_are_refused(
    monkeypatch: pytest.MonkeyPatch, dynamic_calls: list[Any], masks: bool
) -> None:
    """Attention across slices is causal."""
    with_arguments(monkeypatch, reset_attention_mask=masks)
    refused = pytest.raises(ConfigError, match=r"slice_tokens=8.*reset_attention_mask")
    with (
        plugin.installed(DppConfig(split_backward="off", slice_tokens=8), strict=True),
        refused if masks else contextlib.nullcontext(),
    ):
        schedules.get_forward_backward_func()(**keywords())
    assert len(dynamic_calls) == (not masks)
