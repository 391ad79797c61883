"""The way of each step's backwards: split, fused, or fused while others wait for their W.

With ``split_backward="auto"`` layers that are recomputed whole have fused backwards: a deferred W
keeps what they freed. Of others the first training steps run every W apart, and one of them none.
Later steps run as their times tell. All ranks that run the same tasks choose alike, and no choice
changes a number: a backward is fused only where no W of its chunk is deferred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.dpp.config import LAUNCH_BOUND_FROM, Backward, DppConfig
from megatron.dpp.core.steps import StepCall
from megatron.dpp.errors import Text, setting
from megatron.dpp.runtime.session import Session
from megatron.dpp.runtime.timer import Lap

_MOST_APART = 1.1
"""Time of B and W apart, in that of a fused backward, above which backwards are fused
(docs/decisions/0025-split-on-demand.md).
"""
_FUSED_STEP, _APART_STEP = 2, 3
"""Numbers of the steps that are measured. The first one allocates and initialises."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a stage's first steps; of several ranks the largest of each.

    Args:
        apart: time of B and W apart in that of a fused backward; 0 if it is not known.
        pays: the same, up to which a W that fills the cool-down gains what it costs.
        launching: share of launching in the tasks' time.
        unlike: microbatches differ in length.
        replayed: CUDA graphs are replayed.
    """

    apart: float = 0.0
    pays: float = math.inf
    launching: float = 0.0
    unlike: bool = False
    replayed: bool = False


def choose(found: Measured) -> tuple[Backward, str]:
    """The way in which backwards should run, and the reason."""
    if found.replayed:
        return Backward(), "CUDA graphs launch W as fast as B"
    if found.unlike:
        return Backward(), "microbatches differ in length"
    ratio = f"W apart takes {100 * found.apart - 100:+.0f} % of a fused backward's time"
    if found.apart > min(_MOST_APART, found.pays):
        return Backward(split=False), ratio
    share = f"launching takes {found.launching:.0%} of the time that tasks run"
    if found.launching >= LAUNCH_BOUND_FROM:
        return Backward(stock=1), share
    return Backward(), share


class Backwards:
    """Chooses how the backwards of one model's training steps run.

    Args:
        config: ``split_backward``, and whether a recording is replayed.
        log: called with a line when a choice was measured.
    """

    def __init__(self, config: DppConfig, log: Callable[[str], None]) -> None:
        self._chosen, self._log = Backward.of(config.split_backward), log
        self._replays = config.replay is not None
        self._num_steps = 0
        self._fused: Lap = {}
        self.unlike = False
        """Microbatches of a step so far differed in length."""

    def of_step(
        self,
        call: StepCall,
        session: Session,
        pieces: Sequence[int],
        replays: Callable[[], bool],
    ) -> Backward:
        """The way of the next step's backwards; in some steps a collective of the stage.

        Args:
            pieces: of each chunk's W.
            replays: tells in the third step if CUDA graphs are replayed from then on.
        """
        if self._chosen is not None:
            return self._chosen
        if self._replays:
            return _recorded(call, session)
        if getattr(call.config, "recompute_granularity", None) == "full":
            self._chosen = Backward(split=False)
            off = setting("split_backward", "off")
            self._log(
                Text(
                    f"dynamic pipeline: {off} is chosen: recompute_granularity='full' asks for "
                    "little memory, and a deferred weight gradient keeps what it has freed",
                    off,
                )
            )
            return self._chosen
        self._num_steps += 1
        lap = session.timer.lap()
        if lap is None:
            self._chosen = Backward()
        elif self._num_steps == _FUSED_STEP:
            return Backward(split=False)
        elif self._num_steps == _APART_STEP:
            self._fused = lap
            if replays():
                self._chosen = self._choose(call, session, Measured(replayed=True))
        elif self._num_steps > _APART_STEP:
            found = _measured(call, session, lap, self._fused, pieces)
            self._chosen = self._choose(call, session, found)
        return self._chosen or Backward()

    def _choose(self, call: StepCall, session: Session, own: Measured) -> Backward:
        varies = call.cut is not None or getattr(call.config, "variable_seq_lengths", False)
        apart, pays, launching, unlike = session.largest(
            call, own.apart, own.pays, own.launching, float(self.unlike or varies)
        )
        found, why = choose(Measured(apart, pays, launching, bool(unlike), own.replayed))
        split_backward = setting("split_backward", str(found))
        self._log(Text(f"dynamic pipeline: {split_backward} is chosen: {why}", split_backward))
        return found


def _measured(
    call: StepCall, session: Session, apart: Lap, fused: Lap, pieces: Sequence[int]
) -> Measured:
    """Measurements of this rank, over the chunks that have all of them. A microbatch's W fills
    the pipeline's cool-down twice: it ends a W earlier, and a W runs in it.
    """
    launching = session.timer.launch_share(range(len(pieces)))
    both = weights = whole = 0.0
    for chunk, number in enumerate(pieces):
        times = apart.get(("B", chunk)), apart.get(("W", chunk)), fused.get(("B", chunk))
        if number and None not in times:
            weights += number * apart["W", chunk]
            both += apart["B", chunk] + number * apart["W", chunk]
            whole += fused["B", chunk]
    if not whole:
        return Measured(launching=launching)
    fills = 2.0 * (session.topology.num_ranks - 1) / (len(pieces) * call.num_microbatches)
    return Measured(both / whole, 1.0 + fills * weights / whole, launching)


def _recorded(call: StepCall, session: Session) -> Backward:
    """The way of the next step in the leader's recording; the other ranks have none."""
    own = session.decisions.recorded_backward(session.topology.rank)
    stock = -2.0 if own is None else own.stock if own.split else -1.0
    (stock,) = session.largest(call, stock)
    return Backward(stock=stock) if stock >= 0.0 else Backward(split=False)
