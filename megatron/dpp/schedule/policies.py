"""Which of the tasks that may run shall run: the policies.

A policy is a function of a read-only :class:`~megatron.dpp.schedule.state.View` that returns an
action of the view's own (``view.forward(c)``, ``view.backward(c)``, ``view.weight()``) or None to
wait for the next arrival. It carries nothing out, so the simulator, a test and the executor drive
the same one. What a policy cannot break: order inside a chunk, the cap, and the safe rule; those
are the view's. ``docs/policies.md`` says how to write one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron.dpp.errors import ConfigError
from megatron.dpp.schedule.actions import Action, Geometry, Kind
from megatron.dpp.schedule.caps import times_p
from megatron.dpp.schedule.state import View

Policy = Callable[[View], Action | None]
"""A policy decides from what it sees, and from nothing else."""


def dynamic(view: View) -> Action | None:
    """One forward, one backward in turn, in depth-first order, of what is ready; weight gradients
    when nothing else is.

    A ready backward may take the place of a forward that is missing and the other way round; a
    weight gradient runs when neither may. Forward first at the start.
    """
    backward = view.first_backward()
    if backward is not None and view.last_kind == Kind.F:
        return backward
    forward = view.first_forward()
    if forward is not None:
        return forward
    return backward if backward is not None else view.weight()


def depth_first(view: View) -> Action | None:
    """A ready backward before any forward, each in depth-first order: less memory held."""
    return view.first_backward() or view.first_forward() or view.weight()


def breadth_first(view: View) -> Action | None:
    """All microbatches through a chunk before the next chunk; needs room for all of them.

    Starts the gradient reduction of a chunk early (Lamy-Poirier, "Breadth-First Pipeline
    Parallelism", 2023).
    """
    num_chunks = view.geometry.num_chunks
    for chunk in range(num_chunks):
        action = view.forward(chunk)
        if action is not None:
            return action
    for chunk in range(num_chunks - 1, -1, -1):
        action = view.backward(chunk)
        if action is not None:
            return action
    return view.weight()


def megatron(view: View) -> Action | None:
    """Megatron's own order of forwards and backwards; deferred weight gradients fill the waiting
    times.
    """
    expected = view.next_in_reference()
    if expected is not None:
        ask = view.forward if expected.kind is Kind.F else view.backward
        action = ask(expected.chunk)
        if action is not None:
            return action
    return view.weight()


BUILT_IN: Mapping[str, Policy] = MappingProxyType(
    {
        "dynamic": dynamic,
        "depth-first": depth_first,
        "breadth-first": breadth_first,
        "megatron": megatron,
    }
)


def find_policy(name: str) -> Policy:
    """The built-in policy ``name``, or a user's own given as ``module:function``.

    A class works too: it is called without arguments for each rank, and the object is the policy.

    Raises:
        ConfigError: no such name, module or function; it cannot be imported, or called with a view.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise ConfigError(
            f"--dpp-policy {name}: expected one of {known}, or your own as module:function"
        )
    try:
        policy = getattr(importlib.import_module(module_name), attribute)
        if isinstance(policy, type):
            policy = policy()
    except Exception as error:  # importing or making it runs a user's own code
        raise ConfigError(f"--dpp-policy {name}: {type(error).__name__}: {error}") from error
    if not callable(policy):
        raise ConfigError(f"--dpp-policy {name}: {policy!r} cannot be called")
    _check_takes_view(policy, name)
    return policy  # type: ignore[no-any-return]


def _check_takes_view(policy: Policy, name: str) -> None:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # some built-in callables do not tell theirs
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"--dpp-policy {name}: it takes {signature}, and is called with one view: {error}"
        ) from error


def check_room(
    policy: Policy, geometry: Geometry, cap: float, *, split_backward: bool = False
) -> None:
    """Refuse breadth-first with a cap that cannot hold all microbatches: under a cap it is far
    slower than any other.

    Raises:
        ConfigError: says how much room is needed, on the last rank beside the LM head, too.
    """
    need = geometry.num_chunks * geometry.num_microbatches
    if policy is breadth_first and not geometry.forward_only and cap < need:
        head = split_backward and geometry.num_ranks > 1
        raise ConfigError(
            f"--dpp-policy breadth-first: pipeline rank {geometry.rank} may hold {cap:g} chunk "
            f"activations, but breadth-first holds all {geometry.num_microbatches} microbatches of "
            f"{geometry.num_chunks} chunks, {need}. Give --dpp-activation-cap "
            f"{times_p(need + head, geometry)} (or more bytes), or take --dpp-policy dynamic"
        )
