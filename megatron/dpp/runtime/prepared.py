"""Preparation of a model for its steps: deferred weight gradients, CUDA graphs, measuring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megatron.dpp.config import GRAPHS_PAY_FROM, POOL_GROWTH, Backward, DppConfig
from megatron.dpp.core.call import StepCall
from megatron.dpp.core.expert_trace import traced_experts
from megatron.dpp.core.graphs.capture import Capture, can_capture
from megatron.dpp.core.graphs.pools import SPARE
from megatron.dpp.core.graphs.slots import ChunkGraphs
from megatron.dpp.core.padded import PaddedRows
from megatron.dpp.core.steps import Stage
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.core.wgrad.own_way import refuse_shared
from megatron.dpp.errors import Text, setting
from megatron.dpp.memory import room
from megatron.dpp.runtime.session import Session
from megatron.dpp.schedule import LastRank, Memory
from megatron.dpp.trace import Recorder


class Prepared:
    """Deferred weight gradients and graphs of one model, and the memory that it was measured to
    take. It is prepared anew for another model.

    Args:
        config: split backwards and graphs.
        session: has the links, times and decisions of the steps.
        log: called with each line.
        say: called with a line of something that is prepared in each step.
        capture: captures graphs; None captures CUDA graphs.
    """

    def __init__(
        self,
        config: DppConfig,
        session: Session,
        log: Callable[[str], None],
        say: Callable[[str], None],
        capture: Capture | None = None,
    ) -> None:
        self._config, self._session, self._capture = config, session, capture
        self._log, self._say = log, say
        self.graphs: ChunkGraphs | None = None
        """Graphs of the chunks, where they are captured."""
        self._weights: WeightGradients | None = None
        self._binds = True
        self._padded: PaddedRows | None = None
        self._model: Sequence[torch.nn.Module] = ()
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._trained: Sequence[bool] = ()

    @property
    def num_pieces(self) -> tuple[int, ...]:
        """Pieces of each chunk's weight gradient; empty where all backwards are fused."""
        return self._weights.num_pieces if self._weights is not None else ()

    def prepare(self, call: StepCall) -> WeightGradients | None:
        """Prepare this model's backwards, and anew when a host has frozen weights since, or trains
        frozen ones.

        Returns:
            Its weight gradients; None if all backwards are fused.

        Raises:
            ConfigError: the model cannot be trained by tasks.
        """
        refuse_shared(call.model)
        trained = [parameter.requires_grad for parameter in self._parameters]
        if self._model != call.model or trained != self._trained:
            if self._model and self._session.is_open:
                self._session.decisions.renew()
            self.forget()
            self._weights = self._weight_gradients(call)
            if self._config.cuda_graphs != "off" and can_capture(self._capture):
                self.graphs = self._make_graphs(call)
            self._padded = call.padded_rows(self._config)
            self._model = list(call.model)
            self._parameters = [p for chunk in call.model for p in chunk.parameters()]
            self._trained = [p.requires_grad for p in self._parameters]
        else:  # a host may have changed something in it
            if self._weights is not None:
                self._weights.inspect()
            if self.graphs is not None and not self.graphs.inspect():
                self.graphs.close()
                self.graphs = self._make_graphs(call)
        return self._weights if any(self.num_pieces) else None

    def _weight_gradients(self, call: StepCall) -> WeightGradients | None:
        """The store of this model's weight gradients; None if its backwards are fused."""
        if self._config.split_backward == "off":
            return None
        found = WeightGradients(call.model, self._say)
        chunks = [chunk for chunk, pieces in enumerate(found.num_pieces) if not pieces]
        if chunks:
            self._say(
                f"dynamic pipeline: the backward of chunks {chunks} is fused: their transformer "
                "layers have no linear layer whose weight gradient can be deferred"
            )
        return found

    def settles(self, call: StepCall) -> bool:
        """True if the next step that may replay CUDA graphs does so, by the launch times of the
        steps before; once a collective of the stage.
        """
        graphs = self.graphs if call.cut is None else None
        return graphs is not None and graphs.settle(call.boundary_example(self._config))

    @property
    def num_captures(self) -> int:
        """Steps so far in which CUDA graphs were captured."""
        return self.graphs.num_captures if self.graphs is not None else 0

    def drop_graphs(self) -> None:
        """Free the graphs; the model's later steps are eager."""
        graphs, self.graphs = self.graphs, None
        if graphs is not None:
            graphs.close()
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def bound(
        self, call: StepCall, recorder: Recorder, backward: Backward, *, graphs: bool
    ) -> Iterator[None]:
        """Bind deferred weight gradients and graphs to the model for one call.

        Args:
            backward: the way of its backwards.
            graphs: CUDA graphs may be captured and replayed in it.
        """
        self._binds = graphs
        with contextlib.ExitStack() as around:
            if not call.forward_only:
                if self._weights is not None and backward.split:
                    around.enter_context(self._weights.bound())
                if self.graphs is not None and graphs and call.cut is None:
                    around.enter_context(self.graphs.bound(call.boundary_example(self._config)))
                if self._padded is not None and self.pads(call):
                    around.enter_context(self._padded.bound())
                around.enter_context(traced_experts(call.model, recorder))
            yield

    def pads(self, call: StepCall) -> bool:
        """Rows of a call are padded to the lengths of graphs."""
        captures = self.graphs is not None and self.graphs.captures
        chosen = self._config.length_buckets not in ("auto", "off") or (self._binds and captures)
        trains = call.cut is None and not call.forward_only
        return trains and chosen and self._padded is not None

    @property
    def replays(self) -> bool:
        """CUDA graphs of the model are replayed."""
        return self.graphs is not None and self.graphs.replays

    def forget(self) -> None:
        """Free what was prepared, with the graphs. May be called twice."""
        self._weights, self._model = None, ()
        self._parameters = self._trained = ()
        self.drop_graphs()

    # Graphs

    def _make_graphs(self, call: StepCall) -> ChunkGraphs | None:
        found = call.boundaries(call.length)
        if found.several:
            self._log(
                "CUDA graphs: not used, as a stage boundary carries several tensors "
                f"({len(found.receives)} received, {len(found.sends)} sent)"
            )
            return None
        session = self._session
        return ChunkGraphs(
            call.model,
            self._weights,
            self._log,
            partial(self._graphs_pay, call),
            self._capture,
            rows=call.captured_rows(self._config),
            most=lambda: session.decisions.cap if session.is_open else 0.0,
        )

    def _graphs_pay(self, call: StepCall, chunks: Sequence[int]) -> bool:
        """True if ``chunks`` should be captured, by the launch times of the first steps; equal on
        all ranks that share this stage.
        """
        session, left = self._session, room()
        growth = POOL_GROWTH * (SPARE if len(call.captured_rows(self._config)) > 1 else 1.0)
        chunk_bytes = growth * session.decisions.activation_bytes
        share, filled = session.largest(
            call,
            session.timer.launch_share(chunks),
            0.0 if left is None else chunk_bytes * session.decisions.peak_held / max(left, 1),
        )
        recomputes = call.config.recompute_granularity == "full"
        reason = why_no_graphs(self._config.cuda_graphs, share, filled, recomputes_all=recomputes)
        cap = session.decisions.cap
        if reason:
            self._log(Text(f"CUDA graphs: not used, {reason}", reason))
        elif left is not None and chunk_bytes:
            self._log(
                f"CUDA graphs: may reserve up to {chunk_bytes * cap / 2**30:.1f} GiB for {cap:g} "
                f"chunk activations; {left / 2**30:.1f} GiB are left beside model and optimizer"
            )
        return not reason

    # Measuring

    def account(self, call: StepCall, longest: float, measured: Stage | None) -> None:
        """Pass on the measured memory of an activation: the eager one first, a graph's slot later.
        The ranks of a stage use their largest, as one of them decides for all.

        Args:
            longest: the longest microbatch in lengths of microbatch 0, which is measured. The cap
                counts in activations of the longest.
            measured: the stage of a step that measured; None of others.
        """
        session = self._session
        decisions = session.decisions
        if measured is not None:
            last = self._last_rank(measured)
            activation, deferred, head, layers = session.largest(
                call,
                longest * last.activation_bytes,
                longest * max(measured.deferred_bytes.values(), default=0),
                last.head_room,
                last.layers,
            )
            decisions.measured(
                Memory(
                    activation_bytes=activation,
                    deferred_bytes=deferred,
                    head_room=head,
                    last_layers=layers,
                    one_head=measured.runs_head_in_forward,
                )
            )
        graphs = self.graphs
        if graphs is None or not graphs.awaits_size:
            return
        (slot_bytes,) = session.largest(call, graphs.slot_bytes(decisions.activation_bytes))
        if slot_bytes:
            graphs.keep_size(slot_bytes)
            decisions.measured_slots(slot_bytes)

    def _last_rank(self, measured: Stage) -> LastRank:
        """The measured activations, with the LM head apart on the last rank."""
        found = measured.activation_bytes
        sizes = [found[chunk] for chunk in range(len(found))]
        if self._weights is None or not measured.is_last(len(sizes) - 1):
            return LastRank(max(sizes, default=0))
        return LastRank.of(sizes, self._weights.num_pieces)


def why_no_graphs(
    asked: str, launch_share: float, filled: float = 0.0, *, recomputes_all: bool = False
) -> str | None:
    """The reason why no CUDA graphs are captured; None if they are.

    Args:
        asked: ``DppConfig.cuda_graphs``, ``auto`` or ``on``.
        launch_share: the share of launching in the task time of the most launch-bound chunk that
            has layers.
        filled: the share of the memory left for activations that graphs may need.
        recomputes_all: whole layers are recomputed, so memory is short.
    """
    if asked == "on":
        return None
    if recomputes_all:
        reason = "as recompute_granularity='full' asks for little memory"
    elif launch_share < GRAPHS_PAY_FROM:
        reason = f"as launching takes {launch_share:.0%} of the time that tasks run"
    elif filled > 1.0:
        reason = f"as they may need {filled:.1f} times the memory that is left for activations"
    else:
        return None
    graphs = setting("cuda_graphs", "on")
    return Text(f"{reason} ({graphs} uses them all the same, for more memory)", graphs)
