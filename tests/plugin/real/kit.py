"""Parts that the runs of other projects' training code on a CPU share.

A run prints what must be bitwise equal under every schedule, by :class:`Record`, and the names that
it replaced, by :data:`STUBBED`.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch

STUBBED: set[str] = set()
"""Packages and functions that stand for something which is missing here."""

ANNOUNCED: list[list[int]] = []
"""Lengths of each training step's microbatches that were announced before it."""


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
    """megatron-core's local layers with :class:`PackedAttention`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    STUBBED.add("Transformer Engine's layers (local ones instead)")
    return spec


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

    def weights(self, what: str, chunks: Sequence[torch.nn.Module]) -> None:
        """Add digests of the weights and of the gradients."""
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
        lines = [*self._lines, f"announced {json.dumps(ANNOUNCED)}", f"stubbed {stubbed}"]
        Path(path).write_text("\n".join(lines) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = [value]
    if isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value):
        digest = hashlib.sha256()
        for one in value:
            values = one.values() if one.is_nested else one
            digest.update(values.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]
    return f"{value!r}"


def tiny_model(folder: Path) -> None:
    """Write a Llama of four layers with random weights and a tokenizer of numbers, as
    ``transformers`` keeps them.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False, torch_dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({str(number): number for number in range(128)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(
        folder
    )


def begin(available: str = "", counted: str = "", *, connect: bool = True) -> None:
    """Let megatron-core run on this CPU.

    Args:
        available: the package that is told that CUDA is available, since it asks for it.
        counted: the package that is told how many GPUs there are.
        connect: connect the ranks by gloo; otherwise the host does it.
    """
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
    _note_announced()
    if connect:
        torch.distributed.init_process_group("gloo")


def _note_announced() -> None:
    """Keep the lengths that are announced to the dynamic schedule in :data:`ANNOUNCED`."""
    from megatron.dpp.runtime.dynamic import DppSchedule

    own = DppSchedule.announce

    def announce(schedule: Any, sizes: Sequence[int], *more: Any, **rows: Any) -> None:
        ANNOUNCED.append(list(sizes))
        own(schedule, sizes, *more, **rows)

    DppSchedule.announce = announce  # type: ignore[method-assign]


if __name__ == "__main__":
    tiny_model(Path(sys.argv[1]))
