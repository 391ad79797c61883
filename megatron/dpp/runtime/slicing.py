"""Slicing: the cut of a schedule's calls into slices, and the model's attention across them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from megatron.dpp.config import DppConfig
from megatron.dpp.core import compat
from megatron.dpp.core.call import StepCall
from megatron.dpp.core.cut import Cut, WholeSteps
from megatron.dpp.core.slices import Slices, why_not_sliced
from megatron.dpp.errors import ConfigError, Text, setting
from megatron.dpp.schedule import Kind
from megatron.dpp.schedule.caps import WHOLE_UP_TO, slice_size

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
        self._rows: Sequence[Sequence[int]] = ()
        self._packs = False
        self._model: Sequence[torch.nn.Module] = ()
        self._ready: tuple[Slices, WholeSteps] | None = None
        """The model's attention, and its forwards."""

    def announce(self, rows: Sequence[Sequence[int]]) -> None:
        """Tell the documents of the next call's packed rows; nothing of rows of one length."""
        self._rows = rows
        self._packs = self._packs or bool(rows)

    def cut(self, call: StepCall, *, take: bool) -> StepCall:
        """The call with its slices as microbatches; the call itself if nothing of it is cut.

        Args:
            take: the announced rows are this call's; otherwise they are looked at only.

        Raises:
            ConfigError: the model, or the call, cannot be cut.
        """
        rows = self._rows
        if take:
            self._rows = ()
            if rows and len(rows) != call.num_microbatches:
                raise ConfigError(
                    f"announce: {len(rows)} rows for a step of {call.num_microbatches} microbatches"
                )
        if not self._config.slice_tokens or call.collect_non_loss_data:
            return call
        cut = self._packed(call, rows) if rows else self._fixed(call)
        if cut is None:
            return call
        whole = self._prepared(call)
        longest = max(unit.end - unit.begin for unit in cut.units)
        if call.varies:  # room for those of later steps
            longest = max(longest, int(WHOLE_UP_TO * self._config.slice_tokens))
        return dataclasses.replace(
            call,
            cut=cut,
            num_microbatches=len(cut.units),
            seq_length=longest,
            micro_batch_size=cut.batch,
            decoder_seq_length=None,
            data_iterator=whole.iterators(call.data_iterator),
        )

    def _packed(self, call: StepCall, rows: Sequence[Sequence[int]]) -> Cut | None:
        """The slices of packed rows; None if none is long enough."""
        groups, config = call.pg_collection, call.config
        experts = getattr(config, "num_moe_experts", None)
        if experts and config.expert_model_parallel_size > 1 and groups.dp_cp.size() > 1:
            self._refuse(
                "replicas whose experts are divided among them run one order, and their packed "
                "rows would have other slices"
            )
        known = call.micro_batch_size * call.longest(self._config.max_tokens)
        return Cut.of(rows, self._slices_of_rows(call), longest=known)

    def _fixed(self, call: StepCall) -> Cut | None:
        """The slices of microbatches that all have the call's length."""
        if self._packs:
            self._tell("steps whose rows are not announced, as others were, are not cut")
            return None
        if call.varies:
            self._refuse(
                "microbatches of one length are cut, and variable_seq_lengths tells of others: "
                "announce their sequences before the step (plugin.announce(rows=...))"
            )
        if compat.host_argument("reset_attention_mask"):
            self._refuse(
                "attention across slices is causal, and the host's reset_attention_mask asks for "
                "masks of documents"
            )
        rows = [[call.length]] * call.num_microbatches
        cut = Cut.of(rows, self._slices_of_rows(call), batch=call.micro_batch_size)
        if cut is None:
            self._tell(
                f"sequences of {call.length} tokens are not cut, as those up to 1.5 slices stay "
                "whole"
            )
        return cut

    def _slices_of_rows(self, call: StepCall) -> Callable[[int], int]:
        """The tokens of the slices of a row of so many tokens."""
        multiple = call.pg_collection.tp.size() if call.config.sequence_parallel else 1
        return lambda row: slice_size(row, self._config.slice_tokens, multiple)

    def _refuse(self, why: str) -> NoReturn:
        given = setting("slice_tokens", self._config.slice_tokens)
        raise ConfigError(f"{given}: {why}; 0 cuts none", given)

    def _tell(self, what: str) -> None:
        given = setting("slice_tokens", self._config.slice_tokens)
        self._say(Text(f"dynamic pipeline: {given}: {what}", given))

    def _prepared(self, call: StepCall) -> WholeSteps:
        """The model's forwards."""
        if reason := why_not_sliced(call.config):
            self._refuse(reason)
        if self._config.cuda_graphs == "on":
            on = setting("cuda_graphs", "on")
            raise ConfigError(f"{on} does not go with slices, whose keys grow: use off", on)
        if call.adjust_tensor_shapes_fn is not None:
            raise ConfigError("slices: adjust_tensor_shapes_fn is not known to fit a slice")
        if self._ready is None or self._model != call.model:
            self._model, slices = list(call.model), Slices(call.model)
            self._ready = slices, WholeSteps(slices, call.model)
        return self._ready[1]

    def slices_of(self, call: StepCall) -> Slices | None:
        """The attention of a call's model; None if it is not cut."""
        return self._ready[0] if self._ready is not None and call.cut is not None else None

    @contextlib.contextmanager
    def bound(self, call: StepCall) -> Iterator[None]:
        """Let the model attend across slices in one call."""
        with contextlib.ExitStack() as around:
            parts = self._ready if call.cut is not None else None
            for part in parts or ():
                around.enter_context(part.bound())
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
        if call.cut is None:
            return {}
        keys, pair = [unit.earlier_keys for unit in call.cut.units], 2 * _pair_share(call.config)
        pairs = {Kind.F.name: pair, Kind.B.name: 2.5 * pair}
        return {kind: [1.0 + each * share for each in keys] for kind, share in pairs.items()}

    def forget(self) -> None:
        """Let go of the model."""
        self._model, self._ready = (), None


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
