"""Runs the script ``HOST`` of Megatron-LM, and writes what training returns to ``RECORD.RANK``.

Each line is one step (losses, gradient norm, a hash of this rank's parameters) or one evaluation,
with floats in hexadecimal. It is started by ``megatron.dpp.run`` in the place of ``HOST``.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

host = os.environ["HOST"]
sys.path.insert(0, str(Path(host).parent))

from megatron.training import training  # noqa: E402  # type: ignore[import-not-found]


def plain(value: Any) -> Any:
    """A value as JSON takes it, floats exactly."""
    if isinstance(value, torch.Tensor):
        return [plain(float(each)) for each in value.detach().flatten()]
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, int | str | None) else type(value).__name__


def parameters(chunks: list[torch.nn.Module]) -> str:
    """A hash of all parameters, bit by bit."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            numbers = parameter.detach()
            if type(parameter.data) is not torch.Tensor:  # in 8 bit
                numbers = numbers.dequantize()
            digest.update(numbers.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def recorded(name: str, with_model: bool) -> None:
    """Let a function of the training loop write what it returns."""
    original: Callable[..., Any] = getattr(training, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        line = [name, plain(result), *([parameters(args[2])] if with_model else [])]
        with Path(f"{os.environ['RECORD']}.{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    setattr(training, name, call)


def attend_in_packed_rows() -> None:
    """Let megatron-core's local attention take packed rows, as Transformer Engine's does."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    own = DotProductAttention.forward

    def forward(
        self: Any, query: Any, key: Any, value: Any, *rest: Any, packed_seq_params: Any = None,
        **more: Any,
    ) -> torch.Tensor:  # fmt: skip
        if packed_seq_params is None:
            return own(self, query, key, value, *rest, **more)  # type: ignore[no-any-return]
        ends = packed_seq_params.cu_seqlens_q.tolist()
        q, k, v = (each.unsqueeze(1) if each.dim() == 3 else each for each in (query, key, value))
        return torch.cat(
            [own(self, q[a:b], k[a:b], v[a:b], None, *rest[1:], **more)
             for a, b in itertools.pairwise(ends)]
        )  # fmt: skip

    DotProductAttention.forward = forward


helpers = importlib.import_module("megatron.core.datasets.utils")
helpers.compile_helpers = lambda: None  # type: ignore[attr-defined] # hosts.py has compiled them
if {"--dataloader-inter-document-masking", "--sft"} & set(sys.argv):
    attend_in_packed_rows()
recorded("train_step", with_model=True)
recorded("evaluate", with_model=False)
sys.argv[0] = host
runpy.run_path(host, run_name="__main__")
if dist.is_initialized():  # else a thread of Gloo's may outlive the interpreter, and aborts
    dist.destroy_process_group()
