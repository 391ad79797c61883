"""Checks resolved flags, plans their layers, and derives the shape of the run.

``main`` and ``auto`` both use this, so that an estimate is always of the flags that would run.
"""

from __future__ import annotations

import dataclasses

from megatron.dpp_train.cost.from_flags import check_format, shape_of
from megatron.dpp_train.cost.planned import take_plan
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.launch.flags import Flags
from megatron.dpp_train.launch.resolve import Devices, Resolved
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.preflight import check as preflight

_PLAN = "--dpp-plan"


def checked(resolved: Resolved, devices: Devices) -> RunConfig:
    """The training script's arguments.

    Raises:
        ConfigError: flags that are unknown or do not fit together.
    """
    check_format(resolved.parsed, devices.device)
    args = validate(resolved.parsed, devices.world_size, resolved.arch, elsewhere=devices.elsewhere)
    preflight.check_values(args)
    if args.use_dpp and not args.dpp_plan:  # else the number of chunks is not known yet
        preflight.check_schedule(args, one_node=devices.num_nodes == 1)
    return args


def planned(resolved: Resolved, devices: Devices) -> Resolved:
    """The same run with the planned layout in the place of ``--dpp-plan``, so that not every rank
    plans it again.

    Raises:
        ConfigError: as :func:`checked`; or no layout is possible.
        DataError: a vocabulary, or the run to plan from, that cannot be read.
    """
    if _PLAN not in resolved.flags:
        return resolved
    return with_plan(resolved, plan_flags(resolved, devices))


def plan_flags(resolved: Resolved, devices: Devices) -> Flags:
    """The flags that ``--dpp-plan`` leads to; raises as :func:`planned`."""
    args, _ = preflight.build_vocabulary(checked(resolved, devices), devices.build_tokenizer)
    args = take_plan(args)
    return {
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
        "--dpp-activation-cap": args.dpp_activation_cap,
    }


def with_plan(resolved: Resolved, plan: Flags) -> Resolved:
    """The same run with these flags in the place of ``--dpp-plan``."""
    flags = {name: value for name, value in resolved.flags.items() if name != _PLAN}
    return dataclasses.replace(resolved, flags=flags | plan)


def shape_from(resolved: Resolved, devices: Devices, *, plan: bool = True) -> RunShape:
    """The shape of a resolved run; its flags are checked on the way.

    Args:
        plan: where ``--dpp-plan`` is left; else its layers are taken to lie evenly.

    Raises:
        ConfigError: flags that are unknown or do not fit together.
        DataError: a vocabulary that cannot be read.
    """
    args, _ = preflight.build_vocabulary(checked(resolved, devices), devices.build_tokenizer)
    if args.dpp_plan and plan:
        args = take_plan(args)
    return shape_of(args, on_gpu=devices.on_gpu, arch=resolved.arch, per_node=devices.per_node)
