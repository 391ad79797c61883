"""The order of a save, and the parts of a checkpoint that a run takes over, without a model."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint import checkpointing
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer, Wanted
from megatron.dpp_train.checkpoint.plain_data import only_plain_data

ARGS = {
    "ckpt_format": "torch", "async_save": False, "exit_signal_handler": False,
    "save_retain_interval": None, "load": None, "ckpt_step": None, "pretrained_checkpoint": None,
    "exit_on_missing_checkpoint": False, "finetune": False, "load_hf": None, "no_load_optim": False,
    "no_load_rng": False, "no_save_optim": False, "no_save_rng": False, "fp16": False,
    "bf16": False, "use_torch_fsdp2": False, "use_distributed_optimizer": False, "world_size": 1,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
}  # fmt: skip


class Job:
    """A Checkpointer of one rank with a run that notes what happens, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **args: Any) -> None:
        self.events: list[str] = []
        self.run = SimpleNamespace(
            args=argparse.Namespace(**ARGS | {"save": str(folder)} | args),
            rank=0, is_first=True, iteration=0, flops_so_far=0.0, say=self._say,
            consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0,
        )  # fmt: skip
        self.folder = folder
        self.made: Any = object.__new__(Checkpointer)
        self.made._run, self.made._queue, self.made.last_saved = self.run, None, -1
        self.made._trainee = SimpleNamespace(optimizer=None, chunks=[], scheduler=None)
        self.made._models, self.made._random_state = [], None
        self.made._write = self._write
        self.fails, self.background = False, False
        patch = monkeypatch.setattr
        patch(checkpointing.dist, "barrier", lambda: self.events.append("barrier"))
        patch(checkpointing, "note_progress", lambda run, text: self.events.append(f"note {text}"))
        patch(checkpointing, "begun", self._begun)
        patch(checkpointing, "update_num_microbatches", lambda n: self.events.append(f"ramp {n}"))
        patch(checkpointing, "check_model", lambda *_: None)
        patch(checkpointing, "verify", lambda *_: self.events.append("verify"))

    @contextlib.contextmanager
    def _begun(self, _: Any) -> Iterator[None]:
        yield

    def _say(self, text: str) -> None:
        self.events.append(text.split()[0])

    def _write(self, target: Path) -> bool:
        self.events.append(f"write {target.name}")
        if self.run.is_first:
            (target / "state").write_text(str(self.run.iteration))
        if self.fails:
            raise OSError("no room")
        return self.background

    def save(self, iteration: int) -> None:
        self.run.iteration = iteration
        self.made.save()

    def there(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("iter_*"))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    return Job(monkeypatch, tmp_path)


# Saving -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_committed_between_barriers_after_all_have_written(job: Job) -> None:
    job.save(7)
    assert job.events == [
        "saving", "barrier", "write iter_0000007.unfinished", "barrier", "successfully",
        "note Saved checkpoint\tIteration: 7", "barrier",
    ]  # fmt: skip
    assert (job.folder / files.TRACKER).read_text() == "7" and job.there() == ["iter_0000007"]
    assert job.made.last_saved == 7


def test_only_the_first_rank_makes_directories_and_commits(job: Job) -> None:
    job.run.is_first = False
    job.save(7)
    assert [event for event in job.events if event == "barrier"] == ["barrier"] * 3
    assert not list(job.folder.iterdir())


def test_a_save_that_fails_commits_nothing(job: Job) -> None:
    job.save(3)
    job.fails = True
    with pytest.raises(DataError, match=r"iter_0000006\.unfinished: saving failed: no room"):
        job.save(6)
    assert (job.folder / files.TRACKER).read_text() == "3"
    assert job.there() == ["iter_0000003", "iter_0000006.unfinished"]
    assert job.made.last_saved == 3


def test_a_second_attempt_keeps_no_file_of_the_first(job: Job) -> None:
    stale = files.begin(job.folder, 6) / "stale"
    stale.write_text("x")
    job.save(6)
    names = {path.name for path in (job.folder / "iter_0000006").iterdir()}
    assert "state" in names and "stale" not in names


def test_a_save_in_the_background_is_not_committed_yet(job: Job) -> None:
    job.background = True
    job.save(3)
    assert not (job.folder / files.TRACKER).exists() and job.events.count("barrier") == 1
    assert job.made.last_saved == 3


