"""``--dpp-plan``: lays the layers out by their cost."""

from __future__ import annotations

from pathlib import Path

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule import BUILT_IN
from megatron.dpp_train.cost.from_flags import slices_of, stage_shape_of
from megatron.dpp_train.cost.model_costs import ModelCosts
from megatron.dpp_train.cost.planner import CAPS, Planner, best_of, from_run
from megatron.dpp_train.cost.run_costs import costs_of_run, even_layers
from megatron.dpp_train.cost.shape import RunShape
from megatron.dpp_train.cost.times import planning_costs
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.validate_layout import virtual_stages

SHAPES = "shapes"
_REPOSITORY = Path(__file__).resolve().parents[3]
_SIMULATED_PER_RANK = 4
_MAX_TASKS = 50_000
"""With these limits a plan takes 0.1 to 2 s. Twice as many microbatches and three times as many
layouts took four times as long, for plans that were as fast within 1 %."""

_WORTH = 0.01
"""Share of the time that a plan with more memory, or with four chunks, must gain."""
_NEAR = 0.04
"""A number of chunks is skipped where its balanced layout takes longer than the best plan by this
share. That changed none of 288 plans, which took a fifth less time."""


def take_plan(args: RunConfig) -> RunConfig:
    """``args`` with the planned layout, number of chunks and, where it is ``auto``, activation cap.

    Every rank plans for itself with the same result, as all read the same costs.

    Raises:
        ConfigError: no plan is possible, or the run does not fit the model.
        DataError: the run cannot be read.
    """
    ranks = args.pipeline_model_parallel_size
    if args.num_layers < ranks - 2:
        raise ConfigError(
            f"--dpp-plan {args.dpp_plan}: --num-layers {args.num_layers} on {ranks} pipeline "
            f"ranks: each but the first and the last needs a layer, {ranks - 2} in all"
        )
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    chunks = [number for number in (4, 2, 1) if ranks * number - 2 <= args.num_layers]
    cap, planners, made = args.dpp_activation_cap, dict[int, Planner](), dict[int, Planner]()
    for number in chunks:
        units = slices_of(args, microbatches, num_chunks=number)
        if len(units) not in made:
            made[len(units)] = _planner(args, units, microbatches)
        planners[number] = made[len(units)]
    found = best_of(planners, CAPS if cap == "auto" else [cap], within=_NEAR)
    good = [each for each in found if each.seconds <= found[0].seconds * (1 + _WORTH)]
    best = min(good, key=lambda each: (each.layout.num_chunks > 2, max(each.peak_bytes)))
    number = best.layout.num_chunks
    units = slices_of(args, microbatches, num_chunks=number, cap=best.cap)
    if made.get(len(units)) is not planners[number]:  # another cap, by which the run weighs slices
        (best,) = _planner(args, units, microbatches).best([number], [best.cap])
    draft = args.draft()
    draft.pipeline_model_parallel_layout = best.layout.text()
    virtual_stages(draft)
    draft.dpp_activation_cap = best.cap
    return draft.frozen()


def _planner(args: RunConfig, units: list[RunShape], num_microbatches: int) -> Planner:
    """The planner of microbatches that run in these units."""
    ranks = args.pipeline_model_parallel_size
    return Planner(
        _costs(args, units),
        ranks,
        num_microbatches,
        split_backward=args.splits_backward,
        most_simulated=max(ranks + 1, _SIMULATED_PER_RANK * ranks // len(units)),
        max_tasks=_MAX_TASKS,
        policy=args.dpp_policy if args.dpp_policy in BUILT_IN else "dynamic",
    )


def describe(args: RunConfig) -> str:
    """The plan as flags that ask for it without planning."""
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    units, cut = slices_of(args, microbatches), ""
    if args.dpp_slice_tokens != "off":
        whole = len(units) == 1
        cut = f" for {'whole sequences' if whole else f'{len(units)} slices'} of a microbatch"
    return (
        f"planned from {args.dpp_plan}{cut}: --pipeline-model-parallel-layout "
        f"'{args.pipeline_model_parallel_layout}' --dpp-activation-cap {args.dpp_activation_cap}"
    )


def _costs(args: RunConfig, units: list[RunShape]) -> ModelCosts:
    one = stage_shape_of(args)
    shapes = planning_costs(one)
    sliced = planning_costs(one, units=units) if len(units) > 1 else shapes
    if not args.dpp_plan or args.dpp_plan == SHAPES:
        return sliced
    measured = costs_of_run(args.dpp_plan, _REPOSITORY)
    if measured.num_ranks != args.pipeline_model_parallel_size:
        raise ConfigError(
            f"--dpp-plan {args.dpp_plan}: that run has {measured.num_ranks} pipeline ranks, this "
            f"one --pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    remedy = (
        f"--dpp-plan {args.dpp_plan} must be of a run with the default layout; "
        "megatron-dpp plan --layers takes others"
    )
    layers = even_layers(args.num_layers, len(measured.tasks), remedy)
    costs = from_run(measured, layers)[0].with_memory_of(shapes)
    return costs if sliced is shapes else costs.in_slices(shapes, sliced)
