"""Parameter norms and hashes, and ``--metrics-file``: a JSON line per iteration in full precision.

The last rank, which holds the losses, writes the file. Lines with a key ``set`` are evaluations;
the last line of a run has ``parameters_sha256`` per rank: two runs with equal ones end bitwise
equal.
"""

from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.dpp.errors import DataError
from megatron.dpp.safe_files import open_text_to_write
from megatron.dpp_train.state import Run


class MetricsFile:
    """Appends lines; ``path`` None makes every call do nothing.

    Raises:
        DataError: the file cannot be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = None
        if path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open_text_to_write(path, append=True)
            except OSError as error:
                raise DataError(f"--metrics-file {path}: {error.strerror}") from error

    def write(self, **values: Any) -> None:
        """Writes one line; tensors become numbers."""
        if self._file is not None:
            self._file.write(json.dumps(values, default=torch.Tensor.item) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file; calling it twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None


def peak_memory_bytes(run: Run) -> int:
    """Peak memory of this process: allocated on the GPU, or resident on the host without one."""
    if run.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(run.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parameters_sha256(chunks: list[Any]) -> str:
    """Hash of the names and bits of all parameters of this rank, in the order of the chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            bits = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(bits.numpy().tobytes())
    return digest.hexdigest()


def gather_hashes(run: Run, chunks: list[Any]) -> dict[str, str]:
    """Every rank's hash by rank; a collective."""
    hashes: list[Any] = [None] * run.args.world_size
    dist.all_gather_object(hashes, parameters_sha256(chunks))
    return {str(rank): text for rank, text in enumerate(hashes)}


def parameters_norm(chunks: list[Any], *, from_main: bool) -> float:
    """L2 norm over all ranks of the model, with each parameter counted once; a collective.

    Args:
        from_main: reads the fp32 copy where the optimizer keeps one (bf16).
    """
    total = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    experts = torch.zeros_like(total)  # that expert-parallel ranks hold apart
    shares = torch.zeros_like(total)  # of main parameters that the distributed optimizer splits
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        if not (
            param_is_not_tensor_parallel_duplicate(parameter) and param_is_not_shared(parameter)
        ):
            continue
        main = getattr(parameter, "main_param", None) if from_main else None
        if from_main and getattr(parameter, "main_param_sharded", False):
            if main is not None:
                shares += main.float().norm() ** 2
            continue
        squares = (parameter.detach() if main is None else main).float().norm() ** 2
        if getattr(parameter, "allreduce", True):
            total += squares
        else:
            experts += squares
    dist.all_reduce(shares, group=mpu.get_data_parallel_group(with_context_parallel=True))
    total += shares
    dist.all_reduce(total, group=mpu.get_model_parallel_group())
    dist.all_reduce(experts, group=mpu.get_expert_tensor_model_pipeline_parallel_group())
    return float((total + experts).sqrt().item())
