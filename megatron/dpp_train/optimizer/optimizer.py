"""Parameter groups, and checkpoints of a distributed optimizer around PyTorch's Adam.

megatron-core's distributed optimizer was written for Transformer Engine's and Apex's Adam, which
keep one step count for all parameters; PyTorch's has a tensor of its own per parameter.
``checkpoint.contents`` calls :func:`fill_state` before it asks for a sharded state to load,
``checkpoint.loader`` loads under :func:`steps_may_lack`, and calls :func:`own_steps` after it.
``loop.zero_engine`` takes :func:`parameter_groups`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.dpp.core import compat


def parameter_groups(chunks: list[Any], settings: Any) -> list[dict[str, Any]]:
    """megatron-core's groups of the parameters of ``chunks``, by weight decay and learning rate.

    Args:
        settings: megatron-core's ``OptimizerConfig``.
    """
    groups: list[dict[str, Any]] = compat.lookup("optimizer:_get_param_groups")(
        chunks, settings, get_standard_config_overrides(config=settings)
    )
    return groups


def fill_state(optimizer: Any) -> None:
    """Give distributed optimizers without state one of zeros, which loading overwrites.

    megatron-core's ``sharded_state_dict`` reads the step from the state of PyTorch's Adam
    (distrib_optimizer.py:641), which has none before its first step; Transformer Engine's keeps the
    step elsewhere, so only runs without that package meet this.
    """
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if (
            isinstance(each, DistributedOptimizer)
            and not each.is_stub_optimizer
            and not each.optimizer.state
        ):
            each._init_optimizer_states_with_dummy_values()


def steps_may_lack() -> contextlib.AbstractContextManager[None]:
    """Keep the parts of a parameter's state that a loaded checkpoint does not have.

    distrib_optimizer.py:940 asks the checkpoint for every tensor of PyTorch's Adam, but the step is
    never stored by parameter (distrib_optimizer.py:2101).
    """

    def put_what_is_there(put: Any, self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        put(
            self, model_param, {**self._get_main_param_and_optimizer_states(model_param), **tensors}
        )

    name = "optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states"
    return compat.patched(name, put_what_is_there)


def own_steps(optimizer: Any) -> None:
    """Give every parameter the checkpoint's step count, in a tensor of its own.

    distrib_optimizer.py:820 puts one tensor into the states of all parameters, in which PyTorch's
    Adam then counts every parameter's update, and the states of :func:`fill_state` bring a count of
    1. Either way the bias correction would be off after a resume. The checkpoint's count is in the
    parameter groups (distrib_optimizer.py:656).
    """
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(each, DistributedOptimizer) or each.is_stub_optimizer:
            continue
        for group in each.optimizer.param_groups:
            for parameter in group["params"]:
                state = each.optimizer.state.get(parameter, {})
                if "step" in group and isinstance(state.get("step"), torch.Tensor):
                    state["step"] = torch.full_like(state["step"], float(group["step"]))
