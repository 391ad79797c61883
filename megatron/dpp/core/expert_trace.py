"""Records the tokens and the time of each layer's experts while a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.distributed import get_process_group_ranks

from megatron.dpp.trace import Recorder


@contextlib.contextmanager
def traced_experts(chunks: Sequence[torch.nn.Module], recorder: Recorder) -> Iterator[None]:
    """Record the experts of these model chunks in every forward of the block.

    The dispatcher hands the number of tokens per expert to the experts on the CPU, so reading them
    waits for no device. With a padded capacity (``moe_pad_expert_input_to_capacity``) the numbers
    are constant, and nothing is recorded.
    """
    with contextlib.ExitStack() as around:
        for layer in (m for chunk in chunks for m in chunk.modules()) if recorder.enabled else ():
            if isinstance(layer, MoELayer) and not layer.config.moe_pad_expert_input_to_capacity:
                for hook in _watch(layer, recorder):
                    around.callback(hook.remove)
        yield


def _watch(layer: Any, recorder: Recorder) -> tuple[Any, Any]:
    first = layer.local_expert_indices[0]
    group = min(get_process_group_ranks(layer.ep_group))
    began: list[Any] = []

    def before(_: Any, given: tuple[Any, ...]) -> None:
        began.clear()
        counted = len(given) > 1 and isinstance(given[1], torch.Tensor) and given[1].is_cpu
        if counted and recorder.in_forward:
            began.append(recorder.mark())

    def after(_: Any, given: tuple[Any, ...], output: Any) -> None:
        if began:
            record(began.pop(), recorder.mark(), counts=given[1].tolist())

    record = partial(recorder.experts, layer=layer.layer_number, first=first, group=group)
    experts = layer.experts
    return experts.register_forward_pre_hook(before), experts.register_forward_hook(after)
