"""Base class of the schedules: configuration and cleanup."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron.dpp.config import DppConfig, missing_part
from megatron.dpp.core.graphs.capture import Capture
from megatron.dpp.core.rng import needs_task_rng
from megatron.dpp.errors import ConfigError
from megatron.dpp.runtime.failure import leave
from megatron.dpp.trace import NullRecorder, Recorder
from megatron.dpp.transport.base import Transport

logger = logging.getLogger("megatron.dpp")

_Schedule = TypeVar("_Schedule", bound="PipelineSchedule")


class PipelineSchedule(abc.ABC):
    """A callable with the keyword signature of megatron-core's ``forward_backward_func``.

    Args:
        config: policy, memory cap, transport and the rest; see :class:`~megatron.dpp.DppConfig`.
        recorder: where a trace goes, or None.
        seed: seed of the tasks' random states; None takes PyTorch's initial seed.
        log: called with each line about links and caps; None uses the ``megatron.dpp`` logger.
        warn: called with each line about a setting that costs time; None takes ``log``.
        capture: what ``config.cuda_graphs`` captures with; None captures CUDA graphs, on GPUs.

    Use it as a context manager, or call :meth:`close`, to free links and captured graphs. An error
    of a collective that ends the context becomes the :class:`~megatron.dpp.errors.TransportError`
    that explains it, if a link has failed or another rank has reported why it ends.

    Raises:
        ConfigError: the transport's C++ extension or package is not installed.
    """

    _always_links = False
    """True if tensors pass over links of ours with ``transport="auto"``, too."""

    def __init__(
        self,
        config: DppConfig | None = None,
        *,
        recorder: Recorder | None = None,
        seed: int | None = None,
        log: Callable[[str], None] | None = None,
        warn: Callable[[str], None] | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.config = config or DppConfig()
        kind = self.config.transport
        if (self._always_links or kind != "auto") and (missing := missing_part(kind)):
            raise ConfigError(missing)
        self.iteration = 0
        """Number of the next call; set it after resuming from a checkpoint, so that random states
        continue.
        """
        self.recorder = recorder or NullRecorder()
        """Where a trace of the next calls goes."""
        self._seed = torch.initial_seed() if seed is None else seed
        self._alert = log or logger.warning
        """Takes a line that other ranks may not know of."""
        log = log or logger.info
        self._log, self._warn = log, warn or log
        self._capture = capture
        self._said: set[str] = set()

    @abc.abstractmethod
    def __call__(self, **keywords: Any) -> list[Any]:
        """Run all forwards and backwards of one step; keywords and result are megatron-core's."""

    @property
    @abc.abstractmethod
    def injected_seconds(self) -> float:
        """Seconds by which ``config.inject`` has prolonged this rank's tasks so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the links and free what was captured. May be called twice."""

    @abc.abstractmethod
    def _links(self) -> Transport | None:
        """The open transport, if any."""

    def _wants_rng(
        self, chunks: list[torch.nn.Module], num_ranks: int, *, forward_only: bool
    ) -> bool:
        """True if tasks need random states of their own; a single stage keeps Megatron's."""
        wanted = self.config.task_rng and num_ranks > 1
        return wanted and needs_task_rng(chunks, forward_only=forward_only)

    def _say_once(self, line: str) -> None:
        """Log a line of something that is prepared in each step."""
        if line not in self._said:
            self._said.add(line)
            self._log(line)

    def __enter__(self: _Schedule) -> _Schedule:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        exits = isinstance(error, SystemExit) and error.code in (None, 0)
        try:
            if error is None or exits:
                return
            cause = leave(error, self._links())  # the other ranks are told why this one ends
            if cause is not error:
                raise cause from error
        finally:
            self.close()
