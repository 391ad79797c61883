"""``--metrics-file``: one JSON line per iteration with values in full precision.

Written by the last rank, which holds the losses. Lines with a key ``set`` are evaluations; the
last line of a run has ``parameters_sha256`` per rank, so that two runs can be shown to end bitwise
equal.
"""

from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist

from megatron.dpp.errors import DataError
from megatron.dpp.train.initialize import Run


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
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
            except OSError as error:
                raise DataError(f"--metrics-file {path}: {error.strerror}") from error

    def write(self, **values: Any) -> None:
        """One line; tensors become numbers."""
        if self._file is not None:
            plain = {
                name.replace("_", " ") if name == "grad_norm" else name: _plain(value)
                for name, value in values.items()
            }
            self._file.write(json.dumps(plain) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; calling it twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def peak_memory_bytes(run: Run) -> int:
    """Most memory this process has held: allocated on the GPU, or resident on the host without
    one."""
    if run.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(run.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parameters_sha256(chunks: list[Any]) -> str:
    """Hash of the names and bits of all parameters of this rank, chunk by chunk."""
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
