"""The dynamic pipeline inside a training program that is built on megatron-core.

    from megatron.dpp import plugin

    plugin.install()                  # before training starts; or: with plugin.installed(): ...

:func:`install` replaces ``get_forward_backward_func``, and the two schedules that some hosts call
by their names, in every module that has imported them, and at their source for modules that are
imported later. A step that the dynamic pipeline cannot run goes to megatron-core's own schedule,
after one line that names the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from megatron.dpp.config import DppConfig, missing_part
from megatron.dpp.core import compat
from megatron.dpp.core.rng import line, needs_task_rng
from megatron.dpp.errors import (
    ConfigError,
    Naming,
    Text,
    TransportError,
    one_line,
    said,
    setting,
)
from megatron.dpp.plugin_lengths import read_ahead
from megatron.dpp.plugin_order import CallOrder, InOrder, Rows
from megatron.dpp.runtime.dynamic import DppSchedule
from megatron.dpp.runtime.host_trace import StepTrace
from megatron.dpp.schedule import find_policy
from megatron.dpp.trace.host import HostTrace

Lengths = Callable[[Mapping[str, Any]], Sequence[int] | Rows | None]
"""Tokens of a step's microbatches, or of the sequences in each, from the keywords of its call; None
where they are not known.
"""

logger = logging.getLogger("megatron.dpp")

_MULTIMODULE = "its process groups are those of several modules"
_NO_COMMUNICATOR = (
    "dynamic pipeline: p2p_communicator is not used: ranks exchange tensors over links of their "
    "own (transport)"
)

_installed: Plugin | None = None


class Plugin:
    """The functions that stand for megatron-core's, and the schedule that they run.

    Args:
        config: settings of the dynamic pipeline.
        strict: raise where a step would go to megatron-core's own schedule.
        trace: what is recorded, or None.
        lengths, naming: as :func:`install`.
    """

    def __init__(
        self,
        config: DppConfig,
        *,
        strict: bool,
        trace: HostTrace | None,
        lengths: Lengths | None = None,
        naming: Naming = str,
    ) -> None:
        self._naming = naming
        self._config, self._strict, self._lengths = config, strict, lengths
        self._traces_only = trace is not None and trace.only
        self._trace = StepTrace(trace, self._say)
        self._order = CallOrder(config, self._say)
        self._num_steps = 0
        self._sizes: Sequence[int] | None = None
        self._rows: Rows | None = None
        self._original: Callable[..., Any] = compat.lookup(compat.GET_SCHEDULE)
        self._schedule: DppSchedule | None = None
        self._said: set[str] = set()
        self._run = self.run  # one object, so that all callers get the same schedule
        self._replaced = {key: self._called_directly(key) for key in compat.DIRECT_SCHEDULES}
        self._put({compat.GET_SCHEDULE: (self._original, self.get), **self._replaced})

    def get(self, *args: Any, schedule_pg_collection: Any = None, **sizes: Any) -> Any:
        """The schedule, whatever the arguments of ``get_forward_backward_func``."""
        if compat.is_multimodule(schedule_pg_collection):
            self._pass_through(_MULTIMODULE)
            return self._original(*args, schedule_pg_collection=schedule_pg_collection, **sizes)
        if self._traces_only:
            if schedule_pg_collection is not None:
                sizes["schedule_pg_collection"] = schedule_pg_collection
            return functools.partial(self._run_own, self._original(*args, **sizes))
        return self._run

    def run(self, **keywords: Any) -> list[Any]:
        """Run one step; keywords and result are megatron-core's.

        Raises:
            ConfigError: the dynamic pipeline cannot run it, and ``strict`` is set.
        """
        return self._run_instead(None, keywords)

    def _called_directly(self, key: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """One of megatron-core's schedules, and what answers hosts that call it by its name."""
        own = compat.lookup(key)

        @functools.wraps(own)
        def schedule(**keywords: Any) -> Any:
            if self._traces_only:
                return self._run_own(own, **keywords)
            return self._run_instead(own, keywords)

        setattr(schedule, compat.ORIGINAL, own)
        return own, schedule

    def _run_instead(self, own: Callable[..., Any] | None, keywords: dict[str, Any]) -> list[Any]:
        """Run one step in the place of ``own``, which runs it otherwise; None takes the schedule
        that megatron-core has for the step.
        """
        reason = self._why_not(keywords)
        if reason is not None:
            self._pass_through(reason)
            own = own or compat.static_schedule(self._original, keywords)
            return self._run_own(own, **keywords)
        if keywords.get("p2p_communicator") is not None:
            self._say(_NO_COMMUNICATOR)
        schedule = self._schedule
        assert schedule is not None
        order, ordered = None, None
        if not keywords.get("forward_only"):
            told = self._told(keywords)
            order = self._order.of(keywords, told)
            if self._order.takes:
                ordered = InOrder(keywords, order)
                keywords = ordered.step
            schedule.policy = self._order.policy(keywords) if order else None
            if order and told:
                told = [told[number] for number in order]
            if told and (order or self._rows is None):
                schedule.announce([sum(row) for row in told])
            schedule.iteration = compat.host_iteration(schedule.iteration)
            if needs_task_rng(compat.listed(keywords["model"])):
                self._say(line(seeds=self._config.task_rng, named=True))
        self._rows = None
        with self._trace.step(self._step_number(keywords), keywords, "dpp") as schedule.recorder:
            try:
                losses = schedule(**keywords)
                return ordered.restored(losses) if ordered else losses
            except BaseException as error:
                self._leave(error)
                raise

    def _told(self, keywords: dict[str, Any]) -> Rows | None:
        """The tokens of the sequences in each microbatch of a training step, as the host or its
        adapter has told them; one sequence where only its sum is known.
        """
        sizes, self._sizes = self._sizes, None
        if self._rows is not None:
            return self._rows
        found: Sequence[int] | Rows | None = sizes
        if found is None and self._lengths is not None:
            try:
                found = self._lengths(keywords)
            except (AttributeError, KeyError, IndexError, TypeError) as error:  # another version's
                self._say(f"dynamic pipeline: lengths are not read ahead: {one_line(error)}")
        if found is None:
            return None
        return [[int(each)] if isinstance(each, int | Integral) else each for each in found]

    def announce(self, sizes: Sequence[int] | None, rows: Rows | None = None) -> None:
        """Keep what :func:`announce` is told for the call."""
        if (sizes is None) == (rows is None):
            raise ConfigError("announce: expected either sizes or rows")
        for number, row in enumerate(rows or ()):
            if not row or min(row) < 1:
                raise ConfigError(
                    f"announce: row {number} has sequences of {list(row)} tokens: expected at "
                    "least one, each of at least 1 token"
                )
        if sizes is None:
            self._rows = [list(row) for row in rows or ()]
        else:
            self._sizes = [operator.index(size) for size in sizes]  # numpy's and tensors', too

    def _run_own(self, schedule: Callable[..., Any], **keywords: Any) -> list[Any]:
        """Run one step with megatron-core's own schedule, also where ours has its name."""
        schedule = getattr(schedule, compat.ORIGINAL, schedule)
        self._rows = None
        if not keywords.get("forward_only"):
            self._sizes = None
        with self._trace.static_step(self._step_number(keywords), keywords):
            losses: list[Any] = schedule(**keywords)
            return losses

    def _step_number(self, keywords: dict[str, Any]) -> int:
        """The number of a training step in the trace: the host's, or else a count."""
        number = compat.host_iteration(self._num_steps)
        self._num_steps += not keywords.get("forward_only")
        return number

    def _why_not(self, keywords: dict[str, Any]) -> str | None:
        """The reason why a step goes to megatron-core's own schedule; None if it does not."""
        if compat.has_multimodule(keywords):
            return _MULTIMODULE
        if compat.pipeline_size(keywords.get("pg_collection")) == 1:
            return "there is one pipeline rank (pipeline_model_parallel_size=1)"
        if self._schedule is None:
            self._schedule = DppSchedule(self._config, log=self._log, warn=self._say)
        try:
            if self._rows is None and self._config.slice_tokens:
                self._rows = read_ahead(keywords)
            if self._rows is not None:
                self._schedule.announce([sum(row) for row in self._rows], rows=self._rows)
            self._schedule.check(**keywords)
        except ConfigError as error:
            if self._rows is not None:
                self._schedule.announce(())
            return one_line(error)
        return None

    def _pass_through(self, reason: str) -> None:
        if self._strict:
            strict = setting("strict", True, owner="install")
            what = f"{strict}: the dynamic pipeline cannot run this step: {reason}"
            raise ConfigError(what, strict, reason)
        line = f"dynamic pipeline: not used, megatron-core's own schedule runs: {reason}"
        self._say(Text(line, reason))

    def _log(self, line: str) -> None:
        logger.info(said(line, self._naming))

    def _say(self, text: str) -> None:
        """Log a line once, on rank 0."""
        text = said(text, self._naming)
        if text not in self._said and os.environ.get("RANK", "0") == "0":
            logger.warning(text)
        self._said.add(text)

    def leave(self, error: BaseException | None) -> None:
        """Close the schedule; with an error, tell the other ranks and raise what explains it."""
        self._trace.close()
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        schedule, self._schedule = self._schedule, None
        if schedule is not None:
            schedule.__exit__(type(error) if error else None, error, None)

    def remove(self) -> None:
        """Put megatron-core's functions back everywhere."""
        replaced = {compat.GET_SCHEDULE: (self._original, self.get), **self._replaced}
        self._put({key: (ours, own) for key, (own, ours) in replaced.items()})

    @staticmethod
    def _put(replaced: dict[str, tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
        """Replace the first function of each name by the second in every module that has it."""
        for key, (before, after) in replaced.items():
            for module in compat.importers(before, key):
                setattr(module, key.partition(":")[2], after)


def install(
    config: DppConfig | None = None,
    *,
    strict: bool = False,
    trace: HostTrace | None = None,
    lengths: Lengths | None = None,
    naming: Naming = str,
) -> None:
    """Let ``get_forward_backward_func`` return the dynamic pipeline, until :func:`uninstall` or the
    end of the process.

    Args:
        config: its settings; None takes the defaults.
        strict: raise a :class:`ConfigError` where a step would go to megatron-core's own schedule.
        trace: what is recorded, and where; None records nothing. With ``only`` megatron-core's own
            schedule stays, and is recorded.
        lengths: asked before each training step for the tokens of its microbatches, or of the
            sequences in each, on all ranks; :func:`announce` wins.
            ``plugin_lengths.packed_lengths`` knows slime, miles, verl and NeMo-RL.
        naming: spells settings in the lines of the log.

    Raises:
        ConfigError: it is installed already, megatron-core is too old, the policy is unknown, or
            the C++ extension is not built.
    """
    global _installed
    config = config or DppConfig()
    find_policy(config.policy)
    if not (trace and trace.only) and (missing := missing_part(config.transport)):
        raise ConfigError(missing)
    if _installed is not None:
        raise ConfigError(
            "the dynamic pipeline is installed already: call megatron.dpp.plugin.uninstall() "
            "before installing it with other settings"
        )
    _installed = Plugin(config, strict=strict, trace=trace, lengths=lengths, naming=naming)
    atexit.register(_end)


def is_installed() -> bool:
    """True between :func:`install` and :func:`uninstall`."""
    return _installed is not None


def announce(sizes: Sequence[int] | None = None, *, rows: Rows | None = None) -> None:
    """Tell the tokens of microbatches on all ranks alike, before the host's loop calls the
    schedule. Without an installation nothing happens.

    A rank otherwise learns a size when the microbatch's first forward begins there, which is enough
    for all settings but ``activation_cap="static"``, and for packed rows in slices.

    Args:
        sizes: tokens of each microbatch of the next training step.
        rows: in their place the tokens of the sequences that are packed into each microbatch of the
            next call, an evaluation's too: in order, with their padding, where padding behind the
            last sequence counts as one more. ``slice_tokens`` cuts such rows.

    Raises:
        ConfigError: neither or both are given, or a row has no tokens.
    """
    if _installed is not None:
        _installed.announce(sizes, rows)


def uninstall() -> None:
    """Undo :func:`install` and close the schedule; without an installation nothing happens."""
    _remove(None)


def _end() -> None:
    """At the end of the process: an error that ended it is told to the other ranks."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    with contextlib.suppress(TransportError):  # it is no news here
        _remove(error if isinstance(error, BaseException) else None)


def _remove(error: BaseException | None) -> None:
    global _installed
    plugin, _installed = _installed, None
    atexit.unregister(_end)
    if plugin is not None:
        plugin.remove()
        plugin.leave(error)


@contextlib.contextmanager
def installed(config: DppConfig | None = None, **options: Any) -> Iterator[None]:
    """:func:`install` for a block. An error that ends the block is told to the other ranks, and
    becomes the :class:`~megatron.dpp.errors.TransportError` that explains it, if there is one.
    """
    install(config, **options)
    try:
        yield
    except BaseException as error:
        _remove(error)
        raise
    finally:
        uninstall()
