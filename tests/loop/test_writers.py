"""Weights & Biases, MLflow and Trackio: values, the rank that writes them, errors, local files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.loop.writers import Writers
from megatron.dpp_train.options.arguments import parse_args
from megatron.dpp_train.options.validate import validate
from megatron.dpp_train.state import Run
from tests.runtime.launcher import REPOSITORY

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 3 --eval-iters 1 --eval-interval 3 --mock-data --transformer-impl local "
    f"--vocab-file {REPOSITORY}/datasets_gpt/vocab.json --device cpu --num-workers 0 "
    f"--merge-file {REPOSITORY}/datasets_gpt/merges.txt "
)
CASES = {
    "wandb": "--wandb-project p --wandb-exp-name try",
    "mlflow": "--mlflow-experiment p --mlflow-run-name try",
    "trackio": "--trackio-project p --trackio-run-name try",
}
"""Packages to the flags that ask for them."""


class Recorded(ModuleType):
    """Stands for one of the three packages: keeps the values that it gets."""

    class Error(Exception):
        """The package's error."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.ends: list[Any] = []
        self.refusal: str | None = None
        self.key: str | None = None

    def _refuse(self) -> None:
        if self.refusal:
            raise self.Error(self.refusal)

    def init(self, *, config: dict[str, str], **options: Any) -> Recorded:
        self._refuse()
        self.opened = options | {"settings": config}
        return self

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify
        return self.key is not None

    def set_tracking_uri(self, uri: str) -> None:
        self.opened["uri"] = uri

    def set_experiment(self, name: str) -> None:
        self._refuse()
        self.opened["project"] = name

    def start_run(self, *, run_name: str) -> None:
        self.opened |= {"name": run_name, "settings": {}}

    def log_params(self, values: dict[str, str]) -> None:
        assert len(values) <= 100
        self.opened["settings"] |= values

    def log(self, values: dict[str, Any], step: int) -> None:
        self._refuse()
        self.logged.append((values, step))

    log_metrics = log

    def finish(self, exit_code: int = 0) -> None:
        self.ends.append(exit_code)

    def end_run(self, status: str) -> None:
        self.ends.append(status)


