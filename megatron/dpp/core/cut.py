"""Steps whose microbatches run as several units, in hosts that know nothing of it.

:class:`Cut` names the units of a step. :class:`WholeSteps` lets a host's forward step, which reads
and returns whole microbatches, run once per slice: its iterator gives each batch to every slice,
the model takes the slice's tokens of it, and the last stage returns losses of full length, in which
earlier slices' are constants and later ones' are 0. So the host's masks, sums and counts of tokens
fit, and those of the last slice are the microbatch's. The documents of a packed row must be those
that were announced, since attention takes them from its units.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.dpp.core.model import NOT_OF_TOKENS, gpt_of, rebound, tokens_changed
from megatron.dpp.core.slices import Slices, Unit
from megatron.dpp.errors import ConfigError, setting


@dataclass(frozen=True)
class Cut:
    """The units of one step, in order: each row's slices follow one another, and fill it.

    Args:
        units: of all microbatches, each of which is one row, or several of one length.
        batch: rows of a microbatch.
        longest: tokens of the longest microbatch, in whose activations the memory cap counts.
    """

    units: tuple[Unit, ...]
    batch: int
    longest: int

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        tokens_of: Callable[[int], int],
        *,
        batch: int = 1,
        longest: int = 0,
    ) -> Cut | None:
        """Cut rows into slices; None if all of them stay whole.

        Args:
            rows: tokens of the documents of each microbatch's rows, in order.
            tokens_of: tokens of the slices of a row of so many tokens.
            longest: tokens of the longest microbatch of any step that is known.
        """
        units: list[Unit] = []
        for number, documents in enumerate(rows):
            *starts, total = itertools.accumulate(documents, initial=0)
            bounds = [*range(0, total, tokens_of(total)), total]
            pieces = itertools.pairwise(bounds)
            units += [Unit(number, begin, end, total, tuple(starts)) for begin, end in pieces]
        if len(units) == len(rows):
            return None
        longest = max(longest, *(batch * unit.total for unit in units))
        return cls(tuple(units), batch, longest)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each unit, with padding."""
        return tuple(self.batch * (unit.end - unit.begin) for unit in self.units)

    @functools.cached_property
    def groups(self) -> tuple[int, ...]:
        """Units of each row, whose number is that of the host's microbatches."""
        return tuple(Counter(unit.row for unit in self.units).values())

    def share(self, number: int) -> float:
        """A unit's tokens over those of a mean microbatch."""
        return self.sizes[number] * len(self.groups) / sum(self.sizes)


