"""megatron-core's model in one process, with the local layers and a cache of keys and values.

Any checkpoint that training loads into one process, of whatever layout, and any Hugging Face folder
of a known family. megatron-core's own inference engines want CUDA kernels of further packages, and
their samples depend on the batch; this needs neither.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer
from megatron.dpp_train.checkpoint.files import Found
from megatron.dpp_train.checkpoint.saved_args import saved_args, take_checkpoint_args
from megatron.dpp_train.cost.from_flags import shape_of
from megatron.dpp_train.cost.memory import model_parameters
from megatron.dpp_train.generate.cached import Cache, step_params, use_cache
from megatron.dpp_train.generate.engine import (
    LOSS_ROWS,
    Tokens,
    check_room,
    default_dtype,
    token_losses,
)
from megatron.dpp_train.hf import read_config
from megatron.dpp_train.initialize import initialize
from megatron.dpp_train.model.build import Trainee, bare_chunks
from megatron.dpp_train.model.configs import check_with_core, settled, transformer_config
from megatron.dpp_train.model.packed import packed_params
from megatron.dpp_train.model.tasks import TASKS
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.run_config import RunConfig, Settings
from megatron.dpp_train.options.validate import validate

_FLAGS = (
    "--transformer-impl local --micro-batch-size 1 --mock-data --skip-train --finetune "
    "--train-iters 1 --eval-iters 0 --no-initialization --tokenizer-type NullTokenizer "
    "--no-rope-fusion"
)
_SWITCHES = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}
_NODE = ("MASTER_ADDR", "MASTER_PORT")


def settings(
    model: Found | Path, device: str, dtype: str, family_file: Path | None = None
) -> RunConfig:
    """The settings of one process that loads a model and does not train it.

    Args:
        model: a checkpoint, or a Hugging Face folder.
        family_file: a Python file with a further family.

    Raises:
        ConfigError: a model that these layers do not compute.
        DataError: the checkpoint is damaged, or holds no arguments.
    """
    if isinstance(model, Found):
        words = ["--load", str(model.path.parent), "--use-checkpoint-args"]
    else:
        words = ["--load-hf", str(model), *read_config(model, family_file).words()]
    if family_file:
        words += ["--family-file", str(family_file)]
    parsed = parse_args([*_FLAGS.split(), "--device", device, *_SWITCHES[dtype], *words])
    if isinstance(model, Found):
        parsed.start = model
        take_checkpoint_args(parsed)
        _take_router(parsed, saved_args(model))
    parsed.seq_length = parsed.seq_length or parsed.max_position_embeddings
    parsed.tokenizer_type = "NullTokenizer"  # whatever the checkpoint says: it reads ids
    parsed.moe_token_dispatcher_type = "alltoall"
    args = settled(validate(parsed, 1, "gpt"))
    check_with_core(args)
    return args


def _take_router(parsed: Settings, saved: Any) -> None:
    """Route as the run did. Kinds of auxiliary losses choose alike; sinkhorn chooses otherwise."""
    if getattr(saved, "moe_router_load_balancing_type", None) in ("sinkhorn", ["sinkhorn"]):
        parsed.moe_router_load_balancing_type = "sinkhorn"
        parsed.moe_aux_loss_coeff = 0.0


@contextlib.contextmanager
def megatron_engine(
    model: Found | Path,
    *,
    vocabulary: int,
    device: str = "auto",
    dtype: str | None = None,
    family_file: Path | None = None,
) -> Iterator[MegatronEngine]:
    """A model, until the end of the block.

    Args:
        model: a checkpoint, or a Hugging Face folder.
        vocabulary: tokens that exist; the rows of the model behind them are padding.
        device: ``auto``, ``cpu`` or ``cuda``.
        family_file: a Python file with a further family.
        dtype: ``float32``, ``bfloat16`` or ``float16``; :func:`default_dtype` when None.

    Raises:
        ConfigError: the model does not fit on the device, or cannot be computed.
        DataError: the model is damaged.
    """
    args = settings(model, device, dtype or default_dtype(device), family_file)
    _check_memory(args)
    with _alone() as stack:
        with contextlib.redirect_stdout(io.StringIO()):  # stdout is the answer's
            run = initialize(args, 0)
            if run.cpu_support is not None:
                stack.callback(run.cpu_support.close)
            config = transformer_config(args)
            (chunk,) = bare_chunks(args, config, TASKS["gpt"].build_chunk)
            chunk.to(device=run.device, dtype=args.params_dtype).eval()
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, about its own formats
                Checkpointer(run, Trainee([chunk], config, None, None)).load()
        use_cache(chunk)
        yield MegatronEngine(chunk, args, run.device, vocabulary)


def _check_memory(args: RunConfig) -> None:
    """Refuse a model that is larger than the memory; a kind that is not estimated passes."""
    try:
        count = model_parameters(shape_of(args, on_gpu=args.device == "cuda"))
    except ConfigError:
        return
    size = count * args.params_dtype.itemsize
    remedy = "use a device with more memory, or --dtype bfloat16"
    check_room(size, torch.device(args.device), f"{count:,} parameters", remedy)


@contextlib.contextmanager
def _alone() -> Iterator[contextlib.ExitStack]:
    """Around a job of one process, whatever launcher's variables are set. Leaves nothing behind."""
    kept = {name: os.environ.pop(name) for name in _NODE if name in os.environ}
    log = logging.getLogger(rerun_state_machine.__name__)
    level = log.level
    log.setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        # cuDNN plans each new length anew, and each token of an answer makes one.
        cuda = torch.backends.cuda
        used = cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        stack.callback(cuda.enable_cudnn_sdp, used)
        cuda.enable_cudnn_sdp(False)
        try:
            yield stack
        finally:
            os.environ.update(kept)
            log.setLevel(level)
            if dist.is_initialized():
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()
            num_microbatches_calculator.destroy_num_microbatches_calculator()
            rerun_state_machine.destroy_rerun_state_machine()


