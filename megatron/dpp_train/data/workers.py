"""A loader whose worker processes have a deadline, end with their rank, and are named in errors."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train import culprits
from megatron.dpp_train.data.changes import Corpora
from megatron.dpp_train.exits import prepare_worker
from megatron.dpp_train.options.run_config import RunConfig

_GRACE_SECONDS = 1.0
"""Between a broken connection to a worker and the news of its end."""


class Loader(torch.utils.data.DataLoader[Any]):
    """PyTorch's loader for a run.

    Raises:
        DataError: from its iterators, where a worker ends, or gives nothing for as long as other
            ranks wait for this one, or a file of the data set was written.
    """

    def __init__(self, args: RunConfig, dataset: Any, **options: Any) -> None:
        super().__init__(
            dataset,
            num_workers=args.num_workers,
            pin_memory=args.device == "cuda",
            generator=torch.Generator().manual_seed(args.seed),  # see samples._draw_seeds
            worker_init_fn=partial(prepare_worker, outlives_sigterm=args.exit_signal_handler),
            **options,
        )
        self._corpora = Corpora(dataset, mapped=args.mmap_bin_files)
        self._patience = 60.0 * args.distributed_timeout_minutes if args.num_workers else 0.0

    def __iter__(self) -> Any:
        return _watched(super().__iter__(), self._patience, self._corpora)


def _watched(batches: Any, patience: float, corpora: Corpora) -> Iterator[Any]:
    """``batches`` with a deadline for each, and errors that name the worker or a file that was
    written meanwhile."""
    while True:
        try:
            with _deadline(patience):
                batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if said := corpora.fault(at_once=True):
                raise DataError(said) from error
            if not isinstance(error, (OSError, EOFError, RuntimeError)):
                raise
            # What a worker had sent last is lost with it, in an error of its connection.
            workers = getattr(batches, "_workers", ())
            said = culprits.of_worker(error) or culprits.ended(workers, _GRACE_SECONDS)
            if not said:
                raise
            raise DataError(said) from error
        if said := corpora.fault():
            raise DataError(said)
        yield batch


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises in the main thread after so many seconds, which PyTorch's own timeout does not where
    a worker stops while it hands a tensor over. 0 for no limit."""

    def end(*_: object) -> NoReturn:
        raise DataError(culprits.late(seconds))

    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
