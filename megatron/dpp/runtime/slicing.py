"""Slicing: the cut of a schedule's calls into slices, and the model's attention across them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.core.cut import Cut, WholeSteps, fixed_cut, packed_cut
from megatron.dpp.core.slices import Slices, Unit, why_not
from megatron.dpp.core.steps import StepCall
from megatron.dpp.errors import ConfigError, Text, setting
from megatron.dpp.schedule import Kind
from megatron.dpp.schedule.slice_sizes import WHOLE_UP_TO, slice_size

_KAPPA = 0.35
"""Memory of keys, values and their gradients over that of activations, until it is measured: that
of a layer of hidden size 4096 whose heads all have keys of their own.
"""


class Slicing:
    """The slices of a schedule's calls; prepared anew for another model.

    Args:
        config: ``slice_tokens``, for calls whose microbatches have one length, or are packed rows
            that were announced.
        say: called with a line of something that holds for each step.
    """

    def __init__(self, config: DppConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._next: Cut | None = None
        self._rows: Sequence[Sequence[int]] = ()
        self._packs = False
        self._model: Sequence[torch.nn.Module] = ()
        self._slices: Slices | None = None
        self._whole: WholeSteps | None = None
        self.tokens = 0
        """Most tokens of a slice in the last training call; 0 where no sequence was cut."""

    def announce(
        self,
        units: Sequence[Unit],
        sizes: Sequence[int],
        longest_row: int,
        rows: Sequence[Sequence[int]],
    ) -> None:
        """Tell the units of the next call, whose forward steps run once per unit, or the documents
        of its packed rows, which ``slice_tokens`` cuts.

        Raises:
            ConfigError: they do not fit together.
        """
        self._next, self._rows = None, rows
        self._packs = self._packs or bool(rows)
        if units:
            longest = max(longest_row, *(unit.total for unit in units))
            count = sum(unit.is_last for unit in units)
            self._next = Cut(tuple(units), tuple(sizes), count, longest)

    def cut(self, call: StepCall, *, take: bool) -> StepCall:
        """The call with its units as microbatches; the call itself if none of them is cut.

        Args:
            take: the announced units are this call's; otherwise they are looked at only.

        Raises:
            ConfigError: the model, or the call, cannot be cut.
        """
        cut, told, rows = self._next, self._next is not None, self._rows
        if take:
            self._next, self._rows = None, ()
            if rows and len(rows) != call.num_microbatches:
                raise ConfigError(
                    f"announce: {len(rows)} rows for a step of {call.num_microbatches} microbatches"
                )
        if cut is None:
            cut = self._packed(call, rows) if rows else self._fixed(call)
        if take and not call.forward_only:
            units = [unit for unit in cut.units if unit.is_cut] if cut is not None else []
            self.tokens = max((unit.end - unit.begin for unit in units), default=0)
        if cut is None:
            return call
        if len(cut.units) != call.num_microbatches and told:
            raise ConfigError(
                f"announce: {len(cut.units)} units for a step of {call.num_microbatches} "
                "microbatches: forward steps run once per unit, so num_microbatches counts them"
            )
        if not cut.is_cut:
            return dataclasses.replace(call, cut=cut)
        self._prepare(call)
        if told:
            return dataclasses.replace(call, cut=cut)
        assert self._whole is not None
        longest = max(unit.end - unit.begin for unit in cut.units)
        if getattr(call.config, "variable_seq_lengths", False):  # room for those of later steps
            longest = max(longest, self._most_tokens)
        return dataclasses.replace(
            call,
            cut=cut,
            num_microbatches=len(cut.units),
            seq_length=longest,
            micro_batch_size=1 if rows else call.micro_batch_size,
            decoder_seq_length=None,
            data_iterator=self._whole.iterators(call.data_iterator),
        )

    @property
    def _most_tokens(self) -> int:
        """Most tokens of a unit, as rows of up to 1.5 slices stay whole."""
        return int(WHOLE_UP_TO * self._config.slice_tokens)

    def _packed(self, call: StepCall, rows: Sequence[Sequence[int]]) -> Cut | None:
        """The slices of packed rows; None if none is long enough."""
        asked, groups, config = self._config.slice_tokens, call.pg_collection, call.config
        if not asked or call.collect_non_loss_data:
            return None
        experts = getattr(config, "num_moe_experts", None)
        if experts and config.expert_model_parallel_size > 1 and groups.dp_cp.size() > 1:
            self._refuse(
                "replicas whose experts are divided among them run one order, and their packed "
                "rows would have other slices"
            )
        multiple = groups.tp.size() if config.sequence_parallel else 1
        known = call.micro_batch_size * call.longest(self._config.max_tokens)
        longest = max([known, *map(sum, rows)])
        cut = packed_cut(
            rows, lambda row: slice_size(row, asked, multiple), call.num_microbatches, longest
        )
        return cut if cut.is_cut else None

    def _fixed(self, call: StepCall) -> Cut | None:
        """The slices of microbatches that all have the call's length."""
        asked = self._config.slice_tokens
        if not asked or call.collect_non_loss_data:
            return None
        if self._packs:
            self._tell("steps whose rows are not announced, as others were, are not cut")
            return None
        if getattr(call.config, "variable_seq_lengths", False):
            self._refuse(
                "microbatches of one length are cut, and variable_seq_lengths tells of others: "
                "announce their sequences before the step (plugin.announce(rows=...))"
            )
        if compat.host_masks_documents():
            self._refuse(
                "attention across slices is causal, and the host's reset_attention_mask asks for "
                "masks of documents"
            )
        groups, length, size = call.pg_collection, call.length, call.micro_batch_size
        each = slice_size(length, asked, groups.tp.size() if call.config.sequence_parallel else 1)
        if each == length:
            self._tell(
                f"sequences of {length} tokens are not cut, as those up to 1.5 slices stay whole"
            )
            return None
        return fixed_cut(length, call.num_microbatches, size, each)

    def _refuse(self, why: str) -> NoReturn:
        given = setting("slice_tokens", self._config.slice_tokens)
        raise ConfigError(f"{given}: {why}; 0 cuts none", given)

    def _tell(self, what: str) -> None:
        given = setting("slice_tokens", self._config.slice_tokens)
        self._say(Text(f"dynamic pipeline: {given}: {what}", given))

    def _prepare(self, call: StepCall) -> None:
        """Find the model's attention and forwards."""
        if reason := why_not(call.config):
            self._refuse(reason)
        if self._config.cuda_graphs == "on":
            on = setting("cuda_graphs", "on")
            raise ConfigError(f"{on} does not go with slices, whose keys grow: use off", on)
        if call.adjust_tensor_shapes_fn is not None:
            raise ConfigError("slices: adjust_tensor_shapes_fn is not known to fit a slice")
        if self._slices is None or self._model != call.model:
            self._model = list(call.model)
            self._slices = Slices(call.model)
            cuts = self._config.slice_tokens > 0
            self._whole = WholeSteps(self._slices, call.model) if cuts else None

    def slices_of(self, call: StepCall) -> Slices | None:
        """The attention of a call's model; None if it is not cut."""
        cut = call.cut
        return self._slices if cut is not None and cut.is_cut else None

    @contextlib.contextmanager
    def bound(self, call: StepCall) -> Iterator[None]:
        """Let the model attend across slices in one call."""
        slices = self.slices_of(call)
        with contextlib.ExitStack() as around:
            if slices is not None:
                around.enter_context(slices.bound())
                if self._whole is not None and call.cut is not None and call.cut.whole:
                    around.enter_context(self._whole.bound())
            yield

    def kappa(self, call: StepCall, activation_bytes: float) -> float:
        """Memory of a row's keys, values and their gradients over that of its activations.

        Args:
            activation_bytes: measured, of the longest row in one chunk; 0 before that.
        """
        slices = self.slices_of(call)
        if slices is None or call.cut is None:
            return 0.0
        if not activation_bytes:
            return _KAPPA
        return slices.keys_per_token * call.cut.longest / activation_bytes

    def longer(self, call: StepCall) -> dict[str, list[float]]:
        """By how much each unit's F and B take longer than those of a row of as many tokens: by the
        attention to keys of earlier slices. Empty where no row is cut.
        """
        if self.slices_of(call) is None or call.cut is None:
            return {}
        keys, pair = [unit.earlier_keys for unit in call.cut.units], 2 * _pair_share(call.config)
        pairs = {Kind.F.name: pair, Kind.B.name: 2.5 * pair}
        return {kind: [1.0 + each * share for each in keys] for kind, share in pairs.items()}

    def forget(self) -> None:
        """Let go of the model."""
        self._model, self._slices, self._whole = (), None, None


def _pair_share(config: Any) -> float:
    """Time of a pair of a query and a key in a layer's forward over that of a token without
    attention, by their products."""
    width, gated = config.ffn_hidden_size, 3 if config.gated_linear_unit else 2
    if config.num_moe_experts:
        width = config.moe_router_topk * (config.moe_ffn_hidden_size or width)
        width += config.moe_shared_expert_intermediate_size or 0
    queries = config.num_attention_heads * config.kv_channels
    keys = (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    weights = config.hidden_size * (2 * queries + 2 * keys + gated * width)
    return float(queries / weights)
