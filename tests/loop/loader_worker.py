"""A rank with data loaders' workers, as test_workers.py kills it.

Arguments: a file to make when some batches are read; ``own folder``.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path

import torch

from megatron.dpp_train.exits import prepare_worker


class Tensors(torch.utils.data.Dataset[torch.Tensor]):
    """Tensors that travel as descriptors of shared memory."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 16,), index)


def main() -> None:
    if sys.argv[2:] == ["own folder"]:
        multiprocessing.util.get_temp_dir()  # the workers inherit its name
    loader = torch.utils.data.DataLoader(
        Tensors(), num_workers=2, worker_init_fn=partial(prepare_worker, outlives_sigterm=False)
    )
    batches = iter(loader)
    for index in range(6):
        assert next(batches)[0, 0] == index
    Path(sys.argv[1]).touch()
    time.sleep(300)


if __name__ == "__main__":
    main()
