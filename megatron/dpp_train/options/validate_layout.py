"""Rules of ``validate`` about the layers of pipeline stages and chunks.

Each raises ConfigError for the first setting that cannot work.
"""

from __future__ import annotations

from megatron.dpp.errors import core_setting, require
from megatron.dpp_train.options.layer_patterns import layout_stages
from megatron.dpp_train.options.run_config import Settings

CUTS = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""Flags that cut the layers otherwise than evenly."""
NOT_PLANNED = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    *CUTS,
    "--mtp-num-layers",
    "--num-experts",
)
"""Flags that settle the layout, or of models whose layers differ."""


def check_plan(args: Settings) -> None:
    """Check the needs of ``--dpp-plan``, and refuse flags that settle the layout beside it."""
    if args.dpp_plan is None:
        return
    require(args.use_dpp, f"--dpp-plan {args.dpp_plan} plans the dynamic pipeline: add --use-dpp")
    require(
        args.pipeline_model_parallel_size > 1,
        f"--dpp-plan {args.dpp_plan} needs --pipeline-model-parallel-size of at least 2",
    )
    for flag in NOT_PLANNED:
        given = getattr(args, flag[2:].replace("-", "_"))
        require(not given, f"--dpp-plan {args.dpp_plan} does not go with {flag}")


def virtual_stages(args: Settings) -> None:
    """Derive the number of chunks; once more where ``--dpp-plan`` has settled the layout."""
    pipeline = args.pipeline_model_parallel_size
    ways = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    given = [core_setting(name) for name in ways if getattr(args, name) is not None]
    require(len(given) <= 1, f"{' and '.join(given)} exclude each other")
    chunks = _num_chunks(args)
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    if chunks > 1:
        require(
            pipeline > 1,
            f"{given[0]}: virtual stages need {core_setting('pipeline_model_parallel_size')} of at "
            "least 2",
        )
        require(
            args.overlap_p2p_comm or pipeline > 2 or args.use_dpp,
            "--no-overlap-p2p-communication with virtual stages needs "
            f"{core_setting('pipeline_model_parallel_size')} of at least 3",
        )
    elif not _to_be_planned(args):
        args.overlap_p2p_comm = args.align_param_gather = False


def _to_be_planned(args: Settings) -> bool:
    """True until a plan exists, which needs the vocabulary's size for the output layer's cost."""
    return args.dpp_plan is not None and args.pipeline_model_parallel_layout is None


def _num_chunks(args: Settings) -> int:
    """Model chunks per pipeline rank."""
    pipeline = args.pipeline_model_parallel_size
    ranks = core_setting("pipeline_model_parallel_size", pipeline)
    if _to_be_planned(args):
        return 1
    if args.pipeline_model_parallel_layout is not None:
        return _chunks_of_text(args)
    uneven = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    layers = args.num_layers
    layers += args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if args.num_virtual_stages_per_pipeline_rank is not None:
        chunks = int(args.num_virtual_stages_per_pipeline_rank)
        of_rank = core_setting("num_virtual_stages_per_pipeline_rank", chunks)
        require(
            0 < chunks * pipeline <= args.num_layers,
            f"{of_rank} x {ranks} = {chunks * pipeline} virtual stages; "
            f"{core_setting('num_layers')} is {args.num_layers}: each stage needs a layer",
        )
        if uneven == (None, None):
            require(
                layers % (chunks * pipeline) == 0,
                f"{core_setting('num_layers', layers)} is not divisible by {ranks} x {of_rank} "
                "virtual stages",
            )
        return chunks
    if uneven == (None, None):
        require(
            layers % pipeline == 0,
            f"{core_setting('num_layers', layers)} is not divisible by {ranks}",
        )
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return 1
    require(
        uneven == (None, None),
        "with --decoder-first/last-pipeline-num-layers, use "
        "--num-virtual-stages-per-pipeline-rank for virtual stages",
    )
    per_rank = layers // pipeline
    require(
        per_chunk > 0 and per_rank % per_chunk == 0,
        f"{per_rank} layers per pipeline rank are not divisible by "
        f"--num-layers-per-virtual-pipeline-stage {per_chunk}",
    )
    return int(per_rank // per_chunk)


def _chunks_of_text(args: Settings) -> int:
    """The chunks per rank in the text of ``--pipeline-model-parallel-layout``."""
    flag, text = "--pipeline-model-parallel-layout", args.pipeline_model_parallel_layout
    stages = layout_stages(text or "")
    require(
        len(stages) % args.pipeline_model_parallel_size == 0,
        f"{flag} has {len(stages)} stages, not a multiple of "
        f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}",
    )
    parts = "".join(stages)
    require(
        parts.count("E") == parts.count("L") == 1 and parts[0] + parts[-1] == "EL",
        f"{flag} {text}: begins with the embedding E and ends with the loss L, each of them once",
    )
    require(
        parts.count("t") == args.num_layers,
        f"{flag} {text}: has {parts.count('t')} layers t, --num-layers is {args.num_layers}",
    )
    return len(stages) // int(args.pipeline_model_parallel_size)


def check_cut(args: Settings) -> None:
    """Layers per stage, where the flags say them or the cut is even; and layers recomputed
    together.
    """
    if args.pipeline_model_parallel_layout is not None:
        return
    pipeline = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    ends = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    given = [each for each in ends if each is not None]
    accounted = (
        args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split
    )
    if not given:
        if not accounted:
            _check_recomputed(args, args.num_layers // (pipeline * chunks))
        return
    require(
        not accounted,
        "--decoder-first/last-pipeline-num-layers and --account-for-embedding/loss-in-pipeline-"
        "split exclude each other",
    )
    rest, middle = args.num_layers - sum(given), pipeline - len(given)
    require(
        min(given) > 0 and (rest > 0 and rest % middle == 0 if middle > 0 else middle == rest == 0),
        f"--decoder-first/last-pipeline-num-layers {' and '.join(map(str, given))} of --num-layers "
        f"{args.num_layers} leave {rest} for {middle} other stages; each must get the same number, "
        "of at least 1",
    )
    for layers in (*given, *([rest // middle] if middle else [])):
        require(
            layers % chunks == 0,
            f"a pipeline stage of {layers} layers cannot be cut into {chunks} virtual stages "
            "(--num-virtual-stages-per-pipeline-rank)",
        )
        _check_recomputed(args, layers // chunks)


def _check_recomputed(args: Settings, layers: int) -> None:
    together = args.recompute_num_layers
    require(
        args.recompute_method != "uniform" or (together and layers % together == 0),
        f"--recompute-method uniform: the {layers} layers of a virtual stage are no multiple of "
        f"--recompute-num-layers {together}",
    )
