"""Starts a run from a Hugging Face model (``--load-hf``), and writes one (``--save-hf``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron.dpp.errors import DataError
from megatron.dpp_train.hf import Entry
from megatron.dpp_train.hf.files import origin_of
from megatron.dpp_train.hf.folder import Folder
from megatron.dpp_train.hf.rules import join
from megatron.dpp_train.hf.to_hf import to_hf
from megatron.dpp_train.state import Run


def fill(run: Run, models: Sequence[Any]) -> None:
    """Copy the parameters of ``--load-hf`` into this rank's chunks, each its share.

    Raises:
        DataError: the folder is damaged, or its model is another.
    """
    folder = Folder(run.args.load_hf or "", run.args.family_file)
    entries = {(each.key, each.place): each for each in folder.entries()}
    axes = {key: len(place) for key, place in entries}
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    used = set()
    for model in models:
        state = model.sharded_state_dict(metadata={"dp_cp_group": group})
        apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor):
                leading = axes.get(shard.key, 0)
                entry = entries.get((shard.key, tuple(shard.global_offset[:leading])))
                if entry is None:
                    raise DataError(f"--load-hf {folder.path}: its model has no {shard.key}")
                _copy(folder, entry, shard)
                used.add((entry.key, entry.place))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    check_all_used(folder.path, entries.values(), set().union(*everywhere))
    run.say(f"loaded {folder.path} ({folder.config.family}, {folder.dtype})")


def check_all_used(path: Path, entries: Iterable[Entry], used: set[Any]) -> None:
    """Refuse a run whose model, over all ranks, lacks tensors of the folder.

    Raises:
        DataError: naming the first of them.
    """
    left = [each for each in entries if not each.twin and (each.key, each.place) not in used]
    if left:
        names = ", ".join(part.name for part in left[0].parts)
        raise DataError(
            f"--load-hf {path}: the run's model has no place for {names}; --model {path} gives its "
            "flags"
        )


@torch.no_grad()
def _copy(folder: Folder, entry: Entry, shard: ShardedTensor) -> None:
    """Fill a shard; rows that pad the vocabulary become zero."""
    leading = len(entry.place)
    counts = tuple(shard.global_shape[:leading])
    if counts != entry.counts:
        raise DataError(
            f"--load-hf {folder.path}: {entry.key} has {list(entry.counts)} layers (and experts), "
            f"the run's model {list(counts)}; --model {folder.path} gives its flags"
        )
    there, start = shard.global_shape[leading:], shard.global_offset[leading:]
    rows = slice(1 if entry.by_vocab else 0, None)
    if there[rows] != entry.shape[rows] or there[0] < entry.shape[0]:
        raise DataError(
            f"--load-hf {folder.path}: {entry.key} is {list(entry.shape)}, the run's model has "
            f"{list(there)}; --model {folder.path} gives its flags"
        )
    whole = join(entry.rule, folder.read(entry), folder.config.sizes)
    outer = len(start) - len(shard.local_shape)  # one of the experts that the entry holds
    local = (*(1 for _ in range(outer)), *shard.local_shape)
    box = tuple(slice(at, at + size) for at, size in zip(start, local, strict=True))
    share = whole[box].flatten(0, outer)
    if share.shape != shard.data.shape:
        shard.data.zero_()
    shard.data[: share.shape[0]].copy_(share)


def export(run: Run) -> None:
    """Write the newest checkpoint of ``--save`` to ``--save-hf`` when training is complete; on one
    rank, without any other.

    Raises:
        DataError: there is none, its kind of model is not known, or the target exists.
    """
    args = run.args
    if not args.skip_train and run.iteration < args.train_iters:
        run.say(
            f"--save-hf {args.save_hf}: not written, as training ended at iteration "
            f"{run.iteration} of {args.train_iters}"
        )
        return
    config = to_hf(
        Path(args.save or ""),
        Path(args.save_hf or ""),
        like=origin_of(args),
        family_file=Path(args.family_file) if args.family_file else None,
        progress=lambda _: None,
    )
    for note in config.notes:
        run.say(f"note: {note}")
    run.say(f"Hugging Face model: {args.save_hf}")
