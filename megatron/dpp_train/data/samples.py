"""Data sets, samplers, loaders and batches; sample counts are Megatron-LM's.

``job`` builds the iterators of every model chunk; ``tasks`` takes batches through
:func:`tensor_parallel_batch`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron.dpp.errors import DataError, one_line
from megatron.dpp.sim.batches import BatchPlans
from megatron.dpp_train.checkpoint.plain_data import only_plain_data
from megatron.dpp_train.data.index_cache import drop_stale, own_files_only
from megatron.dpp_train.data.sequences import sequence_loader
from megatron.dpp_train.data.workers import Loader
from megatron.dpp_train.exits import largest
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.state import Run, ends


class Task(Protocol):
    """The part of a pre-training task that concerns its data."""

    @property
    def datasets(self) -> Callable[[Run], tuple[type, Any]]:
        """Gives the data set class and its configuration."""

    @property
    def every_stage_reads(self) -> bool:
        """Stages in the middle of the pipeline need batches too."""


@dataclass
class _Sampler:
    """Base of Megatron-LM's two samplers: sample numbers of one replica's microbatches.

    Args:
        consumed: samples that the run has consumed before, as checkpoints hold it.
        replica: number of this data-parallel rank.
        sharded: each replica shuffles its own contiguous share, else all shuffle the whole.
    """

    total: int
    consumed: int
    micro_batch_size: int
    replica: int
    num_replicas: int
    sharded: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self._stride = self.micro_batch_size * self.num_replicas
        self._check()

    def _check(self) -> None:
        """Refuses too few samples."""
        raise NotImplementedError


class SequentialSampler(_Sampler):
    """Samples in order; a replica takes its slice of each ``micro_batch_size * num_replicas``
    consecutive ones. A last, incomplete batch is dropped."""

    def _check(self) -> None:
        if self.consumed >= self.total:
            raise DataError(
                f"no samples left: {self.consumed} of {self.total} are consumed; "
                "lower --train-iters or add data"
            )

    def __len__(self) -> int:
        return (self.total - self.consumed) // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(len(self)):
            start = self.consumed + batch * self._stride + self.replica * self.micro_batch_size
            yield list(range(start, start + self.micro_batch_size))


class CyclicSampler(_Sampler):
    """Samples without end, shuffled anew in every epoch with its number as the seed."""

    def _check(self) -> None:
        if self.total < self._stride:
            raise DataError(f"{self.total} samples do not fill one batch of {self._stride}")

    def __len__(self) -> int:
        return self.total // self._stride

    def __iter__(self) -> Iterator[list[int]]:
        size = self.micro_batch_size
        epoch, offset = divmod(self.consumed, self.total - self.total % self._stride)
        generator = torch.Generator().manual_seed(epoch)
        share = (len(self) if self.sharded else self.total // size) * size
        order = torch.randperm(share, generator=generator).tolist()
        if self.sharded:
            start = self.replica * share
            indices = [start + i for i in order[offset // self.num_replicas :]]
        else:
            indices = order[offset:][self.replica :: self.num_replicas]
        for start in range(0, len(indices) - size + 1, size):
            self.consumed += self._stride
            yield indices[start : start + size]


class Iterators(NamedTuple):
    """One iterator per use: None where this rank reads no data, a list with several chunks.
    ``has_valid``, ``has_test`` and the iterations of an evaluation are the same on all ranks."""

    train: Any
    valid: Any
    test: Any
    has_valid: bool
    has_test: bool
    eval_iters: int
    plans: BatchPlans | None
    """The plans of training batches, where sequences have unlike lengths."""

    def close(self) -> None:
        """Ends the loaders' workers, which then remove their temporary folders. Python's own exit
        would kill them: reference cycles of a schedule hold the iterators until after it."""
        for use in self[:3]:
            for samples in use if isinstance(use, list) else [use]:
                if samples is not None:
                    samples.close()
        if self.plans is not None:
            self.plans.close()


class Samples:
    """A loader's iterator that can be released while others hold this object."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        """Releases the iterator; a loader ends its workers when its last reference goes."""
        self._iterator = iter(())


