"""Parts that the runs of other projects' training code share.

A run prints what must be bitwise equal under every schedule, by :class:`Record`, and the names that
it replaced, by :data:`STUBBED`. ``DEVICE=cuda`` runs on GPUs with Transformer Engine's layers.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import MagicMock

import torch


class Size(NamedTuple):
    """A Llama and its rollouts. The defaults are those of a comparison on a CPU.

    Args:
        vocabulary: tokens, also those of the tokenizer.
        samples: sequences of a rollout; a global batch has half of them.
        median: tokens of a sequence; the lengths are lognormal with sigma 0.9.
        longest: most tokens of a sequence.
        most: tokens to which the host packs a microbatch.
        rollouts: each has two updates of the policy.
    """

    layers: int = 4
    hidden: int = 64
    vocabulary: int = 128
    samples: int = 16
    median: int = 24
    longest: int = 64
    most: int = 96
    rollouts: int = 2

    @classmethod
    def of_environment(cls) -> Size:
        """That of the variable ``SIZE``, which :meth:`text` wrote."""
        return cls(*json.loads(os.environ.get("SIZE", "[]")))

    def text(self) -> str:
        return json.dumps(self)

    @property
    def heads(self) -> int:
        return max(self.hidden // 128, 4)

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.heads // 2

    @property
    def ffn(self) -> int:
        return 3 * self.hidden

    @property
    def longest_prompt(self) -> int:
        return self.longest // 4

    def lengths(self, seed: int) -> tuple[list[int], list[int]]:
        """Tokens of the prompts and of the responses of a rollout."""
        draw = random.Random(seed)
        prompts, responses = [], []
        for _ in range(self.samples):
            drawn = draw.lognormvariate(math.log(self.median), 0.9)
            tokens = min(max(round(drawn), 4), self.longest)
            prompts.append(draw.randint(2, max(tokens // 4, 2)))
            responses.append(tokens - prompts[-1])
        return prompts, responses


SIZE = Size.of_environment()
ON_GPU = os.environ.get("DEVICE") == "cuda"
TIMED = os.environ.get("TIMED") == "1"
"""Steps are timed, so that nothing is compared and nothing need be deterministic."""

STUBBED: set[str] = set()
"""Packages and functions that stand for something which is missing here."""

ANNOUNCED: list[list[int]] = []
"""Lengths of each training step's microbatches that were announced before it."""

ORDERS: list[list[int] | None] = []
"""The planned order of each training step's microbatches; None for the host's."""


class Stub(types.ModuleType):
    """A module that has any name: a class where it begins with a capital letter, else a function
    that returns its first argument, so that decorators work.
    """

    __path__: ClassVar[list[str]] = []
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = {"__class_getitem__": classmethod(lambda own, _: own), "__module__": self.__name__}
        first = {"side_effect": lambda *given, **_: given[0] if given else None}
        made = type(name, (), kind) if name[:1].isupper() else MagicMock(name=name, **first)
        setattr(self, name, made)
        return made


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        found = [own for own in self._names if f"{name}.".startswith(f"{own}.")]
        if not found or _asked_by("megatron.core"):
            return None
        STUBBED.add(*found)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _asked_by(package: str) -> bool:
    """True if a module of ``package`` imports what is looked for: megatron-core does without."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return bool(frame.f_globals["__name__"].startswith(package))


def stub(*names: str) -> None:
    """Let these packages be imported where they are not installed."""
    sys.meta_path.append(_Stubs(names))


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace a name of a host for good, and note it."""
    setattr(owner, name, value)
    where = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__qualname__
    STUBBED.add(f"{where}.{name}")


