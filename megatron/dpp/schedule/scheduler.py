"""The scheduler of one rank: receives arrivals, returns the next task.

It is a :class:`~megatron.dpp.schedule.state.View` (tasks that may run) with a policy (the
choice), which checks decisions and explains a stall. The executor restarts one for each iteration
of the same shape; the simulator has one per rank.
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
from megatron.dpp.schedule.caps import ROUNDING, UNIT, MemoryLimit, key_sizes, parse_cap
from megatron.dpp.schedule.policies import BUILT_IN, Policy, check_room, find_policy
from megatron.dpp.schedule.state import View


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


class Scheduler(View):
    """Picks the tasks of one rank in one iteration. Its policy's view is itself.

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
            cap = parse_cap("auto", geometry).chunks
        if not 0.0 <= beta <= 1.0:
            raise ConfigError(f"beta {beta}: the share that B frees must be in 0 .. 1")
        if largest < 1:
            raise ConfigError(f"largest {largest}: a microbatch must have a size of at least 1")
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
        self._begin(geometry, sizes)
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
        if limits is not None:
            self.limits = tuple(limits)
        self._begin(self.geometry, sizes)

    def _begin(self, geometry: Geometry, sizes: Sequence[int] | None) -> None:
        if sizes is not None and len(sizes) != geometry.num_microbatches:
            raise ConfigError(
                f"{len(sizes)} sizes were given for {geometry.num_microbatches} microbatches"
            )
        super().__init__(geometry, limits=self.limits, **self._settings)
        keys = key_sizes(geometry.groups, sizes or (), self._kappa)
        for microbatch, size in enumerate(sizes or ()):
            self.learn(microbatch, size, keys.get(microbatch, 0))
        if geometry.forward_only:
            return
        for budget in self._budgets:
            if not budget.soft and budget.cap < budget.least - ROUNDING:
                activation_cap = setting("activation_cap")
                raise ConfigError(
                    f"pipeline rank {geometry.rank} may hold {budget.cap:g} chunk activations, but "
                    f"Megatron's own order needs {budget.least:g}; raise {activation_cap}",
                    activation_cap,
                )

    def hold_back(self, *, held: bool) -> None:
        """Admit no new microbatch to this rank's first chunk while ``held``. Takes effect only when
        ``forward_only``, where no cap applies. The other chunks run on, so the pipeline drains.
        """
        self.held_back = held and self.geometry.forward_only and self._is_built_in

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
        counts = self.forwards_arrived if forward else self.gradients_arrived
        if not counts[chunk] <= total <= geometry.num_microbatches:
            raise ScheduleError(
                f"{place}: {total} {'inputs' if forward else 'gradients'} reported after "
                f"{counts[chunk]}; the number only grows, to {geometry.num_microbatches}"
            )
        counts[chunk] = total

    def next(self) -> Action | None:
        """Choose the next task and count it as run; None when none may run (see :meth:`stall`) or
        the policy waits.

        Raises:
            ScheduleError: the policy failed, returned something else than an action that may run,
                or waits although nothing more can arrive.
        """
        if not self._is_built_in:
            return self._next_of_user()
        action = self.policy(self)
        if action is not None:
            self.apply(action)
        return action

    def run_on(self) -> Action | None:
        """:meth:`next`, right after a piece of ``W`` and before anything else has arrived, if it is
        the next piece of the same ``W``; None if it may be another task, or the policy is not
        built-in.

        A piece changes only how much is held, so another choice needs a forward that waits for
        room.
        """
        action = self.next_piece() if self._is_built_in else None
        waits = any(map(int.__gt__, self.forwards_arrived, self.forwards_run))
        if action is None or (waits and self.policy(self) != action):
            return None
        self.apply(action)
        return action

    def _next_of_user(self) -> Action | None:
        """:meth:`next` with a user's policy, which is checked."""
        try:
            action = self.policy(self)
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
            self.run(action, Text(f"{self._policy_setting}: ", self._policy_setting))
        elif action is not None:
            raise ScheduleError(
                f"{self._policy_setting} returned {action!r}: expected an action of the "
                "view's own (view.forward(chunk), view.backward(chunk), view.weight()) or None",
                self._policy_setting,
            )
        elif not self.done and not may_arrive(self):
            raise ScheduleError(
                f"{self._policy_setting} returned None on pipeline rank "
                f"{self.geometry.rank}, where nothing more will arrive until something "
                f"runs: {self.stall().text}",
                self._policy_setting,
            )
        return action

    def run(self, action: Action, whose: str = "") -> None:
        """Count an action as run that a stage leader, a recording or a user's policy has decided.

        Raises:
            ScheduleError: it may not run; says why, behind ``whose`` decision it is.
        """
        own = allowed(self, action)
        if own is not action and own != action:
            raise ScheduleError(
                f"{whose}pipeline rank {self.geometry.rank}: {action} may not run: "
                f"{refusal(self, action).text}",
                whose,
            )
        self.apply(action)

    def wanted(self) -> list[tuple[Direction, int]]:
        """Channels, as ``(direction, chunk)``, whose next message would allow a task at once after
        :meth:`next` returned None: gradients, and inputs for which there is room.
        """
        inputs, gradients = [], []
        for c in range(self.geometry.num_chunks):
            run, back = self.forwards_run[c], self.backwards_run[c]
            training = not self.geometry.forward_only
            if training and self.gradients_arrived[c] == back < self.backwards_due(c):
                gradients.append((Direction.BACKWARD, c))
            left = self.forwards_arrived[c] == run < self.geometry.num_microbatches
            if left and self.forward_fits(c):
                inputs.append((Direction.FORWARD, c))
        return gradients + inputs

    def ready(self) -> list[Action]:
        """The next task of each kind and chunk that may run."""
        chunks = range(self.geometry.num_chunks)
        found = [way(c) for c in chunks for way in (self.forward, self.backward)]
        return [action for action in (*found, self.weight()) if action is not None]

    def stall(self) -> Stall:
        """The reason why :meth:`next` returned None, and the arrivals that would change it."""
        if self.done:
            return Stall(Cause.DONE, "all tasks have run")
        chunks, arrived = range(self.geometry.num_chunks), self.forwards_arrived
        runs, total = self.forwards_run, self.geometry.num_microbatches
        inputs = [(Direction.FORWARD, c) for c in chunks if arrived[c] == runs[c] < total]
        blocked = [c for c in chunks if arrived[c] > runs[c]]
        gradients = [
            (Direction.BACKWARD, c)
            for c in chunks
            if not self.geometry.forward_only and self.backwards_run[c] < self.backwards_due(c)
        ]
        channels = tuple(inputs + gradients)
        if ready := self.ready():
            return Stall(Cause.POLICY, f"{ready[0]} may run; the policy waits", channels)
        cause, units = self._cause(inputs, blocked), self.geometry.backward_units
        names = ", ".join(
            f"{'gradient' if way is Direction.BACKWARD else 'input'} "
            f"{units[self.backwards_run[c]] if way else self.forwards_run[c]} of chunk {c}"
            for way, c in channels
        )
        held = f"{self.held:g} of {self.cap:g} chunk activations held"
        return Stall(cause, f"{cause.value}: next would be {names}; {held}", channels)

    def _cause(self, inputs: list[tuple[Direction, int]], blocked: list[int]) -> Cause:
        if self.last_kind is None:
            return Cause.WARMUP
        if blocked:
            return Cause.MEMORY_CAP
        if not inputs:
            return Cause.COOLDOWN
        expected = self.next_in_reference()
        forward = expected is not None and expected.kind is Kind.F
        return Cause.WAIT_FORWARD if forward else Cause.WAIT_BACKWARD


