"""Documents as samples: the data set under ``--rows``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron.dpp.errors import DataError
from megatron.dpp.files.index_files import check_index
from megatron.dpp_train.data.token_files import ANSWERS_SUFFIX, CHAT_SUFFIX

OVERLONG = ("error", "cut", "skip")
"""What becomes of documents above ``--seq-length``."""
Sample = dict[str, np.ndarray]
"""``tokens``: int64 [s + 1], inputs and the last label; ``mask``: fp32 [s], 1 for labels that have
a loss."""


@dataclass
class DocumentsConfig(GPTDatasetConfig):  # type: ignore[misc]
    """Configuration of a :class:`DocumentDataset`.

    Args:
        overlong: a name of :data:`OVERLONG`.
    """

    overlong: str = "error"


class TokenFile:
    """The documents of one prefix: token ids and, of chats, the marks of their answers.

    Attributes:
        lengths: tokens of each document that have a label: all but the last.
        used: for each document, True if it has a label, is not skipped, and as a chat keeps an
            answer in what it is cut to.

    Raises:
        DataError: a file is missing or broken, marks and tokens differ in their lengths, documents
            are too long with ``--overlong error``, or none is left.
    """

    def __init__(self, prefix: str, config: DocumentsConfig) -> None:
        check_index(prefix)
        self.tokens = IndexedDataset(prefix, mmap=config.mmap_bin_files)
        self.lengths = self.tokens.sequence_lengths - 1
        self.answers = None
        if prefix.endswith(CHAT_SUFFIX):
            marks = prefix.removesuffix(CHAT_SUFFIX) + ANSWERS_SUFFIX
            check_index(marks)
            self.answers = IndexedDataset(marks, mmap=config.mmap_bin_files)
            if not np.array_equal(self.lengths, self.answers.sequence_lengths - 1):
                raise DataError(f"{marks}: marks other documents than {prefix}; make both again")
        self.used = self._used(prefix, config.sequence_length, config.overlong)

    def _used(self, prefix: str, most: int, overlong: str) -> np.ndarray:
        long, longest = self.lengths > most, int(self.lengths.max())
        if long.any() and overlong == "error":
            raise DataError(
                f"{prefix}.idx: {int(long.sum())} of {len(long)} documents exceed --seq-length "
                f"{most}, the longest with {longest} tokens; raise it, or cut or skip them "
                "(--overlong cut, --overlong skip)"
            )
        used: np.ndarray = self.lengths >= 1
        if overlong == "skip":
            used &= ~long
        if self.answers is not None:
            for number in np.flatnonzero(used & long):
                used[number] = self.answers.get(int(number), 1, most).any()
        if not used.any():
            raise DataError(
                f"{prefix}.idx: no document has 2 to {most + 1} tokens"
                + (" with a part of an answer" if self.answers is not None else "")
                + f", the longest {longest + 1}; raise --seq-length"
            )
        return used

    def __len__(self) -> int:
        return len(self.lengths)


class DocumentDataset(MegatronDataset):  # type: ignore[misc]
    """Documents as samples, in an order that is drawn anew in every epoch. Documents of fewer than
    two tokens are left out, and chats without an answer in what they are cut to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        most = self.config.sequence_length
        self._documents = self.indices[self.dataset.used[self.indices]]
        self._lengths = np.minimum(self.dataset.lengths[self._documents], most)
        self._orders: dict[int, np.ndarray] = {}

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: TokenFile) -> int:
        """Documents of a file, which the splits share."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> TokenFile:
        """The files of a prefix."""
        return TokenFile(dataset_path, config)

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
        if self.dataset.answers is not None:
            marks = self.dataset.answers.get(document, 0, size)
            return {"tokens": tokens, "mask": marks[1:].astype(np.float32)}
        mask = np.ones(size - 1, dtype=np.float32)
        if self.config.eod_mask_loss:
            mask[tokens[:-1] == self.config.tokenizer.eod] = 0.0
        return {"tokens": tokens, "mask": mask}

    def _place(self, index: int) -> int:
        """The document of a sample, as a place among those that are used."""
        epoch, place = divmod(int(index), len(self._documents))
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            seeds = (self.config.random_seed, self.index_split.value, epoch)
            self._orders[epoch] = np.random.default_rng(seeds).permutation(len(self._documents))
        return int(self._orders[epoch][place])