@pytest.mark.parametrize(
    ("interval", "saved", "kept"),
    [
        (None, [5, 10, 15], [5, 10, 15]),
        (10, [5, 10, 15, 18, 20], [10, 20]),
        (10, [10, 15], [10, 15]),
        (10, [15, 15], [15]),
        (1, [5, 6], [5, 6]),
    ],
)
def test_the_checkpoint_before_goes_unless_it_is_to_be_kept(
    job: Job, interval: int | None, saved: list[int], kept: list[int]
) -> None:
    job.run.args.save_retain_interval = interval
    for iteration in saved:
        job.save(iteration)
    assert job.there() == [f"iter_{iteration:07d}" for iteration in kept]


def test_a_release_is_never_removed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no iteration, which is a multiple of any interval."""
    job.run.args.save_retain_interval = 10
    for iteration, goes in ((0, False), (10, False), (15, True), (20, False)):
        found = files.Found(job.folder, iteration)
        monkeypatch.setattr(files, "find", lambda root, found=found: found)
        assert job.made._to_remove(20) == (job.folder if goes else None)


def test_the_checkpoint_before_goes_after_the_commit(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run.args.save_retain_interval = 10
    job.save(5)

    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(files, "write_tracker", fail)
    with pytest.raises(DataError, match="no room"):
        job.save(6)
    assert "iter_0000005" in job.there()
    assert (job.folder / files.TRACKER).read_text() == "5"


@pytest.mark.parametrize("interval", [None, 10])
def test_a_save_needs_no_checkpoint_before(job: Job, interval: int | None) -> None:
    """Users make room while a run goes on."""
    job.run.args.save_retain_interval = interval
    job.save(5)
    shutil.rmtree(job.folder / "iter_0000005")
    job.save(6)
    assert (job.folder / files.TRACKER).read_text() == "6" and job.there() == ["iter_0000006"]


class Queue:
    """megatron-core's queue of background writes."""

    def __init__(self, events: list[str], waiting: int, fails: bool = False) -> None:
        self._events, self._waiting, self._fails = events, waiting, fails

    def get_num_unfinalized_calls(self) -> int:
        return self._waiting

    def maybe_finalize_async_calls(self, *, blocking: bool) -> None:
        self._events.append(f"finalize {blocking}")
        self._waiting = 0
        if self._fails:
            raise RuntimeError("worker died")

    def close(self, *, abort: bool) -> None:
        self._events.append(f"close {abort}")


def test_background_writes_are_awaited_before_the_next_save_and_at_the_end(job: Job) -> None:
    job.made._queue = Queue(job.events, 1)
    job.made.poll()
    job.made.poll()
    assert job.events == ["finalize False"], "nothing is left at the second look"
    job.made._queue = Queue(job.events, 1)
    job.events.clear()
    job.save(3)
    assert job.events[0] == "finalize True"
    job.made._queue = Queue(job.events, 1)
    job.events.clear()
    with job.made:
        pass
    assert job.events == ["finalize True", "close False"]
    job.made.close()
    assert job.events == ["finalize True", "close False"]


def test_after_an_error_background_writes_are_given_up(job: Job) -> None:
    job.made._queue = Queue(job.events, 1)
    with pytest.raises(ValueError, match="of the run"), job.made:
        raise ValueError("of the run")
    assert job.events == ["close True"]


def test_a_background_write_that_fails_is_named_by_its_iteration(job: Job) -> None:
    job.made._queue, job.made.last_saved = Queue(job.events, 1, fails=True), 8
    with pytest.raises(DataError, match=r"iter_0000008\.unfinished: saving failed: worker died"):
        job.made.poll()


# Loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "found", "expected"),
    [
        ({}, {}, (True, True, True)),
        ({"no_load_optim": True}, {}, (True, False, True)),
        ({"no_load_rng": True}, {}, (True, True, False)),
        ({"finetune": True}, {}, (False, False, False)),
        ({}, {"release": True}, (False, False, False)),
        ({}, {"pretrained": True}, (False, False, False)),
    ],
)
def test_a_new_run_takes_the_parameters_alone(
    args: dict[str, bool], found: dict[str, bool], expected: tuple[bool, bool, bool]
) -> None:
    wanted = Wanted.of(argparse.Namespace(**ARGS | args), files.Found(Path("x"), 3, **found))
    assert (wanted.progress, wanted.optimizer, wanted.random) == expected


