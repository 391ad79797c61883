"""The order of a save, and the parts of a checkpoint that a run takes over."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint import loader, random_state, saver
from megatron.dpp_train.checkpoint.contents import equal_on_all_ranks, rank_file
from megatron.dpp_train.checkpoint.loader import Wanted
from tests.checkpoint.small import ARGS, Chunk, Job

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch's, of its own formats
FORMS = ("torch", "torch_dist")

# Saving -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_committed_between_barriers_after_all_have_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run.args.log_progress = True
    seen: list[list[str]] = []

    def barrier() -> None:
        seen.append(
            sorted(str(each.relative_to(job.folder)) for each in job.folder.rglob("*.pt"))
            + job.there()
        )

    monkeypatch.setattr(dist, "barrier", barrier)
    job.save(7)
    file = "mp_rank_00/model_optim_rng.pt"
    assert seen == [
        ["iter_0000007.unfinished"],
        [f"iter_0000007.unfinished/{file}", "iter_0000007.unfinished"],
        [f"iter_0000007/{file}", "iter_0000007"],
    ]
    assert job.events == ["saving", "successfully"]
    assert job.newest() == "7" and job.door.last_saved == 7
    progress = (job.folder / "progress.txt").read_text()
    assert progress.endswith("Saved checkpoint\tIteration: 7\n")


def test_only_the_first_rank_makes_directories_and_commits(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    barriers: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append(job.there()))
    job.run.is_first = False
    job.save(7)
    written = ["iter_0000007.unfinished"]
    assert barriers == [[], written, written] and job.there() == written
    assert not (job.folder / files.TRACKER).exists()


def test_a_save_that_fails_commits_nothing(job: Job) -> None:
    job.save(3)

    def fail() -> None:
        raise OSError("no room")

    job.chunks[0].before_save = fail  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"iter_0000006\.unfinished: saving failed: no room"):
        job.save(6)
    assert job.newest() == "3"
    assert job.there() == ["iter_0000003", "iter_0000006.unfinished"]
    assert job.door.last_saved == 3


def test_a_second_attempt_keeps_no_file_of_the_first(job: Job) -> None:
    stale = files.begin(job.folder, 6) / "stale"
    stale.write_text("x")
    job.save(6)
    path = files.directory(job.folder, 6)
    assert rank_file(path).exists() and not (path / "stale").exists()


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


def test_a_release_is_never_removed(job: Job) -> None:
    """It has no iteration, which is a multiple of any interval."""
    job.save(5)
    files.directory(job.folder, 5).rename(job.folder / "release")
    (job.folder / files.TRACKER).write_text("release")
    job.run.args.save_retain_interval = 10
    job.save(15)
    assert (job.folder / "release").is_dir() and job.newest() == "15"


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
    assert "iter_0000005" in job.there() and job.newest() == "5"


@pytest.mark.parametrize("interval", [None, 10])
def test_a_save_needs_no_checkpoint_before(job: Job, interval: int | None) -> None:
    """Users make room while a run goes on."""
    job.run.args.save_retain_interval = interval
    job.save(5)
    shutil.rmtree(job.folder / "iter_0000005")
    job.save(6)
    assert job.newest() == "6" and job.there() == ["iter_0000006"]


class Queue:
    """megatron-core's queue of background writes, one of which is always under way."""

    events: list[str]
    fails = False

    def __init__(self, stays: bool) -> None:
        self.events.append(f"stays {stays}")
        self.waiting = 1

    def get_num_unfinalized_calls(self) -> int:
        return self.waiting

    def maybe_finalize_async_calls(self, *, blocking: bool) -> None:
        self.events.append(f"finalize {blocking}")
        self.waiting = 0
        if self.fails:
            raise RuntimeError("worker died")

    def schedule_async_request(self, request: Any) -> None:
        self.waiting = 1

    def close(self, *, abort: bool) -> None:
        self.events.append(f"close {abort}")


