"""A part of a chunk as CUDA graphs: its transformer block, or a layer up to its experts.

F, B and one W per layer of a part are captured over the pool of a *slot* (``pools.py``) at the
chunk's first forward of that length in the slot, or at the end of the step in which the slot was
made.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron.dpp.core.graphs.capture import Capture, CapturedRng, RecomputedDraws
from megatron.dpp.core.graphs.eight_bit import CachedWeights, tensors_of
from megatron.dpp.core.graphs.parts import Part
from megatron.dpp.core.graphs.pools import Pools, Slot, alike
from megatron.dpp.core.graphs.reductions import Additions, Reductions
from megatron.dpp.core.wgrad import accumulate
from megatron.dpp.core.wgrad.deferrable import DeferredWork
from megatron.dpp.core.wgrad.linear import WeightGradients
from megatron.dpp.core.wgrad.own_way import STANDS_FOR
from megatron.dpp.core.wgrad.product import gather_buffers
from megatron.dpp.core.wgrad.te_layer import adding
from megatron.dpp.errors import Text, one_line, setting

_BUCKETS = setting("length_buckets")
_MOST_OF_DOCUMENTS = 3
"""Numbers of documents that are captured for rows of one length."""
Key = tuple[int, Any]
"""Rows of a block's input and the signature of its arguments."""


class _Graphs:
    """The graphs of one part in one slot, for inputs of one length.

    Args:
        owner: the part, its own forward and its parameters.
        slot, pools: the memory.
        key: rows of the input, and the signature of all arguments.
        options: the arguments of the part besides its input.
    """

    def __init__(
        self,
        owner: GraphedBlock,
        slot: Slot,
        pools: Pools,
        key: Key,
        options: Mapping[str, Any],
    ) -> None:
        self._owner, self._slot, self._pools = owner, slot, pools
        self.key, rows = key, key[0]
        self.parameters = owner.parameters
        self._input = slot.input[:rows].requires_grad_()
        self._output, self._grad_output = slot.output[:rows], slot.grad_output[:rows]
        self._grad_input = pools.grad_input[:rows]
        self.options = {name: _blank(value) for name, value in options.items()}
        self._copied: dict[str, tuple[torch.Tensor, int]] = {}
        self._aliases = owner.aliases()
        self._live: tuple[torch.Tensor, ...] = ()
        self._begun: dict[str, torch.Tensor] = {}
        self._deferred: dict[int, list[DeferredWork]] = {}
        self._added: Additions
        self._unfinished = 0
        self._draws = owner.recomputed(partial(owner.run, self._input, self.options), self._input)
        self._forward = owner.capture(self._run_forward, slot.pool)
        with owner.rng.repeating(self._draws) if owner.rng else contextlib.nullcontext():
            self._backward = owner.capture(self._run_backward, slot.pool)
        layers = owner.part.pieces if owner.store is not None else ()
        self._weights = {n: owner.capture(partial(self._run_weight, n), slot.pool) for n in layers}
        self._gathered_into = gather_buffers()  # kept: a replay writes there

    def _run_forward(self) -> None:
        recomputable = self._draws.handed_out() if self._draws else contextlib.nullcontext()
        with self._owner.using(self._aliases), recomputable:
            self._live = self._owner.run(self._input, self.options)
        self._output.copy_(self._live[0].detach())
        self._more = [output.detach() for output in self._live[1:]]  # kept: of this pool
        self._more_gradients = [torch.empty_like(output) for output in self._more]

    def _run_backward(self) -> None:
        owner = self._owner
        self._added = owner.reductions.additions()
        with contextlib.ExitStack() as around:
            around.enter_context(owner.using(self._aliases))  # parts may be computed again
            around.enter_context(owner.reductions.held_back())
            if owner.store is not None:
                self._deferred = around.enter_context(owner.store.divert())
            for number, alias in enumerate(self._aliases):
                hook = alias.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._add, number)
                )
                around.callback(hook.remove)
            # Not autograd.grad, which recomputation refuses.
            pairs = zip(self._live, [self._grad_output, *self._more_gradients], strict=True)
            roots, gradients = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
            torch.autograd.backward(roots, gradients)
        self._live = ()
        self._grad_input.copy_(_taken(self._input))

    def _add(self, number: int, alias: Any) -> None:
        """Add a new gradient to its parameter's."""
        parameter = self.parameters[number]
        if getattr(alias, "grad_added_to_main_grad", False):
            parameter.grad_added_to_main_grad = True
        accumulate.add(parameter, [_taken(alias)])
        self._added.add(parameter)

    def _run_weight(self, layer: int) -> None:
        for work in self._deferred.pop(layer, ()):
            work.compute()

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Replay F. The results are the slot's buffers, valid until the microbatch's backward."""
        self._input.copy_(hidden)
        for (name, value), (_, own) in zip(_leaves(options), _leaves(self.options), strict=True):
            if isinstance(value, torch.Tensor):
                self._copy_option(name, value, own)
        self._begun = self._draws.states() if self._draws else {}
        rng = self._owner.rng
        with rng.replaying() if rng else contextlib.nullcontext():
            self._forward.replay()
        return self._output.detach(), *(output.detach() for output in self._more)

    def _copy_option(self, name: str, value: torch.Tensor, own: torch.Tensor) -> None:
        """Copy an argument in; a constant one (rotary embeddings) is copied once."""
        known = self._copied.get(name)
        if known is None or known[0] is not value or known[1] != value._version:
            own.copy_(value)
            self._copied[name] = (value, value._version)

    @torch.no_grad()
    def backward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Replay B. The result is a copy, as it may be sent after the buffer is used again."""
        for own, gradient in zip(
            [self._grad_output, *self._more_gradients], gradients, strict=True
        ):
            own.copy_(gradient)
        if self._draws:
            self._draws.rewind(self._begun)
        self._backward.replay()
        self._owner.reductions.start(self._added)
        self._unfinished = len(self._weights)
        for layer in self._weights:
            assert self._owner.store is not None
            self._owner.store.defer(layer, _WeightReplay(self, layer))
        if not self._weights:
            self._pools.give_back(self._slot)
        return self._grad_input.clone()

    def weight(self, layer: int) -> None:
        """Replay one layer's W; the last one gives the slot back."""
        self._weights[layer].replay()
        self._unfinished -= 1
        if not self._unfinished:
            self._pools.give_back(self._slot)