@pytest.fixture(params=CASES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    module = Recorded(request.param)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("WANDB_MODE", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")  # whatever is set meanwhile is taken back
        monkeypatch.delenv(name)
    return module


def made(flags: str, rank: int = 1) -> Run:
    args = parse_args((FLAGS + flags).split())
    args.world_size = 2
    timers = SimpleNamespace()
    return Run(args=args, rank=rank, device=torch.device("cpu"), timers=timers, iteration=7)


def test_only_the_last_rank_opens_a_run_and_writes_by_iteration(package: Recorded) -> None:
    flags = CASES[package.__name__]
    Writers(made(flags, rank=0)).close()
    assert not package.opened
    writers = Writers(made(flags))
    writers.add("lm loss", torch.tensor(2.5), samples=True)
    writers.add("dpp/bytes/0-1", 3)
    writers.flush()
    writers.flush()
    writers.close()
    writers.close()
    assert (package.opened["project"], package.opened["name"]) == ("p", "try")
    assert package.opened["settings"]["num_layers"] == "2"
    assert package.logged == [({"lm loss": 2.5, "dpp/bytes/0-1": 3.0}, 7)]
    assert package.ends in ([0], ["FINISHED"])


def test_a_run_that_ends_in_an_error_is_a_failed_one(package: Recorded) -> None:
    with pytest.raises(ValueError, match="some"), Writers(made(CASES[package.__name__])):
        raise ValueError("some error")
    assert package.ends == {"wandb": [1], "mlflow": ["FAILED"], "trackio": [0]}[package.__name__]


def test_a_run_that_cannot_be_opened_is_a_plain_error(package: Recorded) -> None:
    package.refusal = "no such key"
    flag = CASES[package.__name__].split()[0]
    with pytest.raises(DataError, match=rf"{flag} p: .*\(no such key\); with.* is written|disk"):
        Writers(made(CASES[package.__name__]))


def test_a_tracker_that_fails_later_leaves_the_training_alone(
    package: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(CASES[package.__name__])
    with Writers(run) as writers:
        package.refusal = "the disk is full"
        for run.iteration in (8, 9):
            writers.add("lm loss", 1.0)
            writers.flush()
    flag = CASES[package.__name__].split()[0]
    told = f"{flag} p: no values are written from iteration 8 on (the disk is full)"
    assert capsys.readouterr().out.count(told) == 1


def test_without_the_package_the_flag_says_how_to_get_it(
    package: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, real = package.__name__, importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda asked: None if asked == name else real(asked)
    )
    with pytest.raises(ConfigError, match=rf"--{name}-\w+ p: .*pip install {name}"):
        validate(parse_args((FLAGS + CASES[name]).split()), world_size=1)


@pytest.mark.parametrize(
    "flag", ["--mlflow-run-name", "--mlflow-tracking-uri", "--trackio-run-name"]
)
def test_a_flag_of_a_tracker_that_is_off_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} x needs --(mlflow-experiment|trackio-project)"):
        validate(parse_args(f"{FLAGS} {flag} x".split()), world_size=1)


@pytest.mark.parametrize("key", [None, "some"])
@pytest.mark.parametrize("mode", [None, "online"])
def test_wandb_stays_on_disk_where_no_account_is_known(
    key: str | None, mode: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Own folder, else that of the checkpoints; either is made."""
    package = Recorded("wandb")
    package.key = key
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    saved, own = tmp_path / "saved", tmp_path / "not" / "there"
    for flags, folder in (("", saved), (f"--wandb-save-dir {own}", own)):
        Writers(made(f"--wandb-project p --wandb-entity team --save {saved} {flags}")).close()
        assert package.opened["dir"] == str(folder) and folder.is_dir()
        assert (package.opened["entity"], package.opened["name"]) == ("team", None)
        assert package.opened["mode"] == (None if key or mode else "offline")
        assert ("`wandb sync`" in capsys.readouterr().out) is not bool(key or mode)


def test_an_older_wandb_is_asked_for_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its ``login`` cannot be kept from asking the user."""
    package: Any = Recorded("wandb")
    package.login = lambda key=None: pytest.fail("asks")
    package.api = SimpleNamespace(api_key="some")
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    Writers(made(f"--wandb-project p --save {tmp_path}")).close()
    assert package.opened["mode"] is None


# The packages themselves --------------------------------------------------------------------------


def installed(name: str) -> Callable[[Any], Any]:
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"{name} is not installed"
    )


def write(flags: str) -> None:
    run = made(flags)
    with Writers(run) as writers:
        for run.iteration in (1, 2):
            writers.add("lm loss", torch.tensor(3.0 / run.iteration))
            writers.add("dpp/bytes/0-1 (sent)", 8)
            writers.flush()


@installed("wandb")
def test_an_offline_run_of_wandb_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(f"{CASES['wandb']} --wandb-save-dir {tmp_path}")
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    assert all(name in written for name in (b"lm loss", b"dpp/bytes/0-1 (sent)", b"num_layers"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_mlflow_is_in_its_local_store(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no local store without it")
    write(f"{CASES['mlflow']} --mlflow-tracking-uri sqlite:///{tmp_path}/mlflow.db")
    (found,) = mlflow.search_runs(experiment_names=["p"], output_format="list")
    assert (found.info.run_name, found.info.status) == ("try", "FINISHED")
    assert found.data.params["num_layers"] == "2" and len(found.data.params) > 100
    assert found.data.metrics == {"lm loss": 1.5, "dpp/bytes/0-1 _sent_": 8.0}
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "lm loss")
    assert [(each.step, each.value) for each in history] == [(1, 3.0), (2, 1.5)]


@installed("trackio")
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_trackio_is_in_its_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    write(CASES["trackio"])
    assert list(tmp_path.glob("p*.db"))