@pytest.fixture
def behind(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A run that saves in the background and has saved iteration 8."""
    monkeypatch.setattr(Queue, "events", job.events, raising=False)
    monkeypatch.setattr(saver, "AsyncCallsQueue", Queue)
    args = job.run.args
    args.async_save, args.ckpt_format = True, "torch_dist"
    job.save(8)
    job.events.clear()
    return job


def test_background_writes_are_awaited_before_the_next_save_and_at_the_end(behind: Job) -> None:
    behind.door.poll()
    behind.door.poll()
    assert behind.events == ["finalize False"], "nothing is left at the second look"
    behind.save(9)
    behind.events.clear()
    behind.save(10)
    assert behind.events[0] == "finalize True"
    behind.events.clear()
    with behind.door:
        pass
    assert behind.events == ["finalize True", "close False"]
    behind.door.close()
    assert behind.events == ["finalize True", "close False"]


def test_after_an_error_background_writes_are_given_up(behind: Job) -> None:
    with pytest.raises(ValueError, match="of the run"), behind.door:
        raise ValueError("of the run")
    assert behind.events == ["close True"]


def test_a_background_write_that_fails_is_named_by_its_iteration(
    behind: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queue, "fails", True)
    with pytest.raises(DataError, match=r"iter_0000008\.unfinished: saving failed: worker died"):
        behind.door.poll()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_one_process_writes_in_the_background_if_it_is_to_stay(
    job: Job, persistent: bool, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queue, "events", job.events, raising=False)
    monkeypatch.setattr(saver, "AsyncCallsQueue", Queue)
    job.run.args.use_persistent_ckpt_worker, job.run.args.async_save = persistent, background
    assert job.door.last_saved == -1
    assert job.events == [f"stays {persistent}"] * background


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
    given: Any = argparse.Namespace(**ARGS | args)
    wanted = Wanted.of(given, files.Found(Path("x"), 3, **found))
    assert (wanted.progress, wanted.optimizer, wanted.random) == expected


def _progress(run: Any) -> tuple[float, ...]:
    return (
        run.iteration, run.flops_so_far, run.consumed_train_samples, run.skipped_train_samples,
        run.consumed_valid_samples,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("finetune", [False, True])
def test_a_resumed_run_goes_on_where_it_was_and_a_finetuned_one_starts_anew(
    job: Job, form: str, finetune: bool
) -> None:
    job.run.args.ckpt_format, before_save = form, dict(vars(job.run.args), ckpt_format=form)
    job.run.consumed_train_samples, job.run.skipped_train_samples = 36, 4
    job.run.consumed_valid_samples, job.run.flops_so_far = 8, 2.5
    job.save(9)
    assert vars(job.run.args) == before_save
    torch.manual_seed(1)
    before = torch.get_rng_state()
    resumed = job.next(finetune=finetune)
    assert torch.equal(torch.get_rng_state(), before), "loaders are built first"
    assert _progress(resumed.run) == ((0, 0.0, 0, 0, 0) if finetune else (9, 2.5, 36, 4, 8))
    assert ("ramp 36" in resumed.events) is not finetune
    expected = (0, 9.0, 0, 0, 0) if finetune else (9, 9.0, 9, 0, 9)
    assert resumed.state() == expected


def test_random_states_are_restored_once_and_when_asked(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_state, "collect", lambda args, *, sharded: ["states"])
    restored: list[Any] = []
    monkeypatch.setattr(random_state, "restore", lambda _, states: restored.append(states))
    job.save(9)
    resumed = job.next()
    assert not restored
    resumed.door.restore_random_state()
    resumed.door.restore_random_state()
    job.next(no_load_rng=True).door.restore_random_state()
    assert restored == [["states"]]


@pytest.mark.parametrize("form", FORMS)
def test_chunks_have_names_and_one_that_does_not_fit_is_an_error(job: Job, form: str) -> None:
    job.run.args.ckpt_format = form
    job.chunks = [Chunk("a"), Chunk("b")]
    job.save(9)
    resumed = job.started()
    resumed.chunks = [Chunk("a"), Chunk("b")]
    resumed.door.load()
    assert [chunk.value for chunk in resumed.chunks] == [9.0, 9.0]
    for names in (["a", "c"], ["a", "b", "c"]):
        other = job.started()
        other.chunks = [Chunk(name) for name in names]
        with pytest.raises(DataError, match=r"iter_0000009: does not fit this model"):
            other.door.load()


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
def test_without_its_optimizer_state_the_main_copy_follows_the_model(
    job: Job, precision: str | None
) -> None:
    """Else the first step would put the random parameters back."""
    if precision:
        setattr(job.run.args, precision, True)
    job.run.args.no_save_optim = True
    job.save(9)
    resumed = job.next(no_load_optim=True)
    assert ("reload" in resumed.events) is bool(precision) and resumed.optimizer.moment == 0
    with pytest.raises(DataError, match="holds no optimizer state; add --no-load-optim"):
        job.next()


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
@pytest.mark.parametrize("trains", [True, False])
def test_the_main_copy_follows_the_parameters_of_a_hugging_face_model(
    job: Job, precision: str | None, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first step would put the random parameters back."""
    monkeypatch.setattr(loader, "fill", lambda run, models: job.events.append(f"{len(models)}"))
    job.run.args.load_hf = "folder"
    if precision:
        setattr(job.run.args, precision, True)
    if not trains:
        job.optimizer = None
    job.door.load()
    assert job.events == ["1", *["reload"] * (trains and precision is not None)]


def test_another_learning_rate_schedule_is_refused_with_the_flags(job: Job) -> None:
    def load(_: Any) -> None:
        raise AssertionError("min lr differs")

    job.save(9)
    resumed = job.started()
    resumed.scheduler.load_state_dict = load  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"min lr differs; .*--override-opt_param-scheduler"):
        resumed.door.load()


