"""The part of a layer before its experts: its capture, and changes that a host makes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.dpp.core.graphs import parts, slots
from tests.runtime.graphed import Chunk, graphs_of, step
from tests.runtime.losses import Rerun

CONFIG = {
    "num_moe_experts": 4, "moe_pad_expert_input_to_capacity": False,
    "moe_token_dispatcher_type": "alltoall", "moe_shared_expert_overlap": False,
    "moe_router_load_balancing_type": "aux_loss", "recompute_granularity": None, "fp8": None,
}  # fmt: skip


def made(kind: Any, **attributes: Any) -> Any:
    """A module of megatron-core's without what its constructor needs ranks for."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def layer_of(**experts: Any) -> Any:
    told = {"use_shared_expert": False, "shared_expert_overlap": False} | experts
    router = made(TopKRouter, weight=torch.nn.Parameter(torch.ones(4, 4)))
    return made(
        TransformerLayer, config=SimpleNamespace(**CONFIG), layer_number=3,
        self_attention=torch.nn.Linear(4, 4), pre_mlp_layernorm=torch.nn.LayerNorm(4),
        mlp=made(MoELayer, router=router, **told),
    )  # fmt: skip


def part_of(layer: Any) -> parts.BeforeExperts:
    chunk = Chunk()
    chunk.decoder.layers[0] = layer
    return parts.BeforeExperts(chunk, 0)


BESIDE, ROUTED = {"use_shared_expert": True}, ["self_attention", "pre_mlp_layernorm", "mlp_router"]


@pytest.mark.parametrize(
    ("experts", "captured"),
    [({}, 3), (BESIDE, 2), (BESIDE | {"shared_expert_overlap": True}, 3), ({"forward": print}, 1)],
)
def test_a_layer_is_captured_as_far_as_its_sums_keep_their_order(
    experts: dict[str, Any], captured: int
) -> None:
    assert {*part_of(layer_of(**experts)).modules._modules} == {*ROUTED[:captured]}


@pytest.mark.parametrize("place", ["self_attention", "pre_mlp_layernorm", "mlp.router", "mlp"])
def test_a_module_in_the_place_of_another_is_noticed(place: str) -> None:
    layer, other = layer_of(), layer_of()
    part = part_of(layer)
    assert part.is_as_built()
    owner, _, name = place.rpartition(".")
    setattr(layer.get_submodule(owner), name, other.get_submodule(place))
    assert not part.is_as_built()


UNLIKE = "its experts, or their router, were changed"
CHANGES: list[tuple[str, Callable[[Any], object]]] = [
    (
        "TransformerLayer._forward_attention was replaced",
        lambda it: setattr(it, "_forward_attention", print),
    ),
    ("pre_mlp_layernorm has hooks", lambda it: it.pre_mlp_layernorm.register_forward_hook(print)),
    ("mlp_router has hooks", lambda it: it.mlp.router.register_forward_pre_hook(print)),
    (UNLIKE, lambda it: it.mlp.register_forward_pre_hook(print)),
    (UNLIKE, lambda it: it.mlp.register_full_backward_hook(print)),
    (UNLIKE, lambda it: it.mlp.compile()),
    (UNLIKE, lambda it: setattr(it.config, "moe_enable_routing_replay", True)),
    (UNLIKE, lambda it: setattr(it, "_forward_mlp", print)),
    *(
        (UNLIKE, lambda it, name=name: setattr(it.mlp, name, print))
        for name in ("forward", "route")
    ),
    (UNLIKE, lambda it: setattr(it.mlp.router, "routing", print)),
]


@pytest.mark.parametrize(("reason", "change"), CHANGES)
def test_layers_that_a_host_has_changed_run_eagerly(reason: str, change: Any) -> None:
    """Such a layer may ask its norm or its router for something else, or not at all."""
    layer = layer_of()
    part = part_of(layer)
    assert part.why_eager() is None
    change(layer)
    assert part.why_eager() == reason


def test_captures_between_steps_are_of_the_precision_of_those_within(
    chunk: Chunk, captured_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block enters the context of a layer's 8-bit recipe before it calls the layer."""
    layer, entered, within = layer_of(), [], []
    layer.config.fp8 = "hybrid"
    monkeypatch.setattr(parts, "get_fp8_context", lambda *given: given)
    context: Any = part_of(layer).around()
    assert context == (layer.config, 2)

    @contextlib.contextmanager
    def around(part: Any) -> Iterator[None]:
        entered.append(part)
        yield
        entered.clear()

    def capture(function: Any, pool: Any) -> Rerun:
        within.append(bool(entered))
        return Rerun(function, pool)

    monkeypatch.setattr(parts.Whole, "around", around)
    other = Chunk()
    step(graphs_of(chunk, other, capture=capture)[0], chunk, other)
    assert within == [False] * 4 + [True] * 4, "F and B in their own slots, then in the other"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({}, None),
        ({"recompute_granularity": "selective"}, "parts of layers are recomputed"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, None),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "delayed scales"),
    ],
)
def test_settings_with_which_no_part_of_a_layer_is_captured(
    setting: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Chunk()
    chunk.decoder.layers[0] = layer_of()
    chunk.config = SimpleNamespace(**CONFIG | setting)
    (varying,) = (text for text, holds in slots.reasons_of_experts(chunk.config).items() if holds)
    monkeypatch.setattr(slots, "why_not_captured", lambda chunk: varying)
    found, why = slots.parts_of(chunk)
    assert bool(found) is (reason is None) and (reason or varying) in str(why)