class MegatronEngine:
    """An :class:`~megatron.dpp_train.generate.engine.Engine` on a GPT model of megatron-core."""

    def __init__(self, model: Any, args: Settings, device: torch.device, vocabulary: int) -> None:
        self._model, self._device = model, device
        self._vocabulary = min(vocabulary, args.padded_vocab_size)
        self._args = args
        self._cache = Cache(0)
        self._lengths: list[int] = []
        self.positions = int(args.max_position_embeddings)
        self.name = f"megatron-core, local layers, {args.params_dtype}, {device}"
        model.post_process = False  # logits of few tokens are needed, see _logits

    def begin(self, prompts: Sequence[Tokens], room: int) -> torch.Tensor:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        args = self._args
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        width = 2 * groups * args.kv_channels * args.num_layers * args.params_dtype.itemsize
        remedy = "use a smaller --batch-size or --max-new-tokens"
        self._cache = Cache(0)  # the last batch's is free now
        of = f"keys and values of {len(prompts)} x {room} tokens"
        check_room(len(prompts) * room * width, self._device, of, remedy)
        self._cache = Cache(room)
        self._lengths = [len(each) for each in prompts]
        places = [place for each in prompts for place in range(len(each))]
        tokens = list(itertools.chain(*prompts))
        ends = torch.tensor(list(itertools.accumulate(self._lengths))) - 1
        return self._step(tokens, places, self._lengths, first=True, wanted=ends)

    def extend(self, tokens: Tokens) -> torch.Tensor:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        places, self._lengths = self._lengths, [each + 1 for each in self._lengths]
        return self._step(tokens, places, [1] * len(tokens), first=False)

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        self._lengths = [self._lengths[row] for row in rows]
        self._cache.keep(torch.tensor(rows, device=self._device))

    @torch.inference_mode()
    def losses(self, pieces: Sequence[Tokens]) -> list[torch.Tensor]:
        """See :class:`~megatron.dpp_train.generate.engine.Engine`."""
        lengths = [len(each) for each in pieces]
        ids, places = self._tensors(itertools.chain(*pieces), itertools.chain(*map(range, lengths)))
        hidden = self._forward(ids, places, packed_params(self._starts(lengths), max(lengths)))
        parts = (torch.split(each, LOSS_ROWS) for each in (hidden[:-1], ids[1:]))
        found = torch.cat(
            [token_losses(self._logits(some), wanted) for some, wanted in zip(*parts, strict=True)]
        )
        rows = torch.split(torch.cat([found, found[:1]]), lengths)
        return [row[:-1] for row in rows]  # without the loss of the next piece's first token

    def _tensors(self, *columns: Any) -> list[torch.Tensor]:
        return [torch.tensor(list(each), device=self._device) for each in columns]

    def _starts(self, lengths: Sequence[int]) -> torch.Tensor:
        starts = [0, *itertools.accumulate(lengths)]
        return torch.tensor(starts, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def _step(
        self,
        tokens: Tokens,
        places: Sequence[int],
        lengths: Sequence[int],
        *,
        first: bool,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits behind some tokens (default: all), which stand at ``places`` of sequences."""
        ids, at = self._tensors(tokens, places)
        starts = self._starts(lengths)
        longest = max(self._lengths)
        hidden = self._forward(ids, at, step_params(starts, at, longest, self._cache, first=first))
        return self._logits(hidden if wanted is None else hidden[wanted.to(self._device)]).float()

    def _forward(self, ids: torch.Tensor, places: torch.Tensor, params: Any) -> torch.Tensor:
        """Outputs of the last layer, [t, 1, hidden]; ids and places are [t]."""
        hidden: torch.Tensor = self._model(ids[None], places[None], None, packed_seq_params=params)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[t, vocabulary], without the rows that pad the vocabulary."""
        model = self._model
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        logits: torch.Tensor = model.output_layer(hidden, weight=weight)[0]
        return logits[:, 0, : self._vocabulary]
