"""The scheduler of one rank: receives arrivals, returns the next task.

It joins a :class:`~megatron.dpp.schedule.state.RankState` (tasks that may run) with a policy (the
choice), checks decisions, and explains a stall. The executor restarts one for each iteration of the
same shape; the simulator has one per rank.
"""

from __future__ import annotations

import enum
import math
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.dpp.direction import Direction
from megatron.dpp.errors import ConfigError, DppError, ScheduleError, Text, setting
from megatron.dpp.schedule.actions import Action, Geometry, Kind
from megatron.dpp.schedule.caps import ROUNDING, UNIT, MemoryLimit, default_cap, key_sizes
from megatron.dpp.schedule.policies import BUILT_IN, Policy, check_room, find_policy
from megatron.dpp.schedule.reference import Reference
from megatron.dpp.schedule.refusals import allowed, may_arrive, refusal
from megatron.dpp.schedule.state import KnownSizes, RankState, View


class Cause(enum.Enum):
    """Reasons why a rank runs nothing."""

    WARMUP = "warm-up"
    """Nothing has run yet: the pipeline fills."""
    WAIT_FORWARD = "waiting for an input"
    WAIT_BACKWARD = "waiting for a gradient"
    MEMORY_CAP = "memory cap"
    """A forward's input is here, but only a backward can make room for it."""
    COOLDOWN = "cool-down"
    """All forwards have run and gradients are on their way: the pipeline drains."""
    POLICY = "policy"
    """Something may run, and the policy chose to wait."""
    DONE = "done"


class Stall(NamedTuple):
    """A rank that runs nothing. The next message of any ``(direction, chunk)`` of ``channels``
    would change that.
    """

    cause: Cause
    text: str
    channels: tuple[tuple[Direction, int], ...] = ()


