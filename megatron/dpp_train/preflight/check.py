"""Checks a run by its flags and files alone, in a fraction of a second.

The launcher calls :func:`check_parsed` before it starts any process; ranks that were started with
flags call :func:`check`. Neither torch nor megatron-core is imported. What needs a GPU, a process
group or the other ranks is left to ``initialize``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.dpp.config import DppConfig, missing_part
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector
from megatron.dpp.locks import check_free
from megatron.dpp.schedule import (
    Geometry,
    check_recording,
    check_room,
    find_policy,
    parse_cap,
    replica_path,
)
from megatron.dpp_train.checkpoint.saved_args import check_tokens_kept, take_checkpoint_args
from megatron.dpp_train.cost.planned import take_plan
from megatron.dpp_train.hf.files import loaded_tokens, origin_of
from megatron.dpp_train.options import arguments
from megatron.dpp_train.options.run_config import RunConfig, Settings
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.options.validate_experts import replicas_in_step
from megatron.dpp_train.preflight.files import check_files, check_tokens, written_directories
from megatron.dpp_train.tokenizers import (
    Tokenizer,
    build_tokenizer,
    padded_vocab_size,
    tokenizer_for,
)

_MOST_ROOM = Geometry(num_ranks=1000, rank=0, num_chunks=1, num_microbatches=1)
"""A geometry in which every possible cap passes."""


def check(
    task_name: str, argv: Sequence[str] | None, world_size: int
) -> tuple[RunConfig, Tokenizer]:
    """Parsed and checked flags with what Megatron derives from them, and the tokenizer.

    Args:
        task_name: ``gpt`` or ``bert``.
        argv: the command line; ``sys.argv`` when None.
        world_size: number of processes of the job.

    Raises:
        ConfigError: a flag is unknown, or settings do not fit together.
        DataError: a file is missing or broken.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE")
    parsed = arguments.parse_args(argv)
    return check_parsed(task_name, parsed, world_size, int(here) if here else None)


def check_parsed(
    task_name: str, parsed: Settings, world_size: int, here: int | None
) -> tuple[RunConfig, Tokenizer]:
    """As :func:`check`, of flags that are parsed already.

    Args:
        here: processes of this node; None where nothing says so.
    """
    take_checkpoint_args(parsed)
    args = validate(parsed, world_size, task_name)
    if args.multi_node and here == world_size:
        raise ConfigError(
            f"--multi-node: all {world_size} processes are on this node; start the others "
            "(NUM_NODES, run_worker_*.sh), or leave the flag out"
        )
    here = here or world_size
    check_values(args)
    kind = args.dpp.transport
    if (args.use_dpp or kind != "auto") and (missing := missing_part(kind)):
        raise ConfigError(missing)
    if args.use_dpp:
        _check_addresses(args.dpp, world_size, here)
    check_files(args, task_name)
    check_shared_memory(args)
    args, tokenizer = build_vocabulary(args)
    check_tokens_kept(args, tokenizer)
    if arguments.rank_and_world()[0] == 0:
        check_tokens(args)
    if args.dpp_plan:
        args = take_plan(args)
    if args.use_dpp:
        check_schedule(args, one_node=here == world_size)
    return args, tokenizer


_SHARED_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 1 << 20
_BATCHES_AHEAD = 2
"""Microbatches that each worker of a PyTorch loader holds ready."""
_BYTES_PER_TOKEN = 28
"""Tokens, labels and positions of 8 bytes, loss mask of 4."""


