"""Documents as samples: the data set under ``--rows``, and checks of its files before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron.dpp_train.data.document_files import answers_prefix, check_documents, used_documents

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

    Raises:
        DataError: a file is missing or broken, no document is usable, or marks and tokens differ in
            their lengths.
    """

    def __init__(self, prefix: str, config: DocumentsConfig) -> None:
        check_documents(prefix, config.sequence_length, config.overlong)
        self.tokens = IndexedDataset(prefix, mmap=config.mmap_bin_files)
        self.used = used_documents(prefix, config.sequence_length, config.overlong)
        marks = answers_prefix(prefix)
        self.answers = None if marks is None else IndexedDataset(marks, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        return len(self.tokens.sequence_lengths)


class DocumentDataset(MegatronDataset):  # type: ignore[misc]
    """Documents as samples, in an order that is drawn anew in every epoch. Documents of fewer than
    two tokens are left out, and chats without an answer in what they are cut to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        most = self.config.sequence_length
        self._documents = self.indices[self.dataset.used[self.indices]]
        lengths = self.dataset.tokens.sequence_lengths[self._documents] - 1  # the last is a label
        self._lengths = np.minimum(lengths, most)
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
