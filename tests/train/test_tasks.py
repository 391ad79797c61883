"""Layers of the models that flags ask for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.dpp.cli.arguments import parse_args
from megatron.dpp.train import tasks

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --num-experts 4 "
    "--max-position-embeddings 8 --transformer-impl local --device cpu"
)


@pytest.mark.parametrize("more", ["", "--moe-grouped-gemm"])
def test_grouped_products_are_asked_of_all_layers(more: str, monkeypatch: Any) -> None:
    asked: list[bool] = []

    def spec(*_: Any, grouped_experts: bool, **__: Any) -> None:
        asked.append(grouped_experts)

    monkeypatch.setattr(tasks, "block_spec", spec)
    monkeypatch.setattr(tasks, "prediction_spec", spec)
    monkeypatch.setattr(tasks, "GPTModel", lambda **_: None)
    args = parse_args(f"{FLAGS} {more}".split())
    tasks.build_gpt(args, None, vp_stage=None, pre_process=True)  # type: ignore[arg-type]
    assert asked == [bool(more)] * 2
