"""The arguments of one call of a schedule, and what only megatron-core's own schedule can run.

``StepCall`` holds the validated keyword arguments of megatron-core's ``forward_backward_func``,
which all schedules take.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.dpp.config import DppConfig
from megatron.dpp.core import boundary, compat, padded
from megatron.dpp.core.boundary import Boundaries, TokenCounter
from megatron.dpp.core.cut import Cut
from megatron.dpp.core.model import balancing_of, unusual
from megatron.dpp.errors import ConfigError, Text, setting

_USUAL: dict[str, object] = {
    **dict.fromkeys(("overlap_moe_expert_parallel_comm", "moe_paged_stash"), False),
    **dict.fromkeys(("hybrid_context_parallel", "dynamic_context_parallel"), False),
    **dict.fromkeys(("defer_embedding_wgrad_compute", "delay_wgrad_compute"), False),
    "overlap_dispatch_backward_with_experts_wgrad": False,
    **dict.fromkeys(("max_seqlen_per_dp_cp_rank", "moe_expert_rank_capacity_factor"), None),
    **dict.fromkeys(("gtp_weight_remat_size", "expert_gtp_weight_remat_size"), 1),
    "cuda_graph_impl": "none",
}
"""Settings of megatron-core, some of newer versions, with the value that leaves a schedule the
order of its tasks, and what it reduces.
"""


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """The arguments of one ``forward_backward_func`` call, under megatron-core's names."""

    forward_step_func: Callable[..., Any]
    data_iterator: list[Any]
    model: list[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    pg_collection: Any = None
    force_all_reduce: bool = False
    cut: Cut | None = None
    """Its units, which ``num_microbatches`` then counts."""

    @classmethod
    def checked(
        cls, *, data_iterator: Any, model: Any, p2p_communicator: Any = None,
        pg_collection: Any = None, **rest: Any,
    ) -> StepCall:  # fmt: skip
        """Bring single chunks into list form and fill in the process groups.

        Raises:
            ConfigError: arguments that do not fit together.
        """
        chunks, iterators = list(compat.listed(model)), list(compat.listed(data_iterator))
        if len(iterators) == 1 and len(chunks) > 1:
            raise ConfigError(
                f"data_iterator: {len(chunks)} model chunks need a list of as many iterators, got 1"
            )
        if rest.get("num_microbatches", 1) < 1:
            raise ConfigError(
                f"num_microbatches is {rest['num_microbatches']}: at least 1 is needed"
            )
        known = {field.name for field in dataclasses.fields(cls)} - {"cut"}
        unknown = sorted(rest.keys() - known)
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: megatron-core {compat.VERSION} passes this to its "
                "schedule; the dynamic pipeline does not support it"
            )
        groups = pg_collection or compat.default_groups()
        return cls(data_iterator=iterators, model=chunks, pg_collection=groups, **rest)

    @property
    def config(self) -> Any:
        """megatron-core's config of the model."""
        return get_model_config(self.model[0])

    @property
    def length(self) -> int:
        """The sequence length between stages. It may be nominal: 1 where stages exchange shapes."""
        return self.decoder_seq_length or self.seq_length

    @property
    def varies(self) -> bool:
        """True if microbatches may have unlike lengths."""
        return bool(getattr(self.config, "variable_seq_lengths", False))

    @property
    def num_whole(self) -> int:
        """The host's microbatches, whose losses are divided by their number."""
        return self.num_microbatches if self.cut is None else len(self.cut.groups)

    def longest(self, max_tokens: int) -> int:
        """The greatest sequence length that is known: of this call, of the host's settings, or that
        of a microbatch of ``max_tokens``.
        """
        if self.cut is not None:
            return self.length
        by_tokens = -(-max_tokens // self.micro_batch_size)
        return max(self.length, compat.longest_length(self.config), by_tokens)

    @property
    def has_global_aux_loss(self) -> bool:
        """True if the routers balance their load over all replicas."""
        return "global_aux_loss" in balancing_of(self.config)

    def refuse_ordered(self) -> None:
        """Refuse settings whose bookkeeping needs megatron-core's own order.

        Raises:
            ConfigError: names the setting.
        """
        refused = unusual(self.config, _USUAL)
        # A recomputed microbatch counts in its backward, another one in its forward.
        partial = "num_microbatches_with_partial_activation_checkpoints"
        if self.has_global_aux_loss and getattr(self.config, partial, None) is not None:
            refused.append(
                "moe_router_load_balancing_type='global_aux_loss' with partial checkpoints"
            )
        if refused:
            raise ConfigError(
                f"{refused[0]} needs megatron-core's own order of tasks, which the dynamic "
                "pipeline does not keep; leave it out or train without the dynamic pipeline"
            )

    def check_length(self, longest: int) -> None:
        """Refuse a nominal sequence length where no other is known.

        Raises:
            ConfigError: names the settings that tell.
        """
        if self.varies and longest <= 1:
            max_tokens = setting("max_tokens")
            raise ConfigError(
                f"variable_seq_lengths with seq_length {self.seq_length}: slots and the memory "
                f"cap need the longest length; give {max_tokens}, or pass it as seq_length",
                max_tokens,
            )

    def boundaries(self, length: int) -> Boundaries:
        """The boundaries between this rank's stages and their neighbours, for tensors of a sequence
        length.

        Raises:
            ConfigError: ``adjust_tensor_shapes_fn`` returns no shapes, or several tensors meet a
            model whose losses megatron-core scales by the one tensor of a stage.
        """
        shape, dtype = self._boundary(length)
        sizes = boundary.boundaries(tuple(shape), dtype.itemsize, self.adjust_tensor_shapes_fn)
        for name in ("num_moe_experts", "mtp_num_layers"):
            value = getattr(self.config, name, None)
            if sizes.several and value is not None:
                raise ConfigError(
                    f"adjust_tensor_shapes_fn: {name}={value!r} needs stages that exchange one "
                    f"tensor, not {max(len(sizes.receives), len(sizes.sends))}: megatron-core "
                    "finds the device of its loss's scale there"
                )
        return sizes

    def tokens(self, longest: int, max_tokens: int = 0) -> TokenCounter:
        """Counts the tokens of this call's microbatches, of which those of unlike length have at
        most ``longest`` per sequence; ``max_tokens`` as in :meth:`longest`.
        """
        length = longest if self.varies else self.length
        shape, _ = self._boundary(length)
        hidden = 0 if self.adjust_tensor_shapes_fn else shape[-1]
        if self.varies and max_tokens and -(-max_tokens // self.micro_batch_size) >= longest:
            bound: str = Text(given := setting("max_tokens", max_tokens), given)
        else:
            bound = f"seq_length={length} times micro_batch_size={self.micro_batch_size}"
        return TokenCounter(max(1, shape[0] * shape[1]), hidden, self._parts, bound)

    def captured_rows(self, settings: DppConfig) -> list[int]:
        """Rows of this rank's part of each length that ``length_buckets`` names for this call, up
        to the longest that is known: later calls may be longer.
        """
        longest, text = self.longest(settings.max_tokens), settings.length_buckets
        repeats = torch.are_deterministic_algorithms_enabled()
        if text == "auto" and self.varies and not repeats and self.why_not_padded() is None:
            text = "geometric"
        chosen = dataclasses.replace(settings, length_buckets=text)
        found = chosen.buckets(longest if text == "geometric" else sys.maxsize, self._parts)
        return [length // self._parts for length in found if length <= longest]

    def why_not_padded(self) -> str | None:
        """The reason why rows are not padded at the model's door; None if they can be."""
        return padded.why_not_padded(self.model, self.config, self.pg_collection.cp.size())

    def padded_rows(self, settings: DppConfig) -> padded.PaddedRows | None:
        """Pads this call's rows to :meth:`captured_rows` of all ranks, and packed ones of one
        length to few numbers of documents; None where they stay as they are."""
        lengths = [rows * self._parts for rows in self.captured_rows(settings)]
        if (self.varies and not lengths) or self.why_not_padded() is not None:
            return None
        return padded.PaddedRows(self.model, lengths, self._parts)

    def boundary_example(self, settings: DppConfig | None = None) -> torch.Tensor:
        """An uninitialised tensor like those between stages, on the device of the model. With
        ``settings`` it is as long as the longest where lengths may be unlike.
        """
        length = self.length
        if settings is not None and (self.varies or settings.length_buckets not in ("off", "auto")):
            length = self.longest(settings.max_tokens)
        shape, dtype = self._boundary(length)
        return torch.empty(shape, dtype=dtype, device=device())

    @property
    def _parts(self) -> int:
        """Ranks among which a sequence is divided between stages."""
        groups = self.pg_collection
        tensor = groups.tp.size() if self.config.sequence_parallel else 1
        return int(groups.cp.size() * tensor)

    def _boundary(self, length: int) -> tuple[torch.Size, torch.dtype]:
        """megatron-core's shape for a length, usually [s / (cp * tp if sequence parallel), b, h],
        in the pipeline's dtype.
        """
        config, groups = self.config, self.pg_collection
        dtype = torch.float32 if config.fp32_residual_connection else config.pipeline_dtype
        fixed = copy.copy(config)
        fixed.variable_seq_lengths = False  # else it has no shape to tell
        (shape,) = schedules.get_tensor_shapes(
            seq_length=length, micro_batch_size=self.micro_batch_size, decoder_seq_length=None,
            config=fixed, tp_group=groups.tp, cp_group=groups.cp,
        )  # fmt: skip
        return torch.Size(shape), dtype or config.params_dtype


def can_run(call: StepCall, keywords: Mapping[str, Any]) -> bool:
    """True if megatron-core's own schedule can run a call of these keywords. It takes process
    groups only with a communicator of the host's, and one tensor per stage boundary.
    """
    given = [keywords.get(name) is not None for name in ("pg_collection", "p2p_communicator")]
    config, num_ranks, chunks = call.config, call.pg_collection.pp.size(), len(call.model)
    if given[0] != given[1] or call.cut is not None or call.adjust_tensor_shapes_fn:
        return False
    if config.virtual_pipeline_model_parallel_size != (chunks if chunks > 1 else None):
        return False  # megatron-core would take the schedule of another number of chunks
    if config.delay_wgrad_compute:
        return False
    grouped = config.microbatch_group_size_per_vp_stage in (None, num_ranks)
    apart = config.overlap_p2p_comm and not config.batch_p2p_comm  # else two ranks mix messages up
    return chunks == 1 or (grouped and apart and call.num_microbatches % num_ranks == 0)


def counted(call: StepCall, add: Callable[[int], None]) -> StepCall:
    """The call with a forward step that tells the tokens for which the last stage has losses or
    logits.
    """
    original, last, group = call.forward_step_func, call.model[-1], call.pg_collection.pp
    if group.rank() < group.size() - 1:
        return call

    def forward_step(iterator: Any, model: Any, *rest: Any, **options: Any) -> Any:
        result = original(iterator, model, *rest, **options)
        if model is last and isinstance(result[0], torch.Tensor):
            add(math.prod(result[0].shape[:2]))
        return result

    return dataclasses.replace(call, forward_step_func=forward_step)


def device() -> torch.device:
    """The device of a stage's tensors."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