@contextlib.contextmanager
def weighted_aux_loss(config: Any, share: float) -> Iterator[None]:
    """Let the auxiliary loss of experts weigh ``share`` of a microbatch's in a backward, unless
    megatron-core weighs it by tokens already.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if not config.num_moe_experts or config.calculate_per_token_loss or scale is None:
        yield
        return
    own = scale.clone()
    scale.mul_(share)
    try:
        yield
    finally:
        scale.copy_(own)


class WholeSteps:
    """A host's forward steps of whole microbatches, run slice by slice.

    Args:
        slices: of the same chunks.
        chunks: in chunk order, each a GPT within its wrappers.

    Raises:
        ConfigError: a chunk is no GPT.
    """

    def __init__(self, slices: Slices, chunks: Sequence[torch.nn.Module]) -> None:
        self._slices = slices
        self._losses: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._models = [gpt_of(chunk) for chunk in chunks]
        if None in self._models:
            _refuse(f"{type(chunks[self._models.index(None)]).__name__} holds no GPTModel")

    def iterators(self, given: Sequence[Any]) -> list[Any]:
        """Iterators that give each microbatch to all of its slices."""
        return [None if each is None else _Repeated(each, self._slices) for each in given]

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """Let the models take their slices in the block."""
        self._losses.clear()  # a step may have failed
        return rebound((m, self._forward_of(number, m)) for number, m in enumerate(self._models))

    def _forward_of(self, number: int, model: Any) -> Callable[..., Any]:
        own = model.forward
        form = inspect.signature(own)
        names = tuple(form.parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            unit = self._slices.unit
            if unit is None:
                return own(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs  # faster than to bind them
            if len(given) < len(args) + len(kwargs):
                form.bind(*args, **kwargs)  # says which argument is one too many
            for name in NOT_OF_TOKENS:
                if given.get(name) is not None:
                    _refuse(f"the forward step passes {name} to the model")
            if not unit.begin:
                _check_documents(unit, given.get("packed_seq_params"))
            given = tokens_changed(given, functools.partial(_part, unit))
            given["packed_seq_params"] = None  # attention takes the documents from the unit
            given["attention_mask"] = None  # a slice's attention is causal
            if model.post_process and given.get("labels") is None:
                _refuse("the forward step takes logits, not losses, from the model")
            output = own(**given)
            return self._of_full_length(number, unit, output) if model.post_process else output

        return forward

    def _of_full_length(self, chunk: int, unit: Unit, losses: torch.Tensor) -> torch.Tensor:
        """The microbatch's losses [b, s] as far as they are known, of which this slice's are no
        constants.
        """
        earlier = self._losses.setdefault((chunk, unit.row), [])
        later = losses.new_zeros(len(losses), unit.total - unit.end)
        full = torch.cat([*earlier, losses, later], dim=1)
        earlier.append(losses.detach())
        if unit.is_last:
            del self._losses[chunk, unit.row]
        return full


def _part(unit: Unit, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A slice's tokens of a microbatch's [b, s]."""
    if tensor.dim() != 2 or tensor.shape[1] != unit.total:
        _refuse(f"{name} has the shape {list(tensor.shape)}, not {unit.total} tokens a sequence")
    return tensor[:, unit.begin : unit.end].contiguous()


def sequences_between(ends: Iterable[int], total: int) -> list[int]:
    """Tokens of the sequences of a row, of which padding behind the last one is another.

    Args:
        ends: of the sequences, some perhaps repeated, or negative where a host fills a tensor up.
        total: tokens of the row.
    """
    inside = sorted({0, total, *(end for end in ends if end >= 0)})
    return [end - start for start, end in itertools.pairwise(inside)]


def _check_documents(unit: Unit, params: Any) -> None:
    """Refuse a row whose documents, with their padding, are not those of its units."""
    told = [end - start for start, end in itertools.pairwise((*unit.starts, unit.total))]
    padded = getattr(params, "cu_seqlens_q_padded", None)
    ends = getattr(params, "cu_seqlens_q", None) if padded is None else padded
    if ends is None:
        documents, passed = [unit.total], "none in packed_seq_params"
    else:
        documents = sequences_between(ends.flatten().tolist(), unit.total)
        passed = f"cu_seqlens of sequences of {documents} tokens"
    if documents != told:
        off = setting("slice_tokens", 0)
        raise ConfigError(
            f"microbatch {unit.row} counts as sequences of {told} tokens, and the forward step "
            f"passes {passed}: announce the sequences of packed rows before the step "
            f"(plugin.announce(rows=...)), or use {off}",
            off,
        )


def _refuse(what: str) -> NoReturn:
    off = setting("slice_tokens", 0)
    raise ConfigError(f"{what}: it cannot run in slices; use {off}", off)


class _Repeated:
    """An iterator whose items of one microbatch all of its slices get."""

    def __init__(self, own: Any, slices: Slices) -> None:
        self._own, self._slices = own, slices
        self._unit: Unit | None = None
        self._items: list[Any] = []
        self._taken = 0

    def __iter__(self) -> _Repeated:
        return self

    def __next__(self) -> Any:
        unit = self._slices.unit
        if unit is None:
            return next(self._own)
        if unit != self._unit:
            self._unit, self._taken = unit, 0
            if not unit.begin:
                self._items = []
        if self._taken == len(self._items):
            self._items.append(next(self._own))
        self._taken += 1
        item = self._items[self._taken - 1]
        return dict(item) if type(item) is dict else item  # hosts may take entries out