class PackedAttention(torch.nn.Module):
    """Attention for packed sequences, which megatron-core has in Transformer Engine's layers only.

    Takes what megatron-core gives its core attention: query, key and value [t, heads, size] with
    ``packed_seq_params``, or [s, b, heads, size] without.
    """

    may_be_sliced, dropout = True, 0.0

    def __init__(self, config: Any, layer_number: int, *given: Any, **more: Any) -> None:
        super().__init__()
        self.config, self.softmax_scale = config, config.kv_channels**-0.5

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any = None, *given: Any,
        packed_seq_params: Any = None, **more: Any,
    ) -> torch.Tensor:  # fmt: skip
        if packed_seq_params is None:
            parts = [self._attend(*(x[:, n] for x in (query, key, value))) for n in
                     range(query.shape[1])]  # fmt: skip
            return torch.stack(parts, 1)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        if getattr(packed_seq_params, "cu_seqlens_q_padded", None) is not None:
            ends = packed_seq_params.cu_seqlens_q_padded.tolist()
        rows = [slice(*pair) for pair in zip(ends, [*ends[1:], query.shape[0]], strict=True)]
        squeezed = [x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value)]
        return (
            torch.cat(
                [self._attend(*(x[row] for x in squeezed)) for row in rows if row.start < row.stop]
            )
            .unsqueeze(1 if query.dim() == 4 else -1)
            .flatten(-1)
        )

    @staticmethod
    def _attend(query: Any, key: Any, value: Any) -> torch.Tensor:
        """Causal attention of one sequence [s, heads, size]; [s, heads * size]."""
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[0] != key.shape[0]
        )
        return found.transpose(0, 1).flatten(1)


def packed_spec(*given: Any, **more: Any) -> Any:
    """Transformer Engine's layers; on a CPU megatron-core's local ones with
    :class:`PackedAttention`.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    if ON_GPU:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    STUBBED.add("Transformer Engine's layers (local ones instead)")
    return spec


_NO_APEX = {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
_LOCAL = {
    "persist_layer_norm": False, "apply_rope_fusion": False, "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}  # fmt: skip
LAYERS: dict[str, Any] = (
    _NO_APEX | {"cross_entropy_loss_fusion": False} | ({} if ON_GPU else _LOCAL)
)
"""Settings of a TransformerConfig for the layers of this machine; the fused loss is not
deterministic."""
SPEC: dict[str, Any] = {} if ON_GPU else {"transformer_layer_spec": packed_spec}
"""Those of a model provider, which otherwise takes Transformer Engine's layers."""


class Record:
    """The numbers of a run, in the order of :meth:`add`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, what: str, value: Any) -> None:
        """Add a number, or a digest of tensors."""
        self._lines.append(f"{what} {_text(value)}")

    def returned(self, owner: Any, name: str) -> None:
        """Add the values of the mapping that a method of a host returns."""
        own = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            found = own(*given, **more)
            for key, value in sorted(found.items()):
                self.add(key, value)
            return found

        setattr(owner, name, call)

    def timed(self, owner: Any, name: str, what: str) -> None:
        """Note the milliseconds of each call of a host's function, in which all ranks take part."""
        own = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            start = _moment()
            found = own(*given, **more)
            self._lines.append(f"time {what}: {1e3 * (_moment() - start):.1f}")
            return found

        setattr(owner, name, call)

    def weights(self, what: str, chunks: Sequence[torch.nn.Module]) -> None:
        """Add digests of the weights and of the gradients."""
        if not TIMED:
            own = [p for chunk in chunks for p in chunk.parameters()]
            self.add(f"{what} weights", [p.detach() for p in own])

    def watch(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Add a digest of these chunks' gradients before each step of the optimizer, and the number
        of gradients that are not zero."""
        from megatron.core.optimizer import optimizer

        def gradients() -> None:
            own = [
                grad
                for chunk in chunks
                for p in chunk.parameters()
                if (grad := getattr(p, "main_grad", p.grad)) is not None
            ]
            filled = sum(bool(grad.count_nonzero()) for grad in own)
            assert filled > len(own) // 2, f"{filled} gradients of {len(own)} are not zero"
            self.add(f"gradients, {filled} of {len(own)} not zero:", own)

        if not TIMED:
            for kind in (optimizer.MixedPrecisionOptimizer, optimizer.FP32Optimizer):
                self._watch(kind, gradients)

    @staticmethod
    def _watch(kind: Any, look: Callable[[], None]) -> None:
        own = kind.prepare_grads

        def prepare_grads(optimizer: Any) -> Any:
            look()
            return own(optimizer)

        kind.prepare_grads = prepare_grads

    def write(self) -> None:
        """Write this rank's lines to ``RECORD.RANK``."""
        path = f"{os.environ['RECORD']}.{os.environ['RANK']}"
        stubbed = json.dumps(sorted(STUBBED))
        told = [f"orders {json.dumps(ORDERS)}", f"announced {json.dumps(ANNOUNCED)}"]
        lines = [*self._lines, *told, f"stubbed {stubbed}"]
        Path(path).write_text("\n".join(lines) + "\n")


def _moment() -> float:
    """The time, in seconds, when all ranks have come here and their GPUs are done."""
    if ON_GPU:
        torch.cuda.synchronize()
    torch.distributed.barrier()
    return time.perf_counter()


def _text(value: Any) -> str:
    """A digest in the place of each tensor, and of a list of tensors."""
    if isinstance(value, torch.Tensor):
        value = [value]
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(one)}" for key, one in sorted(value.items()))
    if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
        digest = hashlib.sha256()
        for one in value:
            values = one.values() if one.is_nested else one
            whole = values.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(whole.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]
    return f"{value!r}"