STATE = {
    "iteration": 9,
    "num_floating_point_operations_so_far": 2.5,
    "args": SimpleNamespace(
        consumed_train_samples=36, skipped_train_samples=4, consumed_valid_samples=8
    ),
    "rng_state": ["states"],
}


def _progress(run: Any) -> tuple[float, ...]:
    return (
        run.iteration, run.flops_so_far, run.consumed_train_samples, run.skipped_train_samples,
        run.consumed_valid_samples,
    )  # fmt: skip


def test_a_resumed_run_goes_on_where_it_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(checkpointing.random_state, "restore", lambda _, s: restored.append(s))
    job.made._wanted = Wanted(progress=True, optimizer=False, random=True)
    job.made._apply(STATE, files.Found(Path("x"), 9))
    assert _progress(job.run) == (9, 2.5, 36, 4, 8)
    assert job.events == ["ramp 36", "barrier"]
    assert not restored, "loaders are built first"
    job.made.restore_random_state()
    job.made.restore_random_state()
    assert restored == [["states"]], "once"


def test_a_finetuned_run_starts_anew(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(checkpointing.random_state, "restore", lambda _, s: restored.append(s))
    job.made._wanted = Wanted(progress=False, optimizer=False, random=False)
    job.made._apply(STATE, files.Found(Path("x"), 9))
    job.made.restore_random_state()
    assert _progress(job.run) == (0, 0.0, 0, 0, 0)
    assert job.events == ["barrier"] and not restored


def test_a_chunk_that_does_not_fit_is_an_error_that_names_the_checkpoint(job: Job) -> None:
    loaded: list[Any] = []
    chunks = [SimpleNamespace(load_state_dict=loaded.append) for _ in range(2)]
    job.made._models, job.made._trainee.chunks = chunks, chunks
    job.made._apply_model({"model0": "a", "model1": "b"}, files.Found(Path("x"), 9))
    assert loaded == ["a", "b"]
    with pytest.raises(DataError, match=r"^x: does not fit this model \('model1'\)"):
        job.made._apply_model({"model0": "a"}, files.Found(Path("x"), 9))


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
def test_without_its_optimizer_state_the_main_copy_follows_the_model(
    job: Job, precision: str | None
) -> None:
    """Else the first step would put the random parameters back."""
    calls: list[str] = []
    job.made._trainee.optimizer = SimpleNamespace(reload_model_params=lambda: calls.append("x"))
    job.made._wanted = Wanted(progress=True, optimizer=False, random=True)
    if precision:
        setattr(job.run.args, precision, True)
    job.made._apply_optimizer({}, files.Found(Path("x"), 9))
    assert calls == (["x"] if precision else [])
    job.made._wanted.optimizer = True
    with pytest.raises(DataError, match="holds no optimizer state; add --no-load-optim"):
        job.made._apply_optimizer({}, files.Found(Path("x"), 9))


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
@pytest.mark.parametrize("trains", [True, False])
def test_the_main_copy_follows_the_parameters_of_a_hugging_face_model(
    job: Job, precision: str | None, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first step would put the random parameters back."""
    monkeypatch.setattr(checkpointing, "fill", lambda run, models: job.events.append("fill"))
    job.run.args.load_hf = "folder"
    if precision:
        setattr(job.run.args, precision, True)
    if trains:
        job.made._trainee.optimizer = SimpleNamespace(
            reload_model_params=lambda: job.events.append("reload")
        )
    job.made.load()
    copies = ["reload"] if trains and precision else []
    assert job.events == ["barrier", "fill", *copies, "barrier"]


def test_another_learning_rate_schedule_is_refused_with_the_flags(job: Job) -> None:
    def load(_: Any) -> None:
        raise AssertionError("min lr differs")

    job.made._trainee.scheduler = SimpleNamespace(load_state_dict=load)
    with pytest.raises(ConfigError, match=r"min lr differs; .*--override-opt_param-scheduler"):
        job.made._apply_scheduler({"opt_param_scheduler": {}}, files.Found(Path("x"), 9))


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"", "unreadable")])
def test_an_unreadable_torch_file_is_named(
    job: Job, monkeypatch: pytest.MonkeyPatch, content: bytes | None, why: str
) -> None:
    monkeypatch.setattr(checkpointing, "_rank_directory", lambda: "mp_rank_00")
    path = job.folder / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    refused = pytest.raises(DataError, match=f"model_optim_rng.pt: {why}")
    with refused, only_plain_data(job.folder):
        job.made._read_torch(files.Found(job.folder, 9))
    torch.save({"iteration": 9}, path)
    assert job.made._read_torch(files.Found(job.folder, 9)) == {"iteration": 9}


@pytest.mark.parametrize("missing_is_an_error", [False, True])
def test_without_a_checkpoint_a_run_starts_from_random_parameters_unless_told(
    job: Job, missing_is_an_error: bool
) -> None:
    job.run.args.load = str(job.folder)
    job.run.args.exit_on_missing_checkpoint = missing_is_an_error
    job.made._read = job.made._apply = None  # not called
    if missing_is_an_error:
        with pytest.raises(DataError, match="--exit-on-missing-checkpoint"):
            job.made.load()
    else:
        job.made.load()
        assert job.events == ["barrier", f"{job.folder}:"]


@pytest.mark.parametrize("first", [True, False])
def test_leftovers_are_tidied_by_the_first_rank_before_any_reads(job: Job, first: bool) -> None:
    job.save(3)
    files.begin(job.folder, 6)
    job.events.clear()
    job.run.args.load, job.run.is_first = str(job.folder), first
    job.made._read = lambda found: {"found": found}
    job.made._apply = lambda state, found: job.events.append(f"apply {state['found'].iteration}")
    job.made.load()
    rest = ["barrier", "loading", "verify", "apply 3", "successfully"]
    assert job.events == ["warning:"] * first + rest
    assert files.unfinished(job.folder) == (
        [] if first else [job.folder / "iter_0000006.unfinished"]
    )


# Layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "distributed", "optimizer", "refused"),
    [
        ("dp_reshardable", True, True, True),
        ("fully_reshardable", True, True, False),
        ("dp_reshardable", False, True, False),
        ("dp_reshardable", True, False, False),
    ],
)
def test_an_optimizer_state_of_one_layout_is_refused_by_another(
    job: Job, kind: str, distributed: bool, optimizer: bool, refused: bool
) -> None:
    job.run.args.use_distributed_optimizer = distributed
    job.made._wanted = Wanted(progress=True, optimizer=optimizer, random=True)
    saved = SimpleNamespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    expected = r"\(TP, PP\) is \(1, 1\), the checkpoint's \(2, 4\), and its distributed"
    with pytest.raises(ConfigError, match=expected) if refused else contextlib.nullcontext():
        job.made._check_resharding(saved, {"distrib_optim_sharding_type": kind})


def test_ranks_compare_what_must_be_equal_on_all() -> None:
    common = {"args": argparse.Namespace(a=1), "optimizer": "by rank", "iteration": 3}
    assert checkpointing._without_rank(common) == {"args": {"a": 1}, "iteration": 3}


def test_a_saved_run_tells_its_progress_where_megatron_looks(job: Job) -> None:
    job.run.iteration, job.run.consumed_train_samples = 9, 36
    job.run.skipped_train_samples, job.run.consumed_valid_samples = 4, 8
    job.run.args.rank = job.run.args.local_rank = 5
    saved = checkpointing._saved_args(job.run)
    assert (saved.iteration, saved.consumed_train_samples) == (9, 36)
    assert (saved.skipped_train_samples, saved.consumed_valid_samples) == (4, 8)
    assert (saved.rank, saved.local_rank) == (0, 0), "the same on all ranks"
    assert job.run.args.rank == 5
    job.run.flops_so_far = 7.5
    assert job.made._common_state(None)["num_floating_point_operations_so_far"] == 7.5


@pytest.mark.parametrize("persistent", [True, False])
def test_one_process_writes_in_the_background_if_it_is_to_stay(
    job: Job, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "AsyncCallsQueue", lambda stays: f"queue, {stays}")
    monkeypatch.setattr(checkpointing, "unwrap_model", lambda chunks: chunks)
    job.run.args.use_persistent_ckpt_worker = persistent
    for background, expected in ((True, f"queue, {persistent}"), (False, None)):
        job.run.args.async_save = background
        made: Any = Checkpointer(job.run, job.made._trainee)  # type: ignore[arg-type]
        assert made._queue == expected