def test_another_learning_rate_schedule_is_said(job: Job) -> None:
    """A run that was continued with more steps had another learning rate without a word."""
    line = "learning rate: not as in the checkpoint: samples until the lowest 96 (there 48)"
    job.save(9)
    for total in (48, 96):
        resumed = job.started()
        resumed.scheduler.lr_decay_steps = total
        said: list[str] = []
        resumed.run.say = said.append
        resumed.door.load()
        assert (line in said) == (total == 96)


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"", "unreadable")])
def test_an_unreadable_torch_file_is_named(job: Job, content: bytes | None, why: str) -> None:
    path = rank_file(files.begin(job.folder, 9))
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    files.commit(job.folder, 9)
    with pytest.raises(DataError, match=f"model_optim_rng.pt: {why}"):
        job.next()


@pytest.mark.parametrize("missing_is_an_error", [False, True])
def test_without_a_checkpoint_a_run_starts_from_random_parameters_unless_told(
    job: Job, missing_is_an_error: bool
) -> None:
    job.run.args.exit_on_missing_checkpoint = missing_is_an_error
    if missing_is_an_error:
        with pytest.raises(DataError, match="--exit-on-missing-checkpoint"):
            job.next()
    else:
        assert job.next().events == [f"{job.folder}:"]


@pytest.mark.parametrize("first", [True, False])
def test_leftovers_are_tidied_by_the_first_rank_before_any_reads(
    job: Job, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(3)
    files.begin(job.folder, 6)
    resumed = job.started()
    resumed.run.is_first = first
    monkeypatch.setattr(dist, "barrier", lambda: resumed.events.append("barrier"))
    resumed.door.load()
    assert resumed.events[: first + 1] == [*["warning:"] * first, "barrier"]
    assert resumed.run.iteration == 3
    assert files.unfinished(job.folder) == (
        [] if first else [job.folder / "iter_0000006.unfinished"]
    )


# Layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "distributed", "optimizer", "refused"),
    [
        (False, True, True, True),
        (True, True, True, False),
        (False, False, True, False),
        (False, True, False, False),
    ],
)
def test_an_optimizer_state_of_one_layout_is_refused_by_another(
    job: Job, full: bool, distributed: bool, optimizer: bool, refused: bool
) -> None:
    args = job.run.args
    args.use_distributed_optimizer, args.ckpt_format = distributed, "torch_dist"
    args.dist_ckpt_optim_fully_reshardable = full
    args.distrib_optim_fully_reshardable_mem_efficient = False
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = 2, 4
    job.save(9)
    one = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    resumed = job.started(no_load_optim=not optimizer, **one)
    if refused:
        expected = r"\(TP, PP\) is \(1, 1\), the checkpoint's \(2, 4\), and its distributed"
        with pytest.raises(ConfigError, match=expected):
            resumed.door.load()
    else:
        resumed.door.load()
        assert resumed.optimizer.moment == (9 if optimizer else 0)


def test_ranks_compare_what_must_be_equal_on_all() -> None:
    common = {"args": argparse.Namespace(a=1), "optimizer": "by rank", "iteration": 3}
    assert equal_on_all_ranks(common) == {"args": {"a": 1}, "iteration": 3}


def test_a_saved_run_tells_its_progress_where_megatron_looks(job: Job) -> None:
    job.run.consumed_train_samples, job.run.skipped_train_samples = 36, 4
    job.run.consumed_valid_samples, job.run.flops_so_far = 8, 7.5
    job.run.args.rank = job.run.args.local_rank = 5
    job.save(9)
    state = torch.load(rank_file(files.directory(job.folder, 9)), weights_only=False)
    saved = state["args"]
    assert (saved.iteration, saved.consumed_train_samples) == (9, 36)
    assert (saved.skipped_train_samples, saved.consumed_valid_samples) == (4, 8)
    assert (saved.rank, saved.local_rank) == (0, 0), "the same on all ranks"
    assert job.run.args.rank == 5 and saved.add_position_embedding
    assert state["num_floating_point_operations_so_far"] == 7.5
    assert state["checkpoint_version"] == 3.0