def check_shared_memory(args: RunConfig) -> None:
    """Refuse a ``/dev/shm`` that cannot be written where processes need it, or without room for the
    microbatches of one rank's data loader, whose workers would end with a bus error.

    Raises:
        ConfigError: with the bytes that are free and needed.
    """
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        users = []
        if args.num_workers:
            users.append(f"{args.num_workers} workers of a data loader (--num-workers 0: none)")
        if args.save and args.ckpt_format == "torch_dist":
            users.append("the writers of a checkpoint (--ckpt-format torch: none)")
        if users:
            raise ConfigError(
                f"{_SHARED_MEMORY} is missing or cannot be written; {' and '.join(users)} need it"
            )
    if not args.num_workers:
        return
    room = os.statvfs(_SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    microbatch = args.micro_batch_size * (args.seq_length or 1) * _BYTES_PER_TOKEN
    need = max(_LEAST_BYTES, args.num_workers * _BATCHES_AHEAD * microbatch)
    if free < need:
        raise ConfigError(
            f"{_SHARED_MEMORY} has {free / 2**20:.2f} MiB free, and {args.num_workers} workers of "
            f"a data loader need {need / 2**20:.2f} MiB: --num-workers 0 needs none; in "
            "a container --shm-size=1g makes it larger"
        )


def check_not_taken(args: RunConfig, *, by_launcher: bool = False) -> None:
    """Refuse directories of checkpoints and traces that another run writes.

    Args:
        by_launcher: a trace that ``--trace-dir`` names no place for gets one of its own.

    Raises:
        DataError: naming that run's process and host.
    """
    for flag, folder in written_directories(args):
        if not (by_launcher and flag == "--trace-dir" and "trace_dir" not in args.given):
            check_free(folder, flag)


def check_values(args: RunConfig) -> None:
    """Refuse values of ``--dpp-*`` flags that mean nothing (ConfigError), also in a run that does
    not use them."""
    find_policy(args.dpp_policy)
    parse_cap(args.dpp_activation_cap, _MOST_ROOM)
    if args.dpp_inject and not args.use_dpp:  # static schedules heed it
        _check_injection(args)


def _check_injection(args: RunConfig) -> None:
    chunks = args.virtual_pipeline_model_parallel_size or 1
    for rank in range(args.pipeline_model_parallel_size):
        Injector(
            args.dpp_inject or "", rank, args.pipeline_model_parallel_size, 0, num_chunks=chunks
        )


def check_schedule(args: RunConfig, *, one_node: bool) -> None:
    """Check the policy, every rank's cap, ``--dpp-inject`` and ``--dpp-replay``.

    Args:
        one_node: recordings of all ranks are on this node. On several nodes each rank looks for its
            own.

    Raises:
        ConfigError: the first that cannot work.
    """
    policy = find_policy(args.dpp_policy)
    if args.dpp_inject:
        _check_injection(args)
    ranks = args.pipeline_model_parallel_size
    cuts = args.dpp_slice_tokens != "off"
    # Steps differ in microbatches, or in slices.
    ramped = bool(args.rampup_batch_size) or args.packing != "none" or cuts
    for rank in range(ranks):
        geometry = Geometry(
            num_ranks=ranks,
            rank=rank,
            num_chunks=args.virtual_pipeline_model_parallel_size or 1,
            num_microbatches=args.global_batch_size
            // (args.micro_batch_size * args.data_parallel_size),
            group=args.microbatch_group_size_per_vp_stage or None,
        )
        cap = parse_cap(args.dpp_activation_cap, geometry, sized=cuts)
        if not cap.needs_measuring:
            split = args.splits_backward
            check_room(policy, geometry, cap.chunks, split_backward=split)
        if args.dpp_replay and one_node:
            for replica in range(0, args.data_parallel_size, replicas_in_step(args)):
                path = replica_path(args.dpp_replay, replica)
                check_recording(path, geometry, ramped=ramped)


def _check_addresses(config: DppConfig, world_size: int, ranks_per_node: int) -> None:
    """``--node-ips``: one per node or one per rank, and no two nodes share one."""
    nodes: dict[str | None, int] = {}
    for rank in range(world_size):
        address = config.node_ip(rank, world_size, ranks_per_node)
        node = rank // ranks_per_node
        if address is not None and nodes.setdefault(address, node) != node:
            raise ConfigError(
                f"--node-ips {config.node_ips}: {address} stands for node {nodes[address]} and "
                f"node {node}"
            )


def build_vocabulary(
    args: RunConfig, build: Callable[..., Tokenizer] = build_tokenizer
) -> tuple[RunConfig, Tokenizer]:
    """``args`` with ``padded_vocab_size``, ``loss_vocab_size``, ``model_origin`` and
    ``tokenizer_tokens``, and the tokenizer.

    ``loss_vocab_size`` is the number of tokens that a loaded model has: the loss does not count the
    rows behind them. It is None where it counts all rows, as Megatron's does. ``model_origin`` is
    the folder with that model's ``config.json``, which the run's checkpoints name.

    Args:
        build: as of :func:`tokenizer_for`.

    Raises:
        ConfigError: the tokenizer has more tokens than the model, and ``--mock-data`` draws them.
        DataError: a vocabulary's file cannot be read.
    """
    tokenizer = tokenizer_for(args, build)
    if args.padded_vocab_size is None:
        size = padded_vocab_size(
            tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        )
        args = args.with_(padded_vocab_size=size)
    if args.padded_vocab_size < tokenizer.vocab_size and args.mock_data:
        raise ConfigError(f"--mock-data draws all tokens: {tokens_beyond(args, tokenizer)}")
    args = args.with_(tokenizer_tokens=tokenizer.tokens())
    existing = loaded_tokens(args)
    if existing is not None:  # a token that was added to the tokenizer exists, too
        known = min(max(existing, tokenizer.vocab_size), args.padded_vocab_size)
        origin = origin_of(args)
        folder = None if origin is None else os.path.abspath(origin)
        args = args.with_(loss_vocab_size=known, model_origin=folder)
    return args, tokenizer


def tokens_beyond(args: RunConfig, tokenizer: Tokenizer) -> str | None:
    """A line about tokens that the model has no row for; None without one. Data that holds one is
    refused before the run (:func:`check_tokens`)."""
    rows = args.padded_vocab_size
    if tokenizer.vocab_size <= rows:
        return None
    names = [t for t, i in tokenizer.__dict__.get("vocab", {}).items() if i >= rows]
    shown = ", ".join(map(repr, names[:3])) + (", ..." if names[3:] else "")
    files = " ".join(tokenizer.unique_identifiers["tokenizer_path"]) or args.tokenizer_type
    model = f"{args.load_hf}/config.json" if args.load_hf else "the model (--padded-vocab-size)"
    return (
        f"the tokenizer {files} has {tokenizer.vocab_size} tokens, {model} {rows}: no text may "
        f"hold {shown or f'ids from {rows} on'}"
    )
