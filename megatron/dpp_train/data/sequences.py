"""Sequences of unlike length (``--sft``, ``--variable-length``): data set, loader and batches.

A sample is a whole document. Its length is known from the index, so that every rank plans a global
batch by itself (:mod:`megatron.dpp.sim.batches`), with its replicas, microbatches and their order.
The state of the data is one number, the samples consumed so far.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron.dpp.errors import DataError
from megatron.dpp.schedule import in_bytes
from megatron.dpp.sim import slices
from megatron.dpp.sim.batches import BatchPlans, BatchSettings
from megatron.dpp.sim.orders import OrderPlanner
from megatron.dpp.sim.pipeline_model import PipelineModel
from megatron.dpp.trace.step_lengths import FILE, StepLengths, write_step
from megatron.dpp_train.cost.flops import head_share, length_costs
from megatron.dpp_train.data.sequence_files import answers_prefix, keeps_answers
from megatron.dpp_train.data.workers import Loader
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.options.trace_layout import trace_layout

Sample = dict[str, np.ndarray]
"""``tokens``: inputs and the last label; ``mask``: 1 for labels that have a loss."""


class TokenFile:
    """The documents of one prefix: token ids and, of chats, the marks of their answers.

    Raises:
        OSError, ValueError: a file is missing, or marks and tokens differ in their lengths.
    """

    def __init__(self, prefix: str, *, chats: bool, mmap: bool) -> None:
        self.prefix = prefix
        self.tokens = IndexedDataset(prefix, mmap=mmap)
        self.lengths: np.ndarray = self.tokens.sequence_lengths
        self.answers = IndexedDataset(answers_prefix(prefix), mmap=mmap) if chats else None
        marked = self.lengths if self.answers is None else self.answers.sequence_lengths
        if not np.array_equal(self.lengths, marked):
            raise ValueError(f"{answers_prefix(prefix)} marks other documents than {prefix}")

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class SequenceConfig(GPTDatasetConfig):  # type: ignore[misc]
    """Configuration of a :class:`SequenceDataset`.

    Args:
        chats: answers are marked, and have a loss alone.
        overlong: ``cut``, ``skip`` or ``error``, for longer documents than ``sequence_length``.
        end_of_document: an id whose positions have no loss, or None.
    """

    chats: bool = False
    overlong: str = "error"
    end_of_document: int | None = None


class SequenceDataset(MegatronDataset):  # type: ignore[misc]
    """Documents as samples, in an order that is drawn anew in every epoch. Documents of fewer than
    two tokens are left out, and chats without an answer in what they are cut to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._choose()

    def _choose(self) -> None:
        """Choose the documents that are used, and their lengths."""
        most = self.config.sequence_length
        lengths = self.dataset.lengths[self.indices] - 1  # the last token is a label alone
        usable = lengths >= 1
        if self.config.overlong == "skip":
            usable &= lengths <= most
        elif self.config.overlong == "error" and lengths.max(initial=0) > most:
            raise ValueError(f"a document has {lengths.max() + 1} tokens, above {most + 1}")
        if self.config.chats and self.config.overlong == "cut":
            usable &= keeps_answers(self.dataset.prefix, most)[self.indices]
        self._documents = self.indices[usable]
        self._lengths = np.minimum(lengths[usable], most)
        self._orders: dict[int, np.ndarray] = {}

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: TokenFile) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> TokenFile:
        return TokenFile(dataset_path, chats=config.chats, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        if not len(self._documents):
            return 0
        return len(self._documents) if self.num_samples is None else int(self.num_samples)

    def length(self, index: int) -> int:
        """Tokens of a sample's input."""
        return int(self._lengths[self._place(index)])

    def __getitem__(self, index: int) -> Sample:
        place = self._place(index)
        document, size = int(self._documents[place]), int(self._lengths[place]) + 1
        tokens = self.dataset.tokens.get(document, 0, size).astype(np.int64)
        answers = self.dataset.answers
        if answers is None:
            mask = np.ones(size - 1, dtype=np.float32)
            if self.config.end_of_document is not None:
                mask[tokens[:-1] == self.config.end_of_document] = 0.0
        else:
            mask = answers.get(document, 0, size)[1:].astype(np.float32)
        return {"tokens": tokens, "mask": mask}

    def _place(self, index: int) -> int:
        """The document of a sample, as a place in the documents that are used."""
        epoch, place = divmod(int(index), len(self._documents))
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            seeds = (self.config.random_seed, self.index_split.value, epoch)
            self._orders[epoch] = np.random.default_rng(seeds).permutation(len(self._documents))
        return int(self._orders[epoch][place])


def lengths_of(dataset: Any, first: int, end: int) -> list[int]:
    """Lengths of samples ``first`` to ``end`` of a :class:`SequenceDataset`, or a blend of them."""
    numbers = range(first, min(end, len(dataset)))
    if isinstance(dataset, BlendedDataset):
        sets, places = dataset.dataset_index, dataset.dataset_sample_index
        return [dataset.datasets[sets[i]].length(places[i]) for i in numbers]
    return [dataset.length(i) for i in numbers]


def write_lengths(args: RunConfig, plans: BatchPlans, first: int, iteration: int) -> None:
    """Writes the lengths of a replica's step beside its trace, once per replica.

    Raises:
        DataError: the file cannot be written.
    """
    place = (
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_context_parallel_rank(),
    )
    if not args.trace or any(place):
        return
    if plans.settings.slices is not None:
        return  # a task's number is that of a slice, of which the file knows nothing
    own = plans.own_lengths(first)
    replica = mpu.get_data_parallel_rank()
    folder = trace_layout(args).path(args.trace_dir).parent
    try:
        write_step(
            folder / FILE.format(replica),
            iteration,
            StepLengths(own, plans.drawn_places(first), sum(plans.own_sizes(first))),
        )
    except OSError as error:
        raise DataError(f"--trace-dir {folder}: {error.strerror}") from error


def longest_microbatch(args: RunConfig) -> int:
    """Tokens of the longest row that a microbatch may have."""
    if not args.packing_budget:
        return int(args.seq_length)
    return int(-(-args.packing_budget // args.length_multiple) * args.length_multiple)


def pipeline_model(args: RunConfig) -> PipelineModel:
    """The pipeline as the planner of batches simulates it, equal on all ranks."""
    cap = args.dpp_activation_cap
    return PipelineModel(
        num_ranks=args.pipeline_model_parallel_size,
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        longest=longest_microbatch(args) * args.micro_batch_size,
        policy=args.dpp_policy if args.use_dpp else None,
        cap="auto" if not args.use_dpp or in_bytes(cap) else cap,
        split_backward=args.splits_backward,
        costs=length_costs(args),
        head=head_share(args),
    )


class Slice(NamedTuple):
    """The tokens ``[begin, end)`` of a row of ``total``; ``row`` counts those of a step."""

    row: int
    begin: int
    end: int
    total: int

    @property
    def is_cut(self) -> bool:
        """True if the row has other slices."""
        return self.end - self.begin < self.total


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a replica, or a slice of one.

    Args:
        lengths: of its sequences.
        shape: rows and their length.
        share: microbatches per sequence of the global batch; a sequence's weight in the loss.
        sample: its tensors by name; None on ranks that read no data.
        slice: its place in its row, in a run that cuts rows; then others know of a row's slices.
        num_units: slices of its step, likewise.
        is_weighted: the losses of its step are weighted sums, as rows are cut or replicas have
            unlike numbers of them.
    """

    lengths: tuple[int, ...]
    shape: tuple[int, int]
    share: float
    sample: dict[str, torch.Tensor] | None
    slice: Slice | None = None
    num_units: int = 0
    is_weighted: bool = False

    def slices(self, row: int, ends: Sequence[int], num_units: int) -> list[Microbatch]:
        """This microbatch cut into slices, whose losses are weighted as those of whole sequences.

        Args:
            row: number of this microbatch in the step.
            ends: the end of each slice, in tokens with padding.
            num_units: slices of the step.
        """
        places = [Slice(row, a, b, ends[-1]) for a, b in zip((0, *ends), ends, strict=False)]
        return [
            replace(
                self,
                shape=(1, at.end - at.begin),
                sample=self.sample
                and {name: each[:, at.begin : at.end] for name, each in self.sample.items()},
                slice=at,
                num_units=num_units,
            )
            for at in places
        ]

    def packed(self, device: torch.device) -> dict[str, Any]:
        """Starts of the sequences in the one row, as megatron-core's ``cu_seqlens``, and the length
        of the longest. Padding belongs to the last one."""
        starts = [0, *itertools.accumulate(self.lengths)]
        starts[-1] = self.shape[1]
        longest = max(end - start for start, end in itertools.pairwise(starts))
        cu_seqlens = torch.tensor(starts, dtype=torch.int32)
        if device.type == "cuda":
            cu_seqlens = cu_seqlens.pin_memory().to(device, non_blocking=True)
        return {"cu_seqlens": cu_seqlens, "max_seqlen": longest}


def next_step(iterator: Iterator[Microbatch]) -> list[Microbatch]:
    """The slices of the next step, of a loader that cuts rows."""
    first = next(iterator)
    return [first, *itertools.islice(iterator, first.num_units - 1)]


def longest_unit(args: RunConfig) -> int:
    """Tokens of the longest row that passes between stages: of a slice where rows are cut, unless
    ``auto`` may run them whole."""
    longest = longest_microbatch(args)
    if args.slice_tokens is None or (args.slice_tokens == 0 and args.holds_whole):
        return longest
    multiple, costs = args.length_multiple, length_costs(args)
    most = slices.tokens_for(sys.maxsize, 1, costs, asked=args.slice_tokens, multiple=multiple)
    return min(longest, slices.longest_unit(most, multiple))


def collate(samples: Sequence[Sample], settings: BatchSettings) -> dict[str, torch.Tensor]:
    """The tensors of a microbatch; tokens beyond a sequence are padding without a loss.

    ``loss_weights`` gives every sequence of a microbatch the same weight.
    """
    packed = settings.packing != "none"
    width = settings.width([len(each["mask"]) for each in samples])
    rows = 1 if packed else len(samples)
    names = ("tokens", "labels", "position_ids")
    batch: dict[str, Any] = {name: np.zeros((rows, width), dtype=np.int64) for name in names}
    batch |= {n: np.zeros((rows, width), dtype=np.float32) for n in ("loss_mask", "loss_weights")}
    begin = 0
    for number, sample in enumerate(samples):
        row, start = (0, begin) if packed else (number, 0)
        mask, tokens = sample["mask"], sample["tokens"]
        end = begin = start + len(mask)
        batch["tokens"][row, start:end] = tokens[:-1]
        batch["labels"][row, start:end] = tokens[1:]
        batch["loss_mask"][row, start:end] = mask
        batch["loss_weights"][row, start:end] = mask / max(mask.sum(), 1.0)
        stop = width if not packed or number == len(samples) - 1 else end
        # Padding keeps the last position, as a longer row may have none to go on with.
        places = np.minimum(np.arange(stop - start), len(mask) - 1)
        batch["position_ids"][row, start:stop] = places
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def batch_settings(args: RunConfig, *, plain: bool = False) -> BatchSettings:
    """The settings of a run's plans, equal on all ranks; ``plain`` ones neither pack, sort nor pad
    to buckets."""
    static_chunks = args.virtual_pipeline_model_parallel_size and not args.use_dpp
    return BatchSettings(
        num_replicas=args.data_parallel_size,
        num_ranks=args.pipeline_model_parallel_size,
        micro_batch_size=args.micro_batch_size,
        multiple=args.pipeline_model_parallel_size if static_chunks else 1,
        packing="none" if plain else args.packing,
        budget=args.packing_budget,
        length_multiple=args.length_multiple,
        buckets=() if plain else args.length_buckets,
        order="drawn" if plain else args.order,
        costs=length_costs(args),
        slices=args.slice_tokens,
        sorts=not plain,
        holds_whole=args.holds_whole,
    )


class SequenceLoader:
    """Microbatches of one replica, from the samples consumed so far to the end of the data set.

    Every rank has one, since all need the lengths; only those that read have workers.
    """

    def __init__(
        self, args: RunConfig, dataset: Any, consumed: int, *, reads: bool, plain: bool = False
    ) -> None:
        self._args, self._dataset, self._reads = args, dataset, reads
        self._first, size = consumed, args.global_batch_size
        self._end = consumed + (len(dataset) - consumed) // size * size
        if consumed >= len(dataset):
            raise DataError(
                f"no samples left: {consumed} of {len(dataset)} sequences are consumed; lower "
                "--train-iters or add data"
            )
        self.plans = BatchPlans(
            lambda first, end: lengths_of(dataset, first, end),
            size,
            mpu.get_data_parallel_rank(),
            batch_settings(args, plain=plain),
            OrderPlanner(pipeline_model(args)) if _plans(args) and not plain else None,
        )

    def __len__(self) -> int:
        return int((self._end - self._first) // self._args.global_batch_size)

    def batches(self) -> Iterator[list[int]]:
        """Samples of each microbatch."""
        for first in range(self._first, self._end, self._args.global_batch_size):
            yield from self.plans.microbatches(first)

    def __iter__(self) -> Iterator[Microbatch]:
        loaded = iter(self._loader()) if self._reads else itertools.repeat(None)
        size, settings = self._args.global_batch_size, self.plans.settings
        for first in range(self._first, self._end, size):
            microbatches = self.plans.microbatches(first)
            share = len(microbatches) * self._args.data_parallel_size / size
            lengths = self.plans.lengths(first)
            ends = self.plans.slice_ends(first)
            num_units = sum(map(len, ends))
            for row, each in enumerate(microbatches):
                own = tuple(lengths[number - first] for number in each)
                whole = Microbatch(own, settings.shape(own), share, next(loaded))
                if settings.slices is not None:
                    # A step that runs whole has the bits of a run without slices.
                    is_weighted = num_units > len(microbatches) or share != 1.0
                    whole = replace(whole, is_weighted=is_weighted)
                    yield from whole.slices(row, ends[row], num_units)
                else:
                    yield whole

    def _loader(self) -> Any:
        collating = partial(collate, settings=self.plans.settings)
        return Loader(self._args, self._dataset, batch_sampler=_Batches(self), collate_fn=collating)


def sequence_loader(
    args: RunConfig, dataset: Any, consumed: int, *, reads: bool, plain: bool = False
) -> SequenceLoader | None:
    """The loader of a data set, None for one without samples; evaluations are ``plain``."""
    if dataset is None or len(dataset) == 0:
        return None
    return SequenceLoader(args, dataset, consumed, reads=reads, plain=plain)


def _plans(args: RunConfig) -> bool:
    """Batches are simulated: their orders, or cuts."""
    return bool(args.order == "planned" or args.slice_tokens == 0)


class _Batches:
    """The batch sampler of a loader."""

    def __init__(self, loader: SequenceLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.batches()
