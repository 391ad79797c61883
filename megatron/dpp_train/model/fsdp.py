"""PyTorch's FSDP2 around a model chunk, through megatron-core's wrapper.

Parameters, gradients and optimizer state are sharded over the data-parallel ranks (stages 2 and 3
of ZeRO). ``model.build`` calls this with ``--use-torch-fsdp2``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.distributed import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor import DTensor

from megatron.dpp.core import compat


class _FullySharded(TorchFullyShardedDataParallel):  # type: ignore[misc]
    """megatron-core 0.16.1's wrapper with the call that its own finalize_model_grads.py:443 makes;
    the base class there (data_parallel_base.py:54) does not take the argument.
    """

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Nothing is outstanding: FSDP2 reduces gradients as the backward makes them."""


def fully_sharded(
    config: TransformerConfig, chunk: torch.nn.Module, *, reshard_after_forward: bool
) -> Any:
    """Wrap ``chunk``; its parameters become DTensors that are gathered layer by layer.

    Only transformer layers become units of their own. Embeddings and output layer belong to the
    root, which stays gathered for the whole forward, so they may share their weights.

    Args:
        reshard_after_forward: True frees a layer's gathered parameters after its forward and
            gathers them again for its backward (ZeRO 3); False keeps them until then (ZeRO 2).
    """
    settings = TorchFullyShardedDataParallelConfig(reshard_after_forward=reshard_after_forward)
    return _FullySharded(config, settings, chunk, sub_modules_to_wrap={TransformerLayer})


def shards_keep_identity() -> contextlib.AbstractContextManager[None]:
    """Make a parameter's local shard always one object, while an optimizer state is sharded.

    dist_checkpointing/optimizer.py:36 finds a parameter's state by the identity of its shard; from
    PyTorch 2.12 on ``DTensor.to_local`` of a parameter makes a new object at each call.
    """

    def local(_: Any, tensor: torch.Tensor) -> Any:
        return getattr(tensor, "_local_tensor", tensor)

    return compat.patched("dist_checkpointing.optimizer:to_local_if_dtensor", local)


def as_shards(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Turn the shards of a loaded optimizer state into DTensors, where the parameters are.

    dist_checkpointing loads local shards, which PyTorch's optimizers do not mix with DTensors.

    Args:
        optimizer: megatron-core's, as ``get_megatron_optimizer`` made it.
        state: what ``optimizer.load_state_dict`` takes; its tensors are replaced in place.
    """
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    parameters = [p for group in inner.param_groups for p in group["params"]]
    for index, values in state.get("optimizer", state)["state"].items():
        if isinstance(index, int):
            for name, value in values.items():
                values[name] = _like(parameters[index], value)
    for loaded, current in zip(
        state.get("fp32_from_fp16_params", ()),
        getattr(inner, "fp32_from_float16_groups", ()),
        strict=True,
    ):
        loaded[:] = [_like(mine, value) for mine, value in zip(current, loaded, strict=True)]
    return state


def _like(parameter: Any, shard: Any) -> Any:
    if not isinstance(parameter, DTensor) or isinstance(shard, DTensor):
        return shard
    if shard.shape != parameter._local_tensor.shape:
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