@dataclass(frozen=True)
class _WeightReplay(DeferredWork):
    """A captured W; its memory is the slot's and counted with the activation."""

    graphs: _Graphs
    layer: int

    def num_bytes(self) -> int:
        return 0

    def touches(self, weight: torch.Tensor) -> bool:
        return any(parameter is weight for parameter in self.graphs.parameters)

    def compute(self) -> None:
        self.graphs.weight(self.layer)


class _Replay(torch.autograd.Function):
    """A part's forward and backward, replayed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, graphs: _Graphs, options: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        ctx.graphs = graphs
        return graphs.forward(hidden, options)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return ctx.graphs.backward(gradients), None, None


class GraphedBlock:
    """A part of a chunk, whose training forwards are replayed while it is bound.

    Args:
        chunk: the chunk of the part; its gradients are added as DDP adds them.
        part: what is captured.
        store: takes deferred weight gradients; None for a fused backward.
        capture: see :data:`Capture`.
        rng: the source of random draws; None if none are drawn.
        say: called with the reason why something runs without graphs.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        part: Part,
        store: WeightGradients | None,
        capture: Capture,
        rng: CapturedRng | None,
        say: Callable[[str], None],
    ) -> None:
        self.rng, self.part = rng, part
        self._recomputes = bool(get_model_config(chunk).recompute_granularity)
        self._recomputed: dict[torch.Size, RecomputedDraws] = {}
        self.store, self.capture, self._say = store, capture, say
        self.parameters: list[Any] = [p for p in part.modules.parameters() if p.requires_grad]
        self.reductions = Reductions(chunk, self.parameters)
        self._pools: Pools | None = None
        self._signatures: dict[int, list[Any]] = {}
        """Of inputs, by rows."""
        self._failed = False
        config = get_model_config(chunk)
        caches = config.fp8 and (config.fp8_param or not config.disable_parameter_transpose_cache)
        self._weights = CachedWeights(part.modules) if caches else None
        self._read_at: list[int] | None = None
        """Addresses of the 8-bit weights that graphs read."""
        self._moved = False

    def is_as_built(self) -> bool:
        """True if no host has changed the modules and parameters of the part since."""
        return not self._moved and self.part.is_as_built()

    def bind(self, pools: Pools | None) -> None:
        """Replay the part's forwards over these slots; None restores its own forward."""
        self._pools = pools
        self.part.bind(self._call if pools is not None else None)

    def complete(self, pools: Pools) -> None:
        """Capture this part for each length that it has run with in the slots where it has not
        yet, between two steps: within a step a capture would delay the whole pipeline.
        """
        options = {
            graphs.key: graphs.options
            for slot in pools.made
            for (block, _), graphs in slot.graphs.items()
            if block is self
        }
        longest_first = sorted(options, key=lambda key: key[0], reverse=True)
        for slot, key in itertools.product(pools.made, longest_first):
            known = key[0] > slot.rows or (self, key) in slot.graphs
            if not (known or self._failed or self._moved):
                with self.part.around():
                    self._capture_in(slot, pools, key, options[key])

    def addresses(self) -> list[int]:
        """Of parameters, also frozen ones, their gradients' sums, and buffers, which graphs use."""
        sums = (getattr(parameter, "main_grad", None) for parameter in self.parameters)
        used = itertools.chain(
            self.part.modules.parameters(),
            self.part.modules.buffers(),
            (each for each in sums if each is not None),
        )
        return [tensor.data_ptr() for each in used for tensor in tensors_of(each)]

    def run(self, hidden: torch.Tensor, options: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Run the part's own forward."""
        outputs = self.part.run(hidden, options)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise TypeError("an output is no tensor")
        if not alike(outputs[0], hidden):
            raise TypeError("its output is not of its input's shape and dtype")
        return outputs

    def aliases(self) -> list[torch.nn.Parameter]:
        """Parameters over the same memory, to compute with while capturing.

        DDP made the real ones' gradient accumulators on the default stream; autograd would make
        that stream wait for the captured one, which CUDA refuses.
        """
        aliases = []
        for parameter in self.parameters:
            alias = torch.nn.Parameter(parameter.detach())  # compiled parts expect a Parameter
            alias.__dict__.update(parameter.__dict__)  # Megatron's marks, and main_grad
            alias.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            setattr(alias, STANDS_FOR, parameter)
            aliases.append(alias)
        return aliases

    @contextlib.contextmanager
    def using(self, aliases: list[torch.nn.Parameter]) -> Iterator[None]:
        """Let the part compute with these instead of its parameters."""
        alias_of = dict(zip(self.parameters, aliases, strict=True))
        modules = list(self.part.modules.modules())
        tables = [module._parameters for module in modules]
        own = [dict(table) for table in tables]
        for table in tables:
            table.update((name, alias_of.get(p, p)) for name, p in table.items() if p is not None)
        try:
            with adding(modules):
                yield
        finally:
            for table, original in zip(tables, own, strict=True):
                table.update(original)

    def recomputed(
        self, forward: Callable[[], Any], example: torch.Tensor
    ) -> RecomputedDraws | None:
        """The random draws that a backward of such inputs repeats; None if it repeats none.

        Args:
            forward: runs the part's forward eagerly.
        """
        if self.rng is None or not self._recomputes:
            return None
        if example.shape not in self._recomputed:
            with torch.no_grad():
                self._recomputed[example.shape] = RecomputedDraws(forward)
        return self._recomputed[example.shape]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        part = self.part
        if self._pools is None or args or not (part.owner.training and torch.is_grad_enabled()):
            return part.original(*args, **kwargs)
        weights = self._weights
        if weights is not None and weights.are_stale:
            renewed = self._read_at == weights.addresses() and weights.renew()
            if not renewed:
                return self._with_fresh_weights(weights, *args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        hidden = part.hidden_of(kwargs)
        if isinstance(hidden, torch.Tensor) and not hidden.requires_grad:
            if not self.parameters:
                return part.original(**kwargs)
            # All layers before it are frozen, and the parameters are no inputs of the replay:
            # autograd would not run its backward.
            hidden = hidden.detach().requires_grad_()
        graphs = self._graphs(self._pools, hidden, options)
        if graphs is None:
            return part.original(**kwargs)
        return part.answer(_Replay.apply(hidden, graphs, options))  # type: ignore[no-untyped-call]

    def _with_fresh_weights(self, weights: CachedWeights, *args: Any, **kwargs: Any) -> Any:
        """Run the part's own forward, which quantises its weights for this step."""
        with weights.compared() if self._read_at is not None else contextlib.nullcontext():
            output = self.part.original(*args, **kwargs)
        now = weights.addresses()
        if self._read_at is None:
            self._read_at = now
        elif self._read_at != now:
            self._moved = True
            self._say("runs without graphs in this step: its 8-bit weights have moved")
        return output

    def _graphs(self, pools: Pools, hidden: Any, options: Mapping[str, Any]) -> _Graphs | None:
        """Graphs in a free slot; None if this call must run eagerly."""
        if not pools.knows(hidden):
            what = f"microbatches that are not of {pools.lengths} run without graphs"
            self._say(Text(f"{what} ({_BUCKETS} names lengths)", _BUCKETS))
            return None
        signature, rows = _signature(hidden, options), len(hidden)
        known, packed = self._signatures.setdefault(rows, []), _packed(options) is not None
        is_new = signature is not None and signature not in known
        if is_new and len(known) < (_MOST_OF_DOCUMENTS if packed else 1):
            known.append(signature)
        if signature not in known:
            self._say("inputs unlike the first run without graphs")
            return None
        if self._failed or self._moved:
            return None
        key = rows, signature
        slot = pools.take((self, key), rows)
        if slot is None:
            what = "microbatches for which the activation cap has no memory left run without graphs"
            self._say(Text(f"{what} ({_BUCKETS})", _BUCKETS))
            return None
        if (self, key) not in slot.graphs:
            before, fresh = _reserved(hidden), not slot.graphs
            self._capture_in(slot, pools, key, options)
            if self._failed:
                if not fresh:
                    pools.give_back(slot)
                return None
            if fresh:
                pools.add(slot, _reserved(hidden) - before)
        found: _Graphs = slot.graphs[self, key]
        return found

    def _capture_in(self, slot: Slot, pools: Pools, key: Key, options: Mapping[str, Any]) -> None:
        """Add this part's graphs to a slot; if that fails, it runs eagerly from then on."""
        stay = self._weights.staying() if self._weights is not None else contextlib.nullcontext()
        try:
            with stay:
                made = _Graphs(self, slot, pools, key, options)
            slot.graphs[self, key] = made
        except Exception as error:  # whatever it is, this chunk can be run without
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            self._failed = True
            self._say(f"runs without graphs: {one_line(first, 200)}")


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """Take a tensor's gradient away from it."""
    gradient, tensor.grad = tensor.grad, None
    assert gradient is not None
    return gradient


def _reserved(tensor: torch.Tensor) -> int:
    return torch.cuda.memory_reserved() if tensor.is_cuda else 0


def _packed(options: Mapping[str, Any]) -> Any:
    return options.get("packed_seq_params")


def _leaves(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments by name, with the fields of a packed row's parameters in their place."""
    for name, value in options.items():
        if dataclasses.is_dataclass(value):
            yield from ((f"{name}.{field}", inner) for field, inner in vars(value).items())
        else:
            yield name, value


def _blank(value: Any) -> Any:
    """An argument whose tensors are to be filled before a replay."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if not dataclasses.is_dataclass(value):
        return value
    blank = copy.copy(value)
    vars(blank).update((field, _blank(inner)) for field, inner in vars(value).items())
    return blank


def _signature(hidden: Any, options: Mapping[str, Any]) -> Any:
    """The properties that must be equal to replay a graph; None if a value cannot be compared, or
    the row is packed and its documents do not fill it, as those that ``padded.py`` adds to do.
    """
    packed = _packed(options)
    if packed is not None and (packed.max_seqlen_q or 0) < len(hidden):
        return None
    described: list[Any] = []
    for name, value in [("", hidden), *_leaves(options)]:
        if isinstance(value, torch.Tensor):
            described.append((name, value.shape, value.dtype, value.device))
        elif name and isinstance(value, bool | int | float | str | None):
            described.append((name, value))
        else:
            return None
    return tuple(described)