class Refusal(NamedTuple):
    """The reason why an action may not run. ``may_pass``: an arrival alone would allow it."""

    text: str
    may_pass: bool = False


def allowed(view: View, action: Action) -> Action | None:
    """The view's own next action of the same kind and chunk; ``action`` may run if it equals it."""
    if action.kind == Kind.W:
        return view.weight()
    if not 0 <= action.chunk < view.geometry.num_chunks:
        return None
    ask = view.forward if action.kind == Kind.F else view.backward
    return ask(action.chunk)


def refusal(view: View, action: Action) -> Refusal:
    """The reason why ``action``, which ``view`` does not allow now, may not run."""
    geometry, chunk = view.geometry, action.chunk
    if not 0 <= chunk < geometry.num_chunks:
        return Refusal(f"this rank has chunks 0 .. {geometry.num_chunks - 1}")
    if action.kind == Kind.W:
        oldest = view.weight()
        if oldest is None:
            return Refusal("no weight gradient is left to run")
        return Refusal(f"{oldest} is the oldest weight gradient and comes first")
    run = (view.forwards_run if action.kind == Kind.F else view.backwards_run)[chunk]
    total, unit = geometry.num_microbatches, action.microbatch
    if not 0 <= unit < total or geometry.position(action.kind, unit) != run:
        rule = "microbatches go in order"
        if geometry.groups and action.kind == Kind.B:
            rule = "groups go in order, each from its last microbatch to its first"
        return Refusal(f"{run} of {total} {action.kind.name} of chunk {chunk} have run, and {rule}")
    if action.kind == Kind.F:
        return _forward_refusal(view, chunk)
    if run >= geometry.due[view.forwards_run[chunk]]:
        which = "not all forwards of its group have" if geometry.groups else "its forward has not"
        return Refusal(f"{which} run")
    return _missing("gradient", f"{chunk + 1}B{unit}", _gradient_may_arrive(view, chunk))


def may_arrive(view: View) -> bool:
    """Any message can still arrive before this rank runs another task. A microbatch reaches a chunk
    only after it has left this rank's chunk before it.
    """
    chunks = range(view.geometry.num_chunks)
    return any(_input_may_arrive(view, c) or _gradient_may_arrive(view, c) for c in chunks)


def _input_may_arrive(view: View, chunk: int) -> bool:
    most = view.forwards_run[chunk - 1] if chunk else view.geometry.num_microbatches
    return view.forwards_arrived[chunk] < most


def _gradient_may_arrive(view: View, chunk: int) -> bool:
    most = view.geometry.due[view.forwards_run[chunk]]
    if chunk < view.geometry.num_chunks - 1:
        most = min(most, view.backwards_run[chunk + 1])
    return not view.geometry.forward_only and view.gradients_arrived[chunk] < most


def _missing(what: str, before: str, may_pass: bool) -> Refusal:
    never = "" if may_pass else f", and cannot before {before} has run here"
    return Refusal(f"its {what} has not arrived{never}", may_pass)


def _forward_refusal(view: View, chunk: int) -> Refusal:
    if view.forwards_run[chunk] >= view.forwards_arrived[chunk]:
        before = f"{chunk - 1}F{view.forwards_run[chunk]}"
        return _missing("input", before, _input_may_arrive(view, chunk))
    return Refusal(
        f"{view.held:g} of {view.cap:g} chunk activations are held, and it would leave no room for "
        "Megatron's order of the tasks before it (activation_cap)"
    )
