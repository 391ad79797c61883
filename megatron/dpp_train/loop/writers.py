"""Writers of a run's values: TensorBoard, Weights & Biases, MLflow, Trackio. The last rank writes.

Each of them is a :class:`Tracker`, and writes to local files unless its settings name a server.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.dpp.errors import DataError
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.state import Run


class Tracker(Protocol):
    """Keeps the values of one run."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Keeps the values of an iteration, or of a number of consumed samples."""

    def close(self, *, failed: bool) -> None:
        """Writes what is pending, and ends the run as finished or as failed."""


class Writers:
    """The trackers that the flags name, on the last rank; none elsewhere."""

    def __init__(self, run: Run) -> None:
        """Opens them.

        Raises:
            DataError: one of them cannot be opened.
        """
        self.board: Any = None
        """TensorBoard's ``SummaryWriter`` or None."""
        self._run = run
        self._trackers: dict[str, Tracker] = {}
        self._waiting: dict[str, float] = {}
        self._samples: dict[str, float] = {}
        try:
            for flag, (name, opens) in _TRACKERS.items() if run.is_last else ():
                if getattr(run.args, name):
                    self._trackers[flag] = opens(run)
        except BaseException:
            self.close(failed=True)
            raise
        board = self._trackers.get(_BOARD)
        if isinstance(board, _TensorBoard):
            self.board = board.writer

    def add(self, name: str, value: Any, *, samples: bool = False) -> None:
        """Takes one value of this iteration; with ``samples`` TensorBoard has it over consumed
        samples, too."""
        if self._trackers:
            self._waiting[name] = float(value)
            if samples:
                self._samples[f"{name} vs samples"] = float(value)

    def flush(self) -> None:
        """Hands what was added to the trackers, as values of this iteration."""
        values, samples = self._waiting, self._samples
        self._waiting, self._samples = {}, {}
        for flag in list(self._trackers):
            if values:
                self._try(flag, lambda to: to.write(values, self._run.iteration))
            if samples and flag == _BOARD:
                self._try(flag, lambda to: to.write(samples, self._run.consumed_train_samples))

    def _try(self, flag: str, act: Callable[[Tracker], None]) -> None:
        """Calls a tracker. One that fails is left out from then on: values are not
        worth the end of a training."""
        tracker = self._trackers.get(flag)
        if tracker is None:
            return
        try:
            act(tracker)
        except Exception as error:  # of any package: networks, disks, services
            del self._trackers[flag]
            self._run.say_last(
                f"{flag} {getattr(self._run.args, _TRACKERS[flag][0])}: no values are written from "
                f"iteration {self._run.iteration} on ({_told(error)})"
            )

    def close(self, *, failed: bool = False) -> None:
        """Writes what is pending and closes; calling it twice is fine."""
        self.flush()
        for flag in list(self._trackers):
            self._try(flag, lambda to: to.close(failed=failed))
        self._trackers, self.board = {}, None

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


class _TensorBoard:
    """Files of ``--tensorboard-dir``."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(
            log_dir=run.args.tensorboard_dir, max_queue=run.args.tensorboard_queue_size
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self.writer.close()


class _WandB:
    """A run at Weights & Biases: on disk only where no account is known, or with
    ``WANDB_MODE=offline``."""

    def __init__(self, run: Run) -> None:
        import wandb

        args = run.args
        folder = args.wandb_save_dir or args.save
        try:
            if folder:  # a missing one would be replaced by a temporary one
                Path(folder).mkdir(parents=True, exist_ok=True)
            mode = None if "WANDB_MODE" in os.environ or _knows_account(wandb) else "offline"
            self._run = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name or None,
                entity=args.wandb_entity,
                dir=folder,
                mode=mode,
                config=_settings(args),
            )
        except (wandb.Error, OSError) as error:
            raise _refusal("--wandb-project", args.wandb_project, error) from error
        if mode:
            run.say_last(
                "Weights & Biases: no key of an account, the run stays on disk; `wandb login` and "
                "`wandb sync` send it"
            )

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _knows_account(wandb: Any) -> bool:
    """True if the package finds a key. It asks nobody, neither user nor server."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # an older package, which always asks
        return bool(wandb.api.api_key)


class _MLflow:
    """A run of MLflow: in its own local store, or where ``--mlflow-tracking-uri`` or
    ``MLFLOW_TRACKING_URI`` say."""

    _PARAMETERS = 100
    """Parameters that a server takes at a time."""

    def __init__(self, run: Run) -> None:
        # MLflow's own 7 retries with growing pauses would hold the training for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        import mlflow

        args = run.args
        self._mlflow: Any = mlflow
        try:
            if args.mlflow_tracking_uri:
                mlflow.set_tracking_uri(args.mlflow_tracking_uri)
            mlflow.set_experiment(args.mlflow_experiment)
            mlflow.start_run(run_name=args.mlflow_run_name or None)
            settings = iter(_settings(args).items())
            while part := dict(itertools.islice(settings, self._PARAMETERS)):
                mlflow.log_params(part)
        except Exception as error:  # MlflowException, and those of its stores
            mlflow.end_run("FAILED")
            raise _refusal("--mlflow-experiment", args.mlflow_experiment, error) from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        # MLflow allows no other characters.
        named = {re.sub(r"[^\w\-. /:]", "_", name): value for name, value in values.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _Trackio:
    """A run of Trackio: in its own local store, or in the Space that ``TRACKIO_SPACE_ID`` names."""

    def __init__(self, run: Run) -> None:
        args = run.args
        try:
            import trackio

            self._run = trackio.init(
                project=args.trackio_project,
                name=args.trackio_run_name or None,
                config=_settings(args),
            )
        except Exception as error:  # of huggingface_hub, gradio, sqlite
            raise _refusal("--trackio-project", args.trackio_project, error) from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


_BOARD = "--tensorboard-dir"

_TRACKERS: dict[str, tuple[str, Callable[[Run], Tracker]]] = {
    _BOARD: ("tensorboard_dir", _TensorBoard),
    "--wandb-project": ("wandb_project", _WandB),
    "--mlflow-experiment": ("mlflow_experiment", _MLflow),
    "--trackio-project": ("trackio_project", _Trackio),
}
"""Flags to the names of their settings, and what opens the tracker."""

_OFFLINE = {
    "--wandb-project": "with WANDB_MODE=offline its files stay on disk, under --wandb-save-dir",
    "--mlflow-experiment": "without --mlflow-tracking-uri and MLFLOW_TRACKING_URI it is written to "
    "mlflow.db in the working directory, which mlflow-skinny can with sqlalchemy and alembic",
    "--trackio-project": "without TRACKIO_SPACE_ID it is written to TRACKIO_DIR",
}


def _refusal(flag: str, value: str | None, error: Exception) -> DataError:
    return DataError(f"{flag} {value}: the run cannot be opened ({_told(error)}); {_OFFLINE[flag]}")


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _settings(args: Settings) -> dict[str, str]:
    return {name: str(value) for name, value in vars(args).items()}
