"""equality_worker.py's cases with megatron-core's Transformer Engine layers.

te_worker.py JSON. On GPUs with the package itself, else over the stand-in. ``fused_wgrad`` adds
gradients to ``main_grad`` directly.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.runtime import te_double

REAL = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
if REAL:
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
else:
    te_double.install()

from tests.runtime import equality_worker, layers  # noqa: E402, I001 - lets megatron-core do without CUDA

from megatron.core.extensions.transformer_engine import TELinear  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron.dpp import DppSchedule  # noqa: E402
from megatron.dpp.config import ENGINE_ROWS  # noqa: E402

if REAL:
    import transformer_engine
    from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
        _attention_backends,
    )
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
else:
    TransformerEngineBaseModule = te_double._Base

PLAIN_TRAIN, PLAIN_BUILD = equality_worker.train, equality_worker.build
PLAIN_CONFIG = equality_worker.TransformerConfig


def config_for(**values: Any) -> Any:
    return PLAIN_CONFIG(**{"disable_parameter_transpose_cache": False} | values)


def block_spec(config: Any, *, spec: str, vp_stage: int | None) -> Any:
    if REAL:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=config.normalization,
            vp_stage=vp_stage,
        )  # fmt: skip
    layer = copy.deepcopy(get_gpt_layer_with_transformer_engine_spec())
    layer.submodules.self_attention.submodules.core_attention = layers.Attention
    number = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=WrappedTorchNorm)


def build(case: dict[str, Any]) -> Any:
    if REAL:
        FP8GlobalStateManager.reset()  # it keeps the scales of all models
    chunks, optimizer = PLAIN_BUILD(case)
    for chunk in chunks:
        modules = [
            m
            for m in chunk.modules()
            if isinstance(m, TransformerEngineBaseModule) and getattr(m, "wgrad_store", None)
        ]
        assert modules
        assert any(isinstance(m, TELinear) for m in modules)
        for module in modules if not REAL else []:
            module.fuse_wgrad_accumulation = case.get("fused_wgrad", False)
    return chunks, optimizer


class Heard(DppSchedule):
    """Keeps what it logs."""

    def __init__(self, *given: Any, log: Any, **more: Any) -> None:
        self.said: list[str] = []
        super().__init__(*given, log=lambda line: (self.said.append(line), log(line)), **more)


def train(case: dict[str, Any], schedule: Any) -> dict[str, Any]:
    split = isinstance(schedule, Heard) and schedule.config.split_backward != "off"
    result = PLAIN_TRAIN(case, schedule)
    if split:
        assert not any("is fused" in line for line in schedule.said), "W tasks were run"
        assert not any("its class is" in line for line in schedule.said), schedule.said
        deferred = next(
            line for line in schedule.said if "a deferred weight gradient keeps" in line
        )
        assert "keeps 0.0 MiB" not in deferred, schedule.said
        if case.get("micro_batch"):
            assert not any("without graphs" in line for line in schedule.said), schedule.said
    return result


def main() -> None:
    gc.freeze()  # else each collection looks at all that was imported
    equality_worker.start()
    equality_worker.TransformerConfig = config_for
    equality_worker.block_spec, equality_worker.build = block_spec, build
    equality_worker.train, equality_worker.DppSchedule = train, Heard
    cases = json.loads(sys.argv[1])
    for case in cases:
        if REAL:
            equality_worker.SEQUENCE = case.get("sequence", ENGINE_ROWS)
        equality_worker.run_case(copy.deepcopy(case))
    if REAL and dist.get_rank() == 0:
        used = [name for name, value in _attention_backends.items() if value is True]
        print(f"LAYERS of Transformer Engine {transformer_engine.__version__}: {', '.join(used)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
