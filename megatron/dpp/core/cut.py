"""Steps whose microbatches run as several units, and hosts that know nothing of it.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.dpp.core.slices import Slices, Unit, units_of
from megatron.dpp.errors import ConfigError, setting

_OF_TOKENS = ("input_ids", "position_ids", "labels", "loss_mask")
"""Arguments of a GPT's forward of shape [b, s]."""
_ABSENT = ("decoder_input", "inference_context", "padding_mask")
"""Arguments that a slice cannot take its part of."""


@dataclass(frozen=True)
class Cut:
    """The units of one step, in order.

    Args:
        units: each row's slices follow one another, and fill it.
        sizes: tokens of each unit, with padding.
        num_microbatches: microbatches of the host, by which losses are divided.
        longest: tokens of the longest row, in whose activations the memory cap counts.
        whole: a unit's report and count of tokens are those of the microbatch so far, so that of
            each row the last ones count.

    Raises:
        ConfigError: the slices of a row do not follow one another, or there is not a size of each.
    """

    units: tuple[Unit, ...]
    sizes: tuple[int, ...]
    num_microbatches: int
    longest: int
    whole: bool = False

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.units):
            raise ConfigError(f"announce: {len(self.sizes)} sizes for {len(self.units)} units")
        for number, row in itertools.groupby(self.units, key=lambda unit: unit.row):
            found = list(row)
            ends = [0, *(unit.end for unit in found)]
            if [unit.begin for unit in found] != ends[:-1] or ends[-1] != found[0].total:
                raise ConfigError(
                    f"announce: the slices of row {number} begin at "
                    f"{[unit.begin for unit in found]} and end at {ends[1:]}; they must follow "
                    f"each other and fill its {found[0].total} tokens"
                )

    @property
    def is_cut(self) -> bool:
        """True if any row has several slices."""
        return any(unit.is_cut for unit in self.units)

    @functools.cached_property
    def _tokens(self) -> int:
        return sum(self.sizes)

    @property
    def groups(self) -> tuple[int, ...]:
        """Units of each row."""
        rows = itertools.groupby(unit.row for unit in self.units)
        return tuple(len(list(units)) for _, units in rows)

    def share(self, number: int) -> float:
        """A unit's tokens over those of a mean microbatch."""
        return self.sizes[number] * self.num_microbatches / self._tokens


def fixed_cut(length: int, num_microbatches: int, micro_batch_size: int, tokens: int) -> Cut:
    """Microbatches of one length, each cut into slices of ``tokens``."""
    units = tuple(units_of([length] * num_microbatches, tokens))
    sizes = tuple(micro_batch_size * (unit.end - unit.begin) for unit in units)
    return Cut(units, sizes, num_microbatches, micro_batch_size * length, whole=True)


def packed_cut(
    rows: Sequence[Sequence[int]],
    tokens_of: Callable[[int], int | None],
    num_microbatches: int,
    longest: int,
) -> Cut:
    """Microbatches of packed rows, of which the long ones are cut.

    Args:
        rows: tokens of the documents of each row, in order.
        tokens_of: tokens of the slices of a row of so many tokens; None leaves it whole.
        longest: tokens of the longest row of any step that is known.
    """
    units: list[Unit] = []
    for number, documents in enumerate(rows):
        *starts, total = itertools.accumulate(documents, initial=0)
        each = tokens_of(total) or total
        bounds = [*range(0, total, each), total]
        pieces = itertools.pairwise(bounds)
        units += [Unit(number, begin, end, total, tuple(starts)) for begin, end in pieces]
    sizes = tuple(unit.end - unit.begin for unit in units)
    longest = max(longest, *(unit.total for unit in units))
    return Cut(tuple(units), sizes, num_microbatches, longest, whole=True)


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
        self._models = [_gpt(chunk) for chunk in chunks]

    def iterators(self, given: Sequence[Any]) -> list[Any]:
        """Iterators that give each microbatch to all of its slices."""
        return [None if each is None else _Repeated(each, self._slices) for each in given]

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Let the models take their slices in the block."""
        with contextlib.ExitStack() as around:
            for number, model in enumerate(self._models):
                around.callback(vars(model).pop, "forward", None)
                model.forward = self._forward_of(number, model)
            yield
        self._losses.clear()

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
            for name in _ABSENT:
                if given.get(name) is not None:
                    _refuse(f"the forward step passes {name} to the model")
            if not unit.begin:
                _check_documents(unit, given.get("packed_seq_params"))
            given["packed_seq_params"] = None  # attention takes the documents from the unit
            for name in _OF_TOKENS:
                if given.get(name) is not None:
                    given[name] = _part(given[name], unit, name)
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


def _gpt(chunk: torch.nn.Module) -> Any:
    module: Any = chunk
    while module is not None and not isinstance(module, GPTModel):
        module = getattr(module, "module", None)
    if module is None:
        _refuse(f"{type(chunk).__name__} holds no GPTModel")
    return module


def _part(tensor: torch.Tensor, unit: Unit, name: str) -> torch.Tensor:
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
    """Refuse a row whose documents are not those of its units."""
    told = [end - start for start, end in itertools.pairwise((*unit.starts, unit.total))]
    ends = None if params is None else _ends_of(params)
    if ends is None:
        found, passed = [unit.total], "passes none in packed_seq_params"
    else:
        found = sequences_between(ends, unit.total)
        passed = f"passes cu_seqlens of sequences of {found} tokens"
    if found != told:
        off = setting("slice_tokens", 0)
        raise ConfigError(
            f"microbatch {unit.row} counts as sequences of {told} tokens, and the forward step "
            f"{passed}: announce the sequences of packed rows before the step "
            f"(plugin.announce(rows=...)), or use {off}",
            off,
        )


def _ends_of(params: Any) -> list[int] | None:
    """The ends of a packed row's documents with their padding, some of them perhaps repeated."""
    padded = getattr(params, "cu_seqlens_q_padded", None)
    ends = params.cu_seqlens_q if padded is None else padded
    return None if ends is None else [int(end) for end in ends.flatten().tolist()]


def _refuse(what: str) -> None:
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
