"""The reasons why a chunk is not captured, for megatron-core's own configurations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.dpp.core.graphs import slots
from tests.runtime.test_graphs import Block

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
        num_layers=1, hidden_size=8, num_attention_heads=2, cuda_graph_scope=[]
    )
    for name, value in settings.items():
        assert hasattr(made, name)
        setattr(made, name, value)  # not by the constructor, which wants the packages behind them
    return made


def test_a_usual_chunk_is_captured() -> None:
    assert slots.why_not(Wrapped(config_with())) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_microbatches_with_partial_activation_checkpoints": 0}, "are recomputed and others"),
        ({"num_microbatches_with_partial_activation_checkpoints": 2}, "are recomputed and others"),
        ({"fp8": "hybrid"}, "of the recipe delayed keep scales from task to task"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, "tensorwise and blockwise can be captured"),
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
        (TENSORWISE | {"quant_recipe": object()}, "recipes of their own"),
        ({"use_kitchen": True}, "recipes of their own"),
        ({"fp4": "e2m1"}, "4-bit layers have not been tried"),
        ({"cuda_graph_impl": "local"}, "captures them already"),
        ({"cpu_offloading": True}, "activations are offloaded"),
        ({"fine_grained_activation_offloading": True}, "activations are offloaded"),
        ({"context_parallel_size": 2}, "context parallelism has streams of its own"),
        ({"num_moe_experts": 4}, "experts take varying shapes"),
        ({"tensor_model_parallel_size": 2}, None),
    ],
)
def test_a_setting_that_graphs_cannot_follow_is_named(
    settings: dict[str, Any], reason: str | None
) -> None:
    found = slots.why_not(Wrapped(config_with(**settings)))
    assert found is None if reason is None else reason in str(found)


def test_layers_that_keep_8_bit_weights_elsewhere_are_not_captured() -> None:
    chunk = Wrapped(config_with(**TENSORWISE))
    layer: Any = chunk.decoder.layers[0]
    layer.is_first_microbatch = True
    assert "keeps 8-bit weights where" in str(slots.why_not(chunk))
    vars(layer).update({"_fp8_workspaces": {}})
    assert slots.why_not(chunk) is None


@pytest.mark.parametrize("gathers", [True, False])
def test_parameters_that_layers_gather_are_not_captured(gathers: bool) -> None:
    """A replay would not wait for them."""
    found = slots.why_not(Wrapped(config_with(), overlap_param_gather=gathers))
    assert ("overlap_param_gather" in str(found)) is gathers


@pytest.mark.parametrize(("ranks", "refused"), [(1, False), (2, True)])
def test_engine_layers_of_several_tensor_ranks_are_not_captured(ranks: int, refused: bool) -> None:
    chunk = Wrapped(config_with(tensor_model_parallel_size=ranks))
    engine = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})
    chunk.decoder.layers.append(engine(4, 4))
    assert ("Transformer Engine's tensor-parallel" in str(slots.why_not(chunk))) is refused


def test_a_chunk_without_layers_or_in_another_wrapper_is_not_captured() -> None:
    chunk = Wrapped(config_with())
    chunk.decoder.layers = torch.nn.ModuleList()
    assert "no transformer layers" in str(slots.why_not(chunk))
    other = torch.nn.Module()
    other.config, other.decoder = config_with(), Block()
    assert "Module is not megatron-core's DistributedDataParallel" in str(slots.why_not(other))
