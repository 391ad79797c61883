"""Policies: they pick the next task among those that may run.

A policy is a function of a read-only :class:`~megatron.dpp.schedule.state.View`. It returns one of
the view's actions (``view.forward(c)``, ``view.backward(c)``, ``view.weight()``), or None to wait
for the next arrival. The view keeps the order within a chunk, the memory cap and the safe rule, so
no policy can break them. To add one, write it here and enter it in :data:`BUILT_IN`
and, by its name, in ``config.POLICIES`` (``docs/policies.md``).
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron.dpp.config import POLICIES
from megatron.dpp.errors import ConfigError, setting
from megatron.dpp.schedule.actions import Action, Geometry, Kind
from megatron.dpp.schedule.caps import times_p
from megatron.dpp.schedule.state import View

Policy = Callable[[View], Action | None]
"""Decides from the view alone."""

_SPREAD = 0.25
"""Shortest over longest microbatch below which ``auto`` is ``dynamic`` on more than two ranks."""


def dynamic(view: View) -> Action | None:
    """Alternates forwards and backwards, each in depth-first order; starts with a forward.

    Where one of them is not ready, the other runs; where neither is, a weight gradient. With
    ``weights_first`` these run before a forward.
    """
    backward = view.first_backward()
    if backward is not None and view.last_kind == Kind.F:
        return backward
    forward = view.first_forward()
    if forward is not None:
        return (view.weight() if view.weights_first else None) or forward
    return backward if backward is not None else view.weight()


def depth_first(view: View) -> Action | None:
    """Prefers a ready backward to any forward, each in depth-first order: holds less memory."""
    return view.first_backward() or view.first_forward() or view.weight()


def breadth_first(view: View) -> Action | None:
    """Runs all microbatches through a chunk before the next chunk; needs memory for all of them.

    A chunk's gradient reduction starts early (Lamy-Poirier, "Breadth-First Pipeline Parallelism",
    2023).
    """
    chunks = range(view.geometry.num_chunks)
    tasks = itertools.chain(map(view.forward, chunks), map(view.backward, reversed(chunks)))
    return next(filter(None, tasks), None) or view.weight()


def megatron(view: View) -> Action | None:
    """Keeps Megatron's own order of forwards and backwards; weight gradients fill the waits."""
    expected = view.next_in_reference()
    if expected is not None:
        ask = view.forward if expected.kind is Kind.F else view.backward
        action = ask(expected.chunk)
        if action is not None:
            return action
    return view.weight()


def eager(view: View) -> Action | None:
    """Megatron's order with a warm-up as deep as memory allows; weight gradients fill the waits.

    A rank may run forwards ahead up to its share of the cap, which falls from rank to rank. Which
    task is next follows from sizes alone; only a forward whose input is late lets a backward pass.
    With several chunks it is :func:`megatron`.
    """
    geometry = view.geometry
    if geometry.num_chunks > 1 or geometry.groups:
        return megatron(view)
    run, done, sizes = view.forwards_run[0], view.backwards_run[0], view.sizes
    behind = geometry.num_ranks - 1 - geometry.rank
    ahead = run < geometry.num_microbatches and run - done <= behind
    if behind and not ahead and run < geometry.num_microbatches:
        share = view.cap * (behind + 1) / geometry.num_ranks
        ahead = sum(sizes[i] for i in range(done, run + 1)) <= share * sizes.largest
    first = view.forward(0) if ahead else view.backward(0)
    return first or view.weight() or (view.backward(0) if ahead else None)


def auto(view: View) -> Action | None:
    """The policy of :func:`meant`."""
    return meant(auto, view)(view)


def meant(policy: Policy, view: View) -> Policy:
    """``policy``, or that of :func:`chosen_policy` for the sizes that are known."""
    geometry, sizes = view.geometry, view.sizes
    if policy is not auto:
        return policy
    if geometry.groups:
        return megatron if geometry.num_ranks == 2 else dynamic
    least = sizes.least / sizes.largest
    return BUILT_IN[chosen_policy("auto", geometry.num_ranks, geometry.num_chunks, least)]


def chosen_policy(name: str, num_ranks: int, num_chunks: int = 1, least: float = 1.0) -> str:
    """The policy that ``name`` runs: another one for ``auto`` alone (docs/decisions/schedule.md),
    by the pipeline's shape and ``least``, the shortest microbatch over the longest.
    """
    if name != "auto":
        return name
    if num_ranks > 2 and least < _SPREAD:
        return "dynamic"
    return "eager" if num_chunks == 1 else "megatron"


BUILT_IN: Mapping[str, Policy] = MappingProxyType(
    dict(zip(POLICIES, (auto, dynamic, depth_first, breadth_first, megatron, eager), strict=True))
)
"""The values of ``DppConfig.policy``, beside a user's own ``module:function``."""

HOLDS_ALL = frozenset({"breadth-first"})
"""Built-in policies that hold the activations of all microbatches at once."""


def find_policy(name: str) -> Policy:
    """The built-in policy ``name``, or a user's own given as ``module:function``.

    A class is called without arguments for each rank; the object is the policy.

    Raises:
        ConfigError: the name, module or function does not exist, or does not take a view.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, _, attribute = name.partition(":")
    given = setting("policy", name)
    try:
        policy = getattr(importlib.import_module(module_name), attribute)
        if isinstance(policy, type):
            policy = policy()
    except Exception as error:  # importing or making it runs a user's own code
        raise ConfigError(f"{given}: {type(error).__name__}: {error}", given) from error
    if not callable(policy):
        raise ConfigError(f"{given}: {policy!r} cannot be called", given)
    try:
        inspect.signature(policy).bind(None)
    except ValueError:  # some callables of CPython have no signature
        pass
    except TypeError as error:
        takes = f"it takes {inspect.signature(policy)}, and is called with one view"
        raise ConfigError(f"{given}: {takes}: {error}", given) from error
    return policy  # type: ignore[no-any-return]


def check_room(
    policy: Policy, geometry: Geometry, cap: float, *, split_backward: bool = False
) -> None:
    """Refuse a policy of :data:`HOLDS_ALL` under a cap that cannot hold all microbatches: there it
    is far slower than any other.

    Raises:
        ConfigError: names the cap that suffices, on the last rank also beside the LM head.
    """
    need = geometry.num_chunks * geometry.uncut.num_microbatches
    name = next((each for each in HOLDS_ALL if BUILT_IN[each] is policy), None)
    if name and not geometry.forward_only and cap < need:
        head = split_backward and geometry.num_ranks > 1
        larger = setting("activation_cap", times_p(need + head, geometry))
        named = setting("policy", name), larger, setting("policy", "dynamic")
        raise ConfigError(
            f"{named[0]}: pipeline rank {geometry.rank} may hold {cap:g} chunk activations, but "
            f"{name} holds all {geometry.uncut.num_microbatches} microbatches of "
            f"{geometry.num_chunks} chunks, {need}. Give {larger} (or more bytes), or take "
            f"{named[2]}",
            *named,
        )