class Scheduler:
    """Picks the tasks of one rank in one iteration.

    Args:
        geometry: the iteration as this rank sees it.
        policy: a policy, or a name for :func:`~megatron.dpp.schedule.policies.find_policy`.
        cap: chunk activations of the largest microbatch that may be held; ``None`` is the default
            cap. Ignored when ``forward_only``.
        split_backward: ``W`` are tasks of their own; otherwise a ``B`` includes its ``W``.
        beta: measured share of an activation that ``B`` frees, 0 .. 1; ``W`` frees the rest.
        largest: size of the largest microbatch, an integer in any unit (tokens, for instance). A
            microbatch has this size until :meth:`learn` tells another.
        sizes: of this iteration's microbatches, where they are known beforehand.
        weights: the activation of each chunk, in chunk activations; empty where all are 1.
        limits: further bounds, all of which hold beside the cap.
        kappa: keys, values and their gradients of linked microbatches, as a share of these
            microbatches' activations; they count where ``sizes`` are given.
        stock: deferred backwards from which a ``B`` includes its ``W``, if no other ``W`` of its
            chunk is deferred.

    Raises:
        ConfigError: the cap or a limit is below what Megatron's own order or the policy needs, beta
            is outside 0 .. 1, or the policy is unknown.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        policy: str | Policy = "dynamic",
        cap: float | None = None,
        split_backward: bool = True,
        beta: float = 0.0,
        largest: int = UNIT,
        sizes: Sequence[int] | None = None,
        weights: Sequence[float] = (),
        limits: Sequence[MemoryLimit] = (),
        kappa: float = 0.0,
        stock: float = math.inf,
    ) -> None:
        if cap is None:
            cap = default_cap(geometry).chunks
        if not 0.0 <= beta <= 1.0:
            raise ConfigError(f"beta {beta}: the share that B frees must be in 0 .. 1")
        if largest < 1:
            raise ConfigError(f"largest {largest}: a microbatch must have a size of at least 1")
        self.geometry = geometry
        self.policy = find_policy(policy) if isinstance(policy, str) else policy
        self._policy_setting = setting(
            "policy", policy if isinstance(policy, str) else repr(policy)
        )
        # Built-in policies return only what the view offered. A check would double their cost.
        self._is_built_in = self.policy in BUILT_IN.values()
        v = geometry.num_chunks
        for given in (weights, *(limit.weights for limit in limits)):
            if given and (len(given) != v or min(given) < 0):
                raise ConfigError(
                    f"weights {tuple(given)}: one of at least 0 is needed for each of {v} chunks"
                )
        self.limits, self._kappa = tuple(limits), kappa
        self._settings: dict[str, Any] = {
            "cap": cap, "split_backward": split_backward, "beta": beta, "largest": largest,
            "weights": tuple(weights), "stock": stock,
        }  # fmt: skip
        self._reference = Reference.of(geometry)
        self.restart(sizes)
        check_room(self.policy, geometry, cap, split_backward=split_backward)

    def restart(
        self, sizes: Sequence[int] | None = None, limits: Sequence[MemoryLimit] | None = None
    ) -> None:
        """Reset all counts, for another iteration of the same shape; cheaper than a new object.

        Args:
            sizes: of the iteration's microbatches, where they are known beforehand.
            limits: replace those of the iteration before.

        Raises:
            ConfigError: there are fewer or more sizes, or Megatron's own order of these
                microbatches does not fit under the cap.
            ScheduleError: a size is larger than the largest.
        """
        if sizes is not None and len(sizes) != self.geometry.num_microbatches:
            raise ConfigError(
                f"{len(sizes)} sizes were given for {self.geometry.num_microbatches} microbatches"
            )
        if limits is not None:
            self.limits = tuple(limits)
        self._state = RankState(
            self.geometry, reference=self._reference, limits=self.limits, **self._settings
        )
        keys = key_sizes(self.geometry.groups, sizes or (), self._kappa)
        for microbatch, size in enumerate(sizes or ()):
            self._state.learn(microbatch, size, keys.get(microbatch, 0))
        if self.geometry.forward_only:
            return
        for cap, least in self._state.least:
            if cap < least - ROUNDING:
                activation_cap = setting("activation_cap")
                raise ConfigError(
                    f"pipeline rank {self.geometry.rank} may hold {cap:g} chunk activations, but "
                    f"Megatron's own order needs {least:g}; raise {activation_cap}",
                    activation_cap,
                )

    def learn(self, microbatch: int, size: int) -> None:
        """Take the size of a microbatch, before its first backward runs on this rank.

        Raises:
            ScheduleError: the size is larger than the largest, or comes too late.
        """
        self._state.learn(microbatch, size)

    @property
    def view(self) -> View:
        """The policy's view."""
        return self._state

    @property
    def done(self) -> bool:
        """Every task of this iteration has been handed out or reported as run."""
        return self._state.done

    @property
    def amid_weight(self) -> bool:
        """True if some pieces of a ``W`` have run, and some are left."""
        return self._state.next_piece() is not None

    @property
    def fused(self) -> bool:
        """True if the ``B`` that was chosen last includes a ``W`` that might have been deferred."""
        return self._state.fused

    @property
    def held(self) -> float:
        """Chunk activations of the largest microbatch held now."""
        return self._state.held

    @property
    def peak_held(self) -> float:
        """Peak of :attr:`held`; never above the cap."""
        return self._state.peak_held

    def hold_back(self, *, held: bool) -> None:
        """Admit no new microbatch to this rank's first chunk while ``held``. Takes effect only when
        ``forward_only``, where no cap applies. The other chunks run on, so the pipeline drains.
        """
        self._state.held_back = held and self.geometry.forward_only and self._is_built_in

    @property
    def sizes(self) -> KnownSizes:
        """The sizes of the microbatches as far as they are known."""
        return self._state.sizes

    @property
    def weights(self) -> tuple[float, ...]:
        """The activation of each chunk, in chunk activations; empty where all are 1."""
        found: tuple[float, ...] = self._settings["weights"]
        return found

    @property
    def num_out_of_order(self) -> int:
        """Forwards and backwards that ran before their turn in Megatron's order."""
        return self._state.num_out_of_order

    def arrived(self, direction: int, chunk: int, total: int) -> None:
        """Report that ``total`` messages of a channel have arrived in this iteration.

        Stage 0's inputs and the last stage's gradients are implied; they must not be reported.

        Args:
            direction: ``FORWARD`` for inputs, ``BACKWARD`` for gradients.
            chunk: of this rank.
            total: since the start of the iteration; it only grows.

        Raises:
            ScheduleError: the count shrinks or exceeds the microbatches, or there is no such
                channel.
        """
        geometry, forward = self.geometry, direction == Direction.FORWARD
        first = forward and geometry.is_first and chunk == 0
        last = not forward and geometry.is_last and chunk == geometry.num_chunks - 1
        place = f"pipeline rank {geometry.rank}, chunk {chunk}"
        if first or last:
            what = "inputs come from the data" if first else "gradients come from the loss"
            raise ScheduleError(f"{place}: its {what}, not from a channel")
        if not 0 <= chunk < geometry.num_chunks:
            raise ScheduleError(f"{place}: it has 0 .. {geometry.num_chunks - 1}")
        self._state.arrive(direction, chunk, total)

    def next(self) -> Action | None:
        """Choose the next task and count it as run; None when none may run (see :meth:`stall`) or
        the policy waits.

        Raises:
            ScheduleError: the policy failed, returned something else than an action that may run,
                or waits although nothing more can arrive.
        """
        if not self._is_built_in:
            return self._next_of_user()
        action = self.policy(self._state)
        if action is not None:
            self._state.apply(action)
        return action

    def run_on(self) -> Action | None:
        """:meth:`next`, right after a piece of ``W`` and before anything else has arrived, if it is
        the next piece of the same ``W``; None if it may be another task, or the policy is not
        built-in.

        A piece changes only how much is held, so another choice needs a forward that waits for
        room.
        """
        state = self._state
        action = state.next_piece() if self._is_built_in else None
        if action is None or (state.forward_waits() and self.policy(state) != action):
            return None
        state.apply(action)
        return action

    def _next_of_user(self) -> Action | None:
        """:meth:`next` with a user's policy, which is checked."""
        try:
            action = self.policy(self._state)
        except DppError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ScheduleError(
                f"{self._policy_setting} failed on pipeline rank {self.geometry.rank}: "
                f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})",
                self._policy_setting,
            ) from error
        if isinstance(action, Action):
            self._run_allowed(action, Text(f"{self._policy_setting}: ", self._policy_setting))
        elif action is not None:
            raise ScheduleError(
                f"{self._policy_setting} returned {action!r}: expected an action of the "
                "view's own (view.forward(chunk), view.backward(chunk), view.weight()) or None",
                self._policy_setting,
            )
        elif not self.done and not may_arrive(self._state):
            raise ScheduleError(
                f"{self._policy_setting} returned None on pipeline rank "
                f"{self.geometry.rank}, where nothing more will arrive until something "
                f"runs: {self.stall().text}",
                self._policy_setting,
            )
        return action

    def run(self, action: Action) -> None:
        """Count an action as run that a stage leader or a recording has decided.

        Raises:
            ScheduleError: it may not run; says why.
        """
        self._run_allowed(action)

    def _run_allowed(self, action: Action, whose: str = "") -> None:
        state = self._state
        own = allowed(state, action)
        if own is not action and own != action:
            raise ScheduleError(
                f"{whose}pipeline rank {self.geometry.rank}: {action} may not run: "
                f"{refusal(state, action).text}",
                whose,
            )
        state.apply(action)

    def wanted(self) -> list[tuple[Direction, int]]:
        """Channels, as ``(direction, chunk)``, whose next message would allow a task at once after
        :meth:`next` returned None: gradients, and inputs for which there is room.
        """
        state, inputs, gradients = self._state, [], []
        for c in range(self.geometry.num_chunks):
            run, back = state.forwards_run[c], state.backwards_run[c]
            training = not self.geometry.forward_only
            if training and state.gradients_arrived[c] == back < state.backwards_due(c):
                gradients.append((Direction.BACKWARD, c))
            left = state.forwards_arrived[c] == run < self.geometry.num_microbatches
            if left and state.forward_fits(c):
                inputs.append((Direction.FORWARD, c))
        return gradients + inputs

    def ready(self) -> list[Action]:
        """The next task of each kind and chunk that may run."""
        state, chunks = self._state, range(self.geometry.num_chunks)
        found = [way(c) for c in chunks for way in (state.forward, state.backward)]
        return [action for action in (*found, state.weight()) if action is not None]

    def stall(self) -> Stall:
        """The reason why :meth:`next` returned None, and the arrivals that would change it."""
        state = self._state
        if state.done:
            return Stall(Cause.DONE, "all tasks have run")
        chunks, arrived = range(self.geometry.num_chunks), state.forwards_arrived
        runs, total = state.forwards_run, self.geometry.num_microbatches
        inputs = [(Direction.FORWARD, c) for c in chunks if arrived[c] == runs[c] < total]
        blocked = [c for c in chunks if arrived[c] > runs[c]]
        gradients = [
            (Direction.BACKWARD, c)
            for c in chunks
            if not self.geometry.forward_only and state.backwards_run[c] < state.backwards_due(c)
        ]
        channels = tuple(inputs + gradients)
        if ready := self.ready():
            return Stall(Cause.POLICY, f"{ready[0]} may run; the policy waits", channels)
        cause, units = self._cause(inputs, blocked), self.geometry.backward_units
        names = ", ".join(
            f"{'gradient' if way is Direction.BACKWARD else 'input'} "
            f"{units[state.backwards_run[c]] if way else state.forwards_run[c]} of chunk {c}"
            for way, c in channels
        )
        held = f"{state.held:g} of {state.cap:g} chunk activations held"
        return Stall(cause, f"{cause.value}: next would be {names}; {held}", channels)

    def _cause(self, inputs: list[tuple[Direction, int]], blocked: list[int]) -> Cause:
        state = self._state
        if state.last_kind is None:
            return Cause.WARMUP
        if blocked:
            return Cause.MEMORY_CAP
        if not inputs:
            return Cause.COOLDOWN
        expected = state.next_in_reference()
        forward = expected is not None and expected.kind is Kind.F
        return Cause.WAIT_FORWARD if forward else Cause.WAIT_BACKWARD
