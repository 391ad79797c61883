"""Builds the schedulers of a run, and records or replays their decisions.

One is built per shape of call (training, evaluation, another number of microbatches) and reused. A
cap in bytes becomes one in chunk activations as soon as an activation has been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.dpp.config import DppConfig
from megatron.dpp.schedule import (
    HOLDS_ALL,
    UNIT,
    Action,
    DecisionRecorder,
    Geometry,
    Memory,
    Policy,
    Recording,
    Scheduler,
    beside_head,
    parse_cap,
    replica_path,
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
        self._schedulers: dict[tuple[Geometry, bool, int, str], Scheduler] = {}
        self._measured: Memory | None = None
        self._said: set[str] = set()
        self._record, self._replay = (
            replica_path(path, replica) if path and decides else None
            for path in (config.record, config.replay)
        )
        self._recorder: DecisionRecorder | None = None
        self._recording: Recording | None = None
        self._num_calls = 0

    @property
    def wants_measuring(self) -> bool:
        """True if the next training step should measure its activations."""
        return self._measured is None

    @property
    def activation_bytes(self) -> float:
        """Measured bytes of one chunk's activation of a microbatch; 0 before that."""
        return self._measured.activation_bytes if self._measured else 0

    @property
    def head_room(self) -> float:
        """Measured memory of the LM head on the last rank, in chunk activations."""
        return self._measured.head_room if self._measured else 1.0

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
        self._log(
            f"dynamic pipeline: an activation takes {measured.activation_bytes / mib:.1f} MiB, "
            f"a deferred weight gradient keeps {measured.deferred_bytes / mib:.1f} MiB of it"
        )

    def scheduler(
        self, geometry: Geometry, *, split: bool, largest: int = UNIT, policy: str | None = None
    ) -> Scheduler:
        """A scheduler at its start, for one call.

        Args:
            largest: tokens of the longest microbatch.
            policy: in the place of the configuration's.

        Raises:
            ConfigError: the cap is too small, the policy cannot work with it, or a recording cannot
                be written.
            ReplayError: the recording is of another shape.
        """
        if self._record is not None and self._recorder is None:
            self._recorder = DecisionRecorder(self._record, geometry)
        if self._replay is not None:
            replay = self._next_replay(self._replay, geometry, split)
            return self._build(geometry, split, replay, largest)
        chosen = policy or self._config.policy
        key = (geometry, split, largest, chosen)
        if key not in self._schedulers:
            while len(self._schedulers) >= _MOST_SCHEDULERS:
                del self._schedulers[next(iter(self._schedulers))]
            self._schedulers[key] = self._build(geometry, split, chosen, largest)
        else:
            self._schedulers[key].restart()
        return self._schedulers[key]

    def _build(
        self, geometry: Geometry, split: bool, policy: str | Policy, largest: int
    ) -> Scheduler:
        if geometry.forward_only:
            chosen = policy if self._replay else "depth-first"
            return Scheduler(geometry, policy=chosen, split_backward=False, largest=largest)
        measured = self._measured
        cap = parse_cap(
            self._config.activation_cap, geometry, measured.activation_bytes if measured else None
        )
        chunks, text = cap.chunks, cap.text
        if split:
            chunks = beside_head(cap, geometry, measured)
            text += f", here {chunks:g} beside the LM head" * (chunks < cap.chunks)
        if text not in self._said:  # measuring may leave a cap as it was
            self._said.add(text)
            self._log(f"dynamic pipeline: {text}")
        return Scheduler(
            geometry,
            # Room for all microbatches is not known yet.
            policy="depth-first" if cap.needs_measuring and policy in HOLDS_ALL else policy,
            cap=chunks,
            split_backward=split,
            beta=measured.beta if measured else 0.0,
            largest=largest,
        )

    def _next_replay(self, path: str, geometry: Geometry, split: bool) -> Policy:
        if self._recording is None:
            self._recording = Recording.load(path, geometry.rank)
        return self._recording.replay(self._num_calls, geometry, split_backward=split)

    def ran(self, scheduler: Scheduler, actions: Sequence[Action], *, split: bool) -> None:
        """End a call; record its decisions if asked to."""
        self._num_calls += 1
        if self._recorder is not None:
            self._recorder.write(
                scheduler.geometry, actions, split_backward=split, sizes=scheduler.sizes.unlike()
            )

    def close(self) -> None:
        """Close the recording. May be called twice."""
        if self._recorder is not None:
            self._recorder.close()
