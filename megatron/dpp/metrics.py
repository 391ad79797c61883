"""Losses, norms and times of a training run on ``megatron.training``, one JSON line per step.

    with recording("metrics.jsonl"):
        pretrain(...)

Works in any program that trains by Megatron's loop, with the dynamic pipeline or without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.dpp.core import compat
from megatron.dpp.errors import ConfigError
from megatron.dpp.files.safe_files import open_text_to_write


@contextlib.contextmanager
def recording(path: str | os.PathLike[str]) -> Iterator[None]:
    """Appends a line to ``path`` for each training step and each evaluation within the block.

    All ranks enter it; the last one writes, which is the rank that prints Megatron's log. A step is
    ``{"iteration", "train_iters", "loss", "grad_norm", "ms", "tokens", "lr", "time"}``: the loss is
    that of the step (a line of Megatron's log has the mean since the line before), further losses
    have fields of their own names, ``ms`` is the time of the step without evaluations and
    checkpoints, ``tokens`` those of the global batch (without padding where Megatron counts them),
    ``time`` seconds since 1970. A number that is missing or not finite is ``null``.

    An evaluation is ``{"iteration", "validation_loss", "time"}``, or ``test_loss``; a second
    validation set and later ones have ``set``, their number from 1.

    Args:
        path: of the file, on the node of the last rank. Its directory is made; lines of an earlier
            run stay.

    Raises:
        ConfigError: ``megatron.training`` is not installed, or lacks a function that is needed.
        OSError: the directory cannot be made.
    """
    if importlib.util.find_spec("megatron.training") is None:
        raise ConfigError(
            "losses cannot be recorded: there is no megatron.training, which Megatron-LM has and "
            "megatron-core from 0.17 on"
        )
    run = _Run(Path(path))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as replaced:
        for key in compat.TRAINING:
            replaced.enter_context(compat.patched(key, getattr(run, key.partition(":")[2])))
        yield


class _Run:
    """Stands around Megatron's functions of the same names and writes what passes through them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = 0.0
        self._samples = 0
        self._evaluation: dict[str, Any] = {}
        self._torn = ""

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._began = time.monotonic()
        self._samples = compat.host_argument("consumed_train_samples") or 0
        return original(*args, **kwargs)

    def training_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _is_last_rank():
            self._step(inspect.signature(original).bind(*args, **kwargs).arguments)
        return original(*args, **kwargs)

    def _step(self, given: dict[str, Any]) -> None:
        losses = {name: _number(value) for name, value in given["loss_dict"].items()}
        milliseconds = (time.monotonic() - self._began) * 1e3  # the loss has waited for the device
        samples = (compat.host_argument("consumed_train_samples") or 0) - self._samples
        tokens = given.get("total_real_tokens_in_batch")
        if tokens is None:
            tokens = samples * (compat.host_argument("seq_length") or 0)
        self._write(
            {
                "iteration": int(given["iteration"]),
                "train_iters": compat.host_argument("train_iters"),
                "loss": next(iter(losses.values()), None),
                "grad_norm": _number(given["grad_norm"]),
                "ms": round(milliseconds, 3),
                "tokens": int(tokens),
                "lr": _number(given["learning_rate"]),
                **dict(list(losses.items())[1:]),
            }
        )

    def evaluate_and_print_results(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        of_test = "test set" in str(given["prefix"])
        self._evaluation = {
            "iteration": int(given["iteration"]),
            "name": "test_loss" if of_test else "validation_loss",
            "set": 0,
        }
        try:
            return original(*args, **kwargs)
        finally:
            self._evaluation = {}

    def evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if self._evaluation and found[0] and _is_last_rank():
            iteration, name, number = self._evaluation.values()
            line = {"iteration": iteration, name: _number(next(iter(found[0].values())))}
            self._write(line | ({"set": number} if number else {}))
            self._evaluation["set"] += 1
        return found

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line. A full disk costs metrics, it does not end the training."""
        try:
            with open_text_to_write(self._path, append=True) as file:
                text = json.dumps(line | {"time": round(time.time(), 3)})
                file.write(f"{self._torn}{text}\n")
            self._torn = ""
        except OSError as error:
            self._torn = "\n"  # the line's start may be in the file
            warnings.warn(f"{self._path}: no metrics of this step ({error})", stacklevel=2)


def _is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def _number(value: Any) -> float | None:
    """A loss, a norm or a rate as a number; None where it is missing or not finite."""
    if value is None:
        return None
    number = float(value.float().sum()) if isinstance(value, torch.Tensor) else float(value)
    return number if math.isfinite(number) else None
