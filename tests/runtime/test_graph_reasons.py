"""The reasons why a chunk is not captured, for megatron-core's own configurations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.core.graphs import slots
from tests.runtime.graphed import Block

TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
SELECTIVE = {"recompute_granularity": "selective"}


class Wrapped(torch.nn.Module):
    """A chunk in megatron-core's DistributedDataParallel."""

    def __init__(self, config: TransformerConfig, **ddp: Any) -> None:
        super().__init__()
        self.config, self.decoder = config, Block()
        self.ddp_config = SimpleNamespace(**{"overlap_param_gather": False} | ddp)


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "DistributedDataParallel", Wrapped)


def config_with(**settings: Any) -> TransformerConfig:
    made = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        cuda_graph_scope=[],
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    for name, value in settings.items():
        assert hasattr(made, name)
        setattr(made, name, value)  # not by the constructor, which wants the packages behind them
    return made


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"num_microbatches_with_partial_activation_checkpoints": 0}, "are recomputed and others"),
        ({"num_microbatches_with_partial_activation_checkpoints": 2}, "are recomputed and others"),
        ({"fp8": "hybrid"}, None),
        (
            {"fp8": "hybrid", "recompute_granularity": "full"},
            "'full' takes delayed scales from the host's queue",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "tensorwise, blockwise, delayed can be"),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, None),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, None),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_dot_product_attention": True},
            "attention in 8 bit",
        ),
        (TENSORWISE | {"recompute_granularity": "full"}, "moves their 8-bit weights"),
        (TENSORWISE | {"recompute_modules": ["core_attn"]} | SELECTIVE, None),
        (TENSORWISE | {"recompute_modules": ["core_attn", "mlp"]} | SELECTIVE, "of mlp moves"),
        (
            TENSORWISE
            | {"recompute_granularity": "full", "disable_parameter_transpose_cache": True},
            None,
        ),
        (
            TENSORWISE
            | {"recompute_granularity": "full", "disable_parameter_transpose_cache": True}
            | {"hidden_dropout": 0.1},
            "draws again what it dropped",
        ),
        (TENSORWISE | {"quant_recipe": object()}, "recipes of their own"),
        ({"use_kitchen": True}, "recipes of their own"),
        ({"fp4": "e2m1"}, "4-bit layers have not been tried"),
        ({"cuda_graph_impl": "local"}, "captures them already"),
        ({"cpu_offloading": True}, "activations are offloaded"),
        ({"fine_grained_activation_offloading": True}, "activations are offloaded"),
        ({"context_parallel_size": 2}, None),
        ({"num_moe_experts": 4}, "experts take varying shapes"),
        ({"tensor_model_parallel_size": 2}, None),
    ],
)
def test_a_setting_that_graphs_cannot_follow_is_named(
    settings: dict[str, Any], reason: str | None
) -> None:
    found = slots.why_not_captured(Wrapped(config_with(**settings)))
    assert found is None if reason is None else reason in str(found)


def test_layers_that_keep_8_bit_weights_elsewhere_are_not_captured() -> None:
    chunk = Wrapped(config_with(**TENSORWISE))
    layer: Any = chunk.decoder.layers[0]
    layer.is_first_microbatch = True
    assert "keeps 8-bit weights where" in str(slots.why_not_captured(chunk))
    vars(layer).update({"_fp8_workspaces": {}})
    assert slots.why_not_captured(chunk) is None


def test_chunks_whose_layers_or_wrappers_graphs_cannot_follow_are_not_captured() -> None:
    """A replay would not wait for parameters that layers gather."""
    for gathers in (True, False):
        found = slots.why_not_captured(Wrapped(config_with(), overlap_param_gather=gathers))
        assert ("overlap_param_gather" in str(found)) is gathers
    chunk = Wrapped(config_with())
    chunk.decoder.layers = torch.nn.ModuleList()
    assert "no transformer layers" in str(slots.why_not_captured(chunk))
    other = torch.nn.Module()
    other.config, other.decoder = config_with(), Block()
    assert "Module is not megatron-core's DistributedDataParallel" in str(
        slots.why_not_captured(other)
    )


EXPERTS = {
    "num_moe_experts": 4, "moe_pad_expert_input_to_capacity": True,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": ["aux_loss"],
    "moe_input_jitter_eps": None, "moe_router_force_load_balancing": False,
    "moe_shared_expert_overlap": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({}, None),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, None),
        ({"num_moe_experts": None, "moe_pad_expert_input_to_capacity": False}, None),
        ({"moe_pad_expert_input_to_capacity": False}, "varying shapes"),
        ({"moe_token_dispatcher_type": "allgather"}, "dispatcher alltoall"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, "global_aux_loss"),
        ({"moe_input_jitter_eps": 0.1}, None),
        ({"moe_shared_expert_overlap": True}, "stream of their own"),
    ],
)
def test_only_experts_of_fixed_shapes_are_captured(
    setting: dict[str, Any], reason: str | None
) -> None:
    found = slots.reasons_of_experts(SimpleNamespace(**EXPERTS | setting))
    held = [text for text, holds in found.items() if holds]
    assert len(held) == (reason is not None)
    assert reason is None or reason in held[0]