def num_samples(args: RunConfig) -> tuple[int, int | None, int]:
    """Samples of training, validation and test that the run will read.

    At least one for each evaluation: megatron-core takes 0 for "as many as possible", which for
    BERT fills the memory. None stands for a full validation.
    """
    size = args.global_batch_size
    train = args.train_samples or args.train_iters * size
    if args.full_validation:
        valid = None
    elif args.skip_train or not args.eval_interval:
        valid = args.eval_iters * size
    else:
        valid = (args.train_iters // args.eval_interval + 1) * args.eval_iters * size
    return train, valid if valid is None else max(1, valid), max(1, args.eval_iters * size)


def build_iterators(run: Run, num_chunks: int, task: Task) -> Iterators:
    """Builds the iterators of this rank's chunks, behind the samples already consumed. A
    collective.

    Raises:
        DataError: an index is missing or broken, or there is nothing to train on.
    """
    args = run.args
    chunks = [None] if num_chunks == 1 else list(range(num_chunks))
    loaders = [_chunk_loaders(run, task, vp_stage) for vp_stage in chunks]
    there, eval_iters = _agree(run, loaders)
    plans = getattr(loaders[0][0], "plans", None)
    for each in loaders[1:] if plans is not None else ():
        each[0].plans = plans  # one planner, whose process begins with the first batch
    readers = sum(_is_read(task, vp_stage) for vp_stage in chunks)
    _draw_seeds(readers * (sum(there) if args.dataloader_type == "single" else there[0]))
    built = [
        [_samples(args, loader, eval_iters if use else None) for use, loader in enumerate(each)]
        for each in loaders
    ]
    train, valid, test = built[0] if num_chunks == 1 else map(list, zip(*built, strict=True))
    return Iterators(train, valid, test, there[1], there[2], eval_iters, plans)


def _draw_seeds(count: int) -> None:
    """Draws from the global generator as Megatron-LM's loaders do when their iterators are made.

    Without a GPU dropout uses that generator too. Loaders have their own here: the global one
    advances equally on tensor-parallel ranks without loaders, and never at a first batch or the end
    of an epoch, which may come after a resumed run restores it.
    """
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_()


def _is_read(task: Task, vp_stage: int | None) -> bool:
    return task.every_stage_reads or any(ends(vp_stage))


def _chunk_loaders(run: Run, task: Task, vp_stage: int | None) -> list[Any]:
    """Loaders of training, validation and test; None for a set that is missing or not read here."""
    kind, config = task.datasets(run)

    args = run.args

    def read_here() -> bool:
        return _is_read(task, vp_stage) and bool(mpu.get_tensor_model_parallel_rank() == 0)

    def built_here() -> bool:
        return args.variable_lengths or read_here()  # every rank needs the lengths

    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            drop_stale(kind, config)
        with only_plain_data("the cache of the data's indices"), own_files_only():
            train, valid, test = BlendedMegatronDatasetBuilder(
                kind, list(num_samples(args)), built_here, config
            ).build()
        if getattr(config, "defer_npy_index_mmap", False):
            _check_deferred([train, valid, test])
    except Exception as error:
        # megatron-core makes a plain Exception of an OSError on the rank that builds.
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        if not isinstance(cause, (OSError, AssertionError, ValueError)):
            raise
        advice = "" if cause is error else " (indices of samples are kept in --data-cache-path)"
        raise DataError(f"data {_sources(args)}: {one_line(cause)}{advice}") from error
    from_start = args.skip_train or args.full_validation
    loader: Callable[[Any, int], Any] = partial(_loader, args)
    judge = loader
    if args.variable_lengths:
        loader = partial(sequence_loader, args, reads=read_here())
        judge = partial(loader, plain=True)
    # A run that is at its end, which has nothing to train, may have consumed all samples.
    consumed = run.consumed_train_samples if run.iteration < args.train_iters else 0
    return [
        None if args.skip_train else loader(train, consumed),
        judge(valid, 0 if from_start else run.consumed_valid_samples),
        judge(test, 0),
    ]


def _check_deferred(datasets: Iterable[Any]) -> None:
    """Refuses an index that is no array, which megatron-core would unpickle when it is used
    (``--dataloader-defer-npy-index-mmap``); raises ValueError."""
    for dataset in filter(None, datasets):
        for name, path in vars(dataset).items():
            if name.startswith("path_to_") and str(path).endswith(".npy") and os.path.exists(path):
                numpy.load(path, mmap_mode="r", allow_pickle=False)
        _check_deferred(getattr(dataset, "datasets", []))


def _agree(run: Run, loaders: list[list[Any]]) -> tuple[list[bool], int]:
    """Agrees with all ranks on the sets that exist and the iterations of an evaluation; only ranks
    that read know the length of a full validation.

    Raises:
        DataError: the run trains and there is no training set.
    """
    args = run.args
    here = [any(each[use] is not None for each in loaders) for use in range(3)]
    length = 0
    if args.full_validation and here[1]:
        length = max(len(each[1]) for each in loaders if each[1] is not None)
        length = max(1, length // _batches_per_evaluation(args))
    *there, length = largest([*map(int, here), length])
    if not there[0] and not args.skip_train:
        raise DataError(f"data {_sources(args)}: no training set; give it a share in --split")
    eval_iters = length or args.eval_iters
    for name, is_there in zip(("validation", "test"), there[1:], strict=True):
        if eval_iters and not is_there:
            run.say(f"no {name} set: it is not evaluated")
    return [bool(each) for each in there], eval_iters


def _samples(args: RunConfig, loader: Any, eval_iters: int | None) -> Samples | None:
    if loader is None:
        return None
    return Samples(_endless(args, loader, eval_iters) if len(loader) else iter(()))


def _sources(args: RunConfig) -> str:
    for name in ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path"):
        value = getattr(args, name)
        if value:
            return " ".join(value) if isinstance(value, list) else str(value)
    return "--mock-data"


def _loader(args: RunConfig, dataset: Any, consumed: int) -> Any:
    if dataset is None or len(dataset) == 0:  # empty: an evaluation of no iterations
        return None
    place = (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    kind = SequentialSampler if args.dataloader_type == "single" else CyclicSampler
    sampler = kind(
        len(dataset), consumed, args.micro_batch_size, *place, sharded=args.data_sharding
    )
    return Loader(args, dataset, batch_sampler=sampler, persistent_workers=args.num_workers > 0)


def _endless(args: RunConfig, loader: Any, eval_iters: int | None) -> Iterator[Any]:
    """Batches of a loader; ``eval_iters`` of an evaluation, None in training."""
    whole = args.full_validation and eval_iters is not None
    if args.dataloader_type == "single" and not whole:
        return iter(loader)

    length = (eval_iters or 0) * _batches_per_evaluation(args) if whole else None

    def epochs() -> Iterator[Any]:
        while True:  # each evaluation starts at the beginning of the set
            yield from itertools.islice(loader, length)

    return epochs()


def _batches_per_evaluation(args: RunConfig) -> int:
    """Microbatches of one replica in one iteration of an evaluation."""
    return int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


def next_of(iterator: Iterator[Any]) -> Any:
    """The next sample of a loader's iterator.

    Raises:
        DataError: the data set has ended.
    """
    try:
        return next(iterator)
    except StopIteration:
        raise DataError(
            "the data set has ended: it holds fewer samples than the run asks for; lower "
            "--train-iters or --eval-iters, add data, or give weights to --data-path's prefixes "
            "(then they repeat)"
        ) from None


def tensor_parallel_batch(
    sample: Mapping[str, torch.Tensor] | None,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """A batch, which tensor-parallel rank 0 has read and broadcasts to its group.

    Args:
        sample: what was read; None on other ranks.
        layout: shape and dtype of each wanted tensor; other entries of the sample are dropped.
    """
    group = mpu.get_tensor_model_parallel_group()
    source = mpu.get_tensor_model_parallel_src_rank()
    batch: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in layout.items():
        if sample is not None:
            tensor = sample[name].to(device=device, dtype=dtype, non_blocking=True)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        if group.size() > 1:
            dist.broadcast(tensor, source, group=group)
        batch[name] = tensor
    return batch
