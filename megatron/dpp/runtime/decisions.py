"""Builds the schedulers of a run, and records or replays their decisions.

One is built per shape of call (training, evaluation, another number of microbatches) and reused. A
cap in bytes becomes one in chunk activations as soon as an activation has been measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.dpp.config import Backward, DppConfig
from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.schedule import (
    HOLDS_ALL,
    UNIT,
    Action,
    Allowance,
    DecisionRecorder,
    Geometry,
    Memory,
    MemoryLimit,
    Policy,
    Recording,
    Scheduler,
    StaticSizes,
    beside_head,
    parse_cap,
    replica_path,
    sliced_allowance,
)

_MOST_SCHEDULERS = 4
"""Shapes of call that are kept; a batch size that ramps up has many, one after the other."""


class Decisions:
    """Makes schedulers, and records or replays their decisions.

    Args:
        config: policy, cap, record and replay.
        log: called with a line per new cap.
        replica: number of this data-parallel replica, whose files are its own.
        decides: this rank leads its stage; only leaders record and replay.
    """

    def __init__(
        self,
        config: DppConfig,
        log: Callable[[str], None],
        replica: int = 0,
        *,
        decides: bool = True,
    ) -> None:
        self._config, self._log = config, log
        self._schedulers: dict[tuple[Any, ...], tuple[Scheduler, Allowance]] = {}
        self._measured: Memory | None = None
        self._as_static = config.activation_cap.strip() == "static"
        self._cuts = config.slice_tokens > 0
        self._static = StaticSizes()
        self._said: set[str] = set()
        self._record, self._replay = (
            replica_path(path, replica) if path and decides else None
            for path in (config.record, config.replay)
        )
        self._recorder: DecisionRecorder | None = None
        self._recording: Recording | None = None
        self._num_calls = 0
        self.cap = 0.0
        """Chunk activations that the last training step might hold."""
        self.peak_held = 0.0
        """Largest number of chunk activations that were held so far."""

    @property
    def wants_measuring(self) -> bool:
        """True if the next training step should measure its activations."""
        return self._measured is None

    @property
    def activation_bytes(self) -> float:
        """Measured bytes of one chunk's activation of a microbatch; 0 before that."""
        return self._measured.activation_bytes if self._measured else 0

    def renew(self) -> None:
        """Forget measurements, for another model or longer sequences."""
        self._measured = None
        self._schedulers.clear()

    def measured(self, measured: Memory) -> None:
        """Take measurements over; schedulers are rebuilt with them."""
        self._measured = measured
        self._schedulers.clear()
        if not measured.activation_bytes:
            return
        mib = 1 << 20
        more = measured.deferred_bytes > measured.activation_bytes
        kept = ", and counts as one" if more else " of it"
        self._log(
            f"dynamic pipeline: an activation takes {measured.activation_bytes / mib:.1f} MiB, "
            f"a deferred weight gradient keeps {measured.deferred_bytes / mib:.1f} MiB{kept}"
        )

    def measured_slots(self, slot_bytes: float) -> None:
        """Take over the size of a CUDA graph's slot, which is held until the last W."""
        eager = self._measured
        assert eager is not None
        self.measured(
            dataclasses.replace(
                eager,
                activation_bytes=slot_bytes,
                deferred_bytes=slot_bytes,
                head_room=eager.head_room * eager.activation_bytes / slot_bytes,
                slots=True,
            )
        )

    def scheduler(
        self,
        geometry: Geometry,
        *,
        backward: Backward,
        largest: int = UNIT,
        sizes: Sequence[int] | None = None,
        policy: str | None = None,
        kappa: float = 0.0,
    ) -> Scheduler:
        """A scheduler at its start, for one call.

        Args:
            backward: how the call's backwards run.
            largest: tokens of the longest microbatch.
            sizes: tokens of each microbatch, where they are known beforehand.
            kappa: keys of linked microbatches, as in :class:`Scheduler`.
            policy: in the place of the configuration's, or of depth-first where ``forward_only``.

        Raises:
            ConfigError: the cap is too small, the policy cannot work with it, sizes are wrong, or a
                recording cannot be written.
            ReplayError: the recording is of another shape.
        """
        if self._record is not None and self._recorder is None:
            self._recorder = DecisionRecorder(self._record, geometry)
        if sizes is not None:
            _check_sizes(sizes, geometry.num_microbatches, largest)
        if geometry.groups and not geometry.forward_only and sizes is None:
            raise ConfigError("slices need their sizes, which ranks of this stage do not share")
        if geometry.forward_only:
            sizes = None  # no cap applies
        chosen = self._chosen(policy, geometry, backward)
        cuts = bool(geometry.groups) or self._cuts  # the cap depends on sizes then
        linked = (tuple(sizes or ()), kappa) if cuts else ()
        key = (geometry, backward, largest, chosen, linked)
        known, measured = self._schedulers.pop(key, None), self._measured
        if known is not None:
            scheduler, allowance = known
            scheduler.restart(sizes, self._limits(allowance, geometry, largest, sizes))
        else:
            while len(self._schedulers) >= _MOST_SCHEDULERS:
                del self._schedulers[next(iter(self._schedulers))]
            allowance, waits = self._allowance(geometry, backward.split, largest, sizes, kappa)
            scheduler = Scheduler(
                geometry,
                # Room for all microbatches is not known before a cap in bytes is.
                policy="depth-first" if waits and chosen in HOLDS_ALL else chosen,
                cap=allowance.chunks,
                split_backward=backward.split,
                stock=backward.stock,
                beta=measured.beta if measured else 0.0,
                largest=largest,
                sizes=sizes,
                weights=allowance.weights,
                limits=self._limits(allowance, geometry, largest, sizes),
                kappa=kappa,
            )
        self._schedulers[key] = scheduler, allowance
        return scheduler

    def _chosen(self, policy: str | None, geometry: Geometry, backward: Backward) -> str | Policy:
        if self._replay is not None:
            recording = self._loaded(self._replay, geometry.rank)
            return recording.replay(self._num_calls, geometry, backward)
        return policy or ("depth-first" if geometry.forward_only else self._config.policy)

    def _allowance(
        self,
        geometry: Geometry,
        split: bool,
        largest: int,
        sizes: Sequence[int] | None,
        kappa: float,
    ) -> tuple[Allowance, bool]:
        """The allowance of this rank, which is logged when it changes, and whether an activation
        has to be measured first.
        """
        if geometry.forward_only:
            return Allowance(0.0), False
        measured = self._measured
        cap = parse_cap(
            self._config.activation_cap,
            geometry,
            measured.activation_bytes if measured else None,
            sized=self._cuts and sizes is not None,
        )
        found = beside_head(cap, geometry.uncut, measured) if split else Allowance(cap.chunks)
        if sizes is not None and (self._cuts or geometry.groups):
            own = dataclasses.replace(cap, chunks=found.chunks)
            weights = () if geometry.groups else found.weights
            found = sliced_allowance(own, geometry, sizes, largest, kappa, weights)
        self.cap = found.chunks
        text = cap.text
        if found.chunks < cap.chunks:
            text += f", here {found.chunks:g} beside the LM head"
        elif found.weights:
            text += (
                f", here {found.chunks:g}, of which the last chunk takes {found.weights[-1]:.2f} "
                "with the LM head"
            )
        if text not in self._said:  # measuring may leave a cap as it was
            self._said.add(text)
            self._log(f"dynamic pipeline: {text}")
        return found, cap.needs_measuring

    def _limits(
        self,
        allowance: Allowance,
        geometry: Geometry,
        largest: int,
        sizes: Sequence[int] | None,
    ) -> tuple[MemoryLimit, ...]:
        """The limits of the next call."""
        if not self._as_static or geometry.forward_only:
            return allowance.limits
        if sizes is not None:
            self._static.add(geometry, sizes, allowance.weights)
        return allowance.with_static(self._static, largest).limits

    def recorded_backward(self, rank: int) -> Backward | None:
        """The way of the next call's backwards in the recording of pipeline rank ``rank``; None if
        this rank replays none.
        """
        if self._replay is None:
            return None
        return self._loaded(self._replay, rank).backward(self._num_calls)

    def _loaded(self, path: str, rank: int) -> Recording:
        if self._recording is None:
            self._recording = Recording.load(path, rank)
        return self._recording

    def ran(self, scheduler: Scheduler, actions: Sequence[Action], *, backward: Backward) -> None:
        """End a call; record its decisions if asked to."""
        self._num_calls += 1
        self.peak_held = max(self.peak_held, scheduler.peak_held)
        geometry, sizes = scheduler.geometry, scheduler.sizes
        if self._as_static and not geometry.forward_only:
            found = [sizes[microbatch] for microbatch in range(geometry.num_microbatches)]
            self._static.add(geometry, found, scheduler.weights)
        if self._recorder is not None:
            self._recorder.write(geometry, actions, backward, sizes.unlike())

    def close(self) -> None:
        """Close the recording. May be called twice."""
        if self._recorder is not None:
            self._recorder.close()


def _check_sizes(sizes: Sequence[int], num_microbatches: int, largest: int) -> None:
    if len(sizes) != num_microbatches:
        raise ConfigError(
            f"announce: {len(sizes)} sizes for a step of {num_microbatches} microbatches; give the "
            "tokens of each"
        )
    wrong = next((size for size in sizes if not 0 < size <= largest), None)
    if wrong is not None:
        max_tokens = setting("max_tokens")
        raise ConfigError(
            f"announce: microbatch {list(sizes).index(wrong)} has {wrong} tokens on this rank, "
            f"and must have 1 to {largest}; {max_tokens} names the most of a microbatch",
            max_tokens,
        )
