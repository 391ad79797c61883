"""Rows that are padded at the model's door are those of a host that pads them itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron.dpp.core import cpu
from megatron.dpp.core.padded import PaddedRows, why_not_padded
from tests.runtime.launcher import run_ranks
from tests.runtime.layers import block_spec, packed_params


def gpt(spec: Any = None, **settings: Any) -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0,
        attention_dropout=0.0, persist_layer_norm=False, use_cpu_initialization=True, **settings,
    )  # fmt: skip
    return GPTModel(config, spec(config) if spec else get_gpt_layer_local_spec(), 32, 32)


def row(length: int, padded: int, *, masked: bool) -> dict[str, Any]:
    """Arguments of two rows of ``length`` tokens with padding up to ``padded``."""
    more, tokens = padded - length, torch.arange(2 * length).view(2, length) % 31
    hidden = torch.ones(padded, padded, dtype=torch.bool).triu(1)[None, None]
    if masked:
        hidden = hidden.clone()
        hidden[..., :length, 2] = True  # a key that the host hides
    hidden[..., :, length:] = True
    hidden[..., length:, :] = True
    return {
        "input_ids": F.pad(tokens, (0, more)),
        "position_ids": F.pad(torch.arange(length).expand(2, -1), (0, more)),
        "attention_mask": hidden if masked else None,
        "labels": F.pad(tokens + 1, (0, more)),
    }


def compare(length: int, padded: int, *, masked: bool) -> None:
    own, ours = gpt(), gpt()
    losses = own(**row(length, padded, masked=masked))[:, :length]
    with PaddedRows([ours], [8, 16], parts=1).bound():
        found = ours(**row(length, length, masked=masked))
    assert found.shape == (2, length)
    assert torch.equal(found, losses)
    losses.sum().backward()
    found.sum().backward()
    for expected, parameter in zip(own.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    assert "forward" not in vars(ours)


def compare_packed(lengths: Sequence[int], padded: int) -> None:
    """Documents in one row: the padding is one more."""
    ends = list(itertools.accumulate(lengths, initial=0))
    spec = partial(block_spec, vp_stage=None)
    own, ours = gpt(spec), gpt(spec)
    for model, size, bounds in ((own, padded, [*ends, padded]), (ours, ends[-1], ends)):
        given = {name: value[:1] for name, value in row(ends[-1], size, masked=False).items()
                 if value is not None}  # fmt: skip
        params = packed_params(torch.tensor(bounds, dtype=torch.int32), max(lengths))
        given |= {"attention_mask": None, "packed_seq_params": params}
        with PaddedRows([ours], [8, 16], parts=1).bound():
            losses = model(**given)
        assert losses.shape == (1, size), "as long as the host's row"
        losses[:, : ends[-1]].sum().backward()
    for expected, parameter in zip(own.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def leave_alone() -> None:
    """Models that would notice padding are named."""
    model = gpt()
    assert why_not_padded([model], model.config, 1) is None
    assert "share" in str(why_not_padded([model], model.config, 2))
    assert "GPTModel" in str(why_not_padded([torch.nn.Linear(1, 1)], model.config, 1))
    for name, said in (("num_moe_experts", "routers"), ("mtp_num_layers", "prediction")):
        setattr(model.config, name, 2)
        assert said in str(why_not_padded([model], model.config, 1))
        setattr(model.config, name, None)


def test_padded_rows_are_those_of_a_host_that_pads() -> None:
    run_ranks(Path(__file__), 1, [])


if __name__ == "__main__":
    support = cpu.install()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    for lengths in ((5, 8), (8, 8), (9, 16), (17, 17)):
        for own_mask in (False, True):
            compare(*lengths, masked=own_mask)
    for documents, padded in (((2, 3), 8), ((1,) * 15, 16), ((4, 4), 8)):
        compare_packed(documents, padded)
    leave_alone()