def tiny_model(folder: Path) -> None:
    """Write a Llama with random weights and a tokenizer of numbers, as ``transformers`` keeps
    them.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=SIZE.vocabulary, hidden_size=SIZE.hidden, intermediate_size=SIZE.ffn,
        num_hidden_layers=SIZE.layers, num_attention_heads=SIZE.heads,
        num_key_value_heads=SIZE.groups, max_position_embeddings=4 * SIZE.longest,
        tie_word_embeddings=False, torch_dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    numbers = {str(number): number for number in range(SIZE.vocabulary)}
    words = Tokenizer(WordLevel(numbers, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(
        folder
    )


def begin(available: str = "", counted: str = "", *, connect: bool = True) -> None:
    """Prepare this rank's GPU, or let megatron-core run on the CPU.

    Args:
        available: the package that is told that CUDA is available, since it asks for it.
        counted: the package that is told how many GPUs there are.
        connect: connect the ranks; otherwise the host does it.
    """
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(not TIMED, warn_only=True)
    else:
        _use_cpu(available, counted)
    _note_announced()
    _note_orders(os.environ.get("FOLLOW"))
    if connect:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def _use_cpu(available: str, counted: str) -> None:
    import typing

    import typing_extensions

    from megatron.dpp.core import cpu

    if not hasattr(typing, "override"):  # newer versions of Megatron-LM want Python 3.12
        typing.override = typing_extensions.override

    cpu.install(host=True)
    is_available, count = torch.cuda.is_available, int(os.environ["LOCAL_WORLD_SIZE"])
    replace(torch.cuda, "mem_get_info", lambda *device: (1 << 33, 1 << 34))
    for name in ("memory_allocated", "memory_reserved"):
        replace(torch.cuda, name, lambda *device: 0)
    if available:
        replace(torch.cuda, "is_available", lambda: _asked_by(available) or is_available())
    if counted:
        replace(torch.cuda, "device_count", lambda: count * _asked_by(counted))


def _note_announced() -> None:
    """Keep the lengths that are announced to the dynamic schedule in :data:`ANNOUNCED`."""
    from megatron.dpp.runtime.dynamic import DppSchedule

    own = DppSchedule.announce

    def announce(schedule: Any, sizes: Sequence[int], *more: Any, **rows: Any) -> None:
        ANNOUNCED.append(list(sizes))
        own(schedule, sizes, *more, **rows)

    DppSchedule.announce = announce  # type: ignore[method-assign]


def _note_orders(path: str | None) -> None:
    """Keep planned orders in :data:`ORDERS`. With the record of another run megatron-core's own
    schedule runs training steps in the orders of that.
    """
    from megatron.core.pipeline_parallel import schedules

    from megatron.dpp.plugin_order import InOrder

    own_init = InOrder.__init__

    def init(step: Any, keywords: Any, order: Sequence[int] | None) -> None:
        ORDERS.append(order and list(order))
        own_init(step, keywords, order)

    InOrder.__init__ = init  # type: ignore[method-assign]
    if path is None:
        return
    lines = Path(f"{path}.{os.environ['RANK']}").read_text().splitlines()
    told = iter(json.loads(lines[-3].removeprefix("orders ")))

    def run(own: Callable[..., Any], **keywords: Any) -> Any:
        if keywords.get("forward_only"):
            return own(**keywords)
        step = InOrder(keywords, next(told))
        return step.restored(own(**step.step))

    for kind in ("with", "without"):
        name = f"forward_backward_pipelining_{kind}_interleaving"
        setattr(schedules, name, partial(run, getattr(schedules, name)))


if __name__ == "__main__":
    tiny_model(Path(sys.argv[1]))
