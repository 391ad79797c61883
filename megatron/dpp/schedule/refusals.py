"""Checks of actions that were decided elsewhere, and the reasons why one may not run.

Separate from ``state.py``, since only errors, replays and followers need it.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.dpp.schedule.actions import Action, Kind
from megatron.dpp.schedule.state import View


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
