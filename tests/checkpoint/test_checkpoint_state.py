"""The state in a checkpoint: what is written, asked for and taken over."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import fully_parallel

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.checkpoint import checksums, contents, guards, loader, random_state, saver
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.contents import optimizer_file, rank_file
from tests.checkpoint.small import ARGS, Job
from tests.harmful import Harmful

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch's, of its own formats


# torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("replica", [0, 1])
def test_every_replica_writes_its_share_and_one_the_rest(
    job: Job, monkeypatch: pytest.MonkeyPatch, distributed: bool, optimizer: bool, replica: int
) -> None:
    monkeypatch.setattr(mpu, "get_expert_data_parallel_rank", lambda: replica)
    args, run = job.run.args, job.run
    args.use_distributed_optimizer, run.rank, run.is_first = distributed, 5, False
    args.no_save_optim, args.no_save_rng = not optimizer, True

    def collect(*_: Any, **__: Any) -> None:
        job.events.append("collect")  # a collective of all replicas

    monkeypatch.setattr(random_state, "collect", collect)
    job.save(7)
    assert job.events.count("collect") == 1
    target = files.unfinished_directory(job.folder, 7)
    assert optimizer_file(target).exists() is (distributed and optimizer)
    notes = [each.name for each in target.glob(".checksums-*")]
    assert rank_file(target).exists() is (replica == 0) and notes == [".checksums-5"] * (
        replica == 0
    )
    if replica == 0:
        state = torch.load(rank_file(target), weights_only=False)
        assert ("optimizer" in state) == ("opt_param_scheduler" in state) == optimizer
        assert "rng_state" not in state


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("wanted", [True, False])
def test_an_optimizer_of_another_kind_is_refused_where_its_state_is_wanted(
    job: Job, form: str, wanted: bool
) -> None:
    job.run.args.ckpt_format = form
    job.save(9)
    resumed = job.started(use_distributed_optimizer=True, no_load_optim=not wanted)
    if wanted:
        with pytest.raises(ConfigError, match="was saved without --use-distributed-optimizer"):
            resumed.door.load()
    else:
        resumed.door.load()
        assert resumed.state() == (9, 9, 0, 0, 0)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_an_optimizer_takes_its_state_and_its_share(
    job: Job, monkeypatch: pytest.MonkeyPatch, distributed: bool, form: str
) -> None:
    job.run.args.ckpt_format, job.run.args.use_distributed_optimizer = form, distributed
    job.save(9)
    for name in ("add_steps", "own_steps"):
        monkeypatch.setattr(loader, name, lambda made, *_, name=name: made.events.append(name))
    resumed = job.next()
    share = distributed and form == "torch"
    assert resumed.state() == (9, 9, 9, 9 if share else 0, 9)
    taken = [each for each in resumed.events if "steps" in each or each in ("moment", "share")]
    assert taken == [
        *["add_steps"] * (form == "torch_dist"), "moment", *["share"] * share, "own_steps"
    ]  # fmt: skip
    stub = job.started()
    stub.optimizer.is_stub_optimizer = True
    stub.door.load()
    assert stub.state() == (9, 9, 0, 0, 9), "a rank whose parameters are all frozen"


def test_the_state_of_sharded_parameters_is_taken_as_shards(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--use-torch-fsdp2``: PyTorch's optimizers mix no local tensors with sharded parameters."""
    job.save(9)
    shards = {"moment": torch.tensor([4.0])}
    monkeypatch.setattr(loader, "as_shards", lambda optimizer, state: shards)
    assert job.next(use_torch_fsdp2=True).optimizer.moment == 4
    assert job.next().optimizer.moment == 9


def test_progress_that_an_old_checkpoint_lacks_is_none(job: Job) -> None:
    for saved in ({}, {"args": argparse.Namespace()}):
        path = rank_file(files.begin(job.folder, 9))
        path.parent.mkdir()
        torch.save({"iteration": 9, "model": {"weight": torch.ones(9)}, **saved}, path)
        files.commit(job.folder, 9)
        old = job.started(no_load_optim=True)
        run = old.run
        run.consumed_train_samples = run.skipped_train_samples = run.consumed_valid_samples = 5
        old.door.load()
        samples = (
            run.consumed_train_samples, run.skipped_train_samples, run.consumed_valid_samples
        )  # fmt: skip
        assert samples == ((0, 0, 0) if saved else (5, 5, 5))
        assert run.iteration == 9 and run.flops_so_far == 0.0


def test_loading_a_torch_file_runs_nothing_that_it_names(job: Job, tmp_path: Path) -> None:
    path = rank_file(files.begin(job.folder, 9))
    path.parent.mkdir()
    torch.save({"model": Harmful(tmp_path / "made")}, path)
    files.commit(job.folder, 9)
    with pytest.raises(DataError, match=r"model_optim_rng\.pt: asks for posix\.mkdir, which is"):
        job.next()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_compare_all_files_between_them_and_all_hear_of_damage(
    job: Job, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"file{number}" for number in range(5)]
    for name in names:
        (job.folder / name).write_text(name)
    checksums.write(job.folder)
    compared: list[str] = []
    real = checksums.check

    def check(path: Path, sums: Any, share: Any) -> None:
        compared.extend(share)
        real(path, sums, share)

    said: list[str] = []

    def gather(errors: list[str], error: str) -> None:
        said.append(error)
        errors[:] = [*said, *[""] * (world_size - len(said))]

    monkeypatch.setattr(checksums, "check", check)
    monkeypatch.setattr(guards.dist, "all_gather_object", gather)
    job.run.args.world_size = world_size
    found = files.Found(job.folder, 9)
    for job.run.rank in range(world_size):
        guards.verify(job.run, found)
    assert sorted(compared) == names
    (job.folder / "file3").write_text("FILE3")
    said[:] = ["file of another rank"] if world_size > 1 else []
    job.run.rank = 3 % world_size
    with pytest.raises(DataError, match=r"(file of another rank; )?.*file3: damaged since"):
        guards.verify(job.run, found)
    (job.folder / checksums.NAME).unlink()
    said[:], job.events[:] = [], []
    guards.verify(job.run, found)
    assert job.events == [f"{job.folder}:"], "said, and loaded unverified"


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_load_compares_the_checksums_of_all_files(job: Job, form: str) -> None:
    job.run.args.ckpt_format = form
    job.save(9)
    victim = sorted(files.directory(job.folder, 9).rglob("*.distcp" if "dist" in form else "*.pt"))
    content = bytearray(victim[-1].read_bytes())
    content[len(content) // 2] ^= 1
    victim[-1].write_bytes(content)
    with pytest.raises(DataError, match=f"{victim[-1].name}: damaged since it was saved"):
        job.next()


# torch_dist ---------------------------------------------------------------------------------------


@pytest.fixture
def sharded(job: Job) -> Job:
    job.run.args.ckpt_format = "torch_dist"
    return job


def test_a_request_for_the_optimizers_state_fills_it_first(
    sharded: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fill_state", "teach_sgd"):
        monkeypatch.setattr(contents, name, lambda made, name=name: made.events.append(name))
    sharded.save(9)
    assert sharded.events == ["saving", "shards []", "successfully"]
    events = sharded.next().events
    asked = events.index("fill_state")
    assert events[asked : asked + 3] == ["fill_state", "teach_sgd", "shards ['is_loading']"]
    events = sharded.next(no_load_optim=True).events
    assert "fill_state" not in events and "moment" not in events


def test_a_run_that_only_evaluates_has_no_optimizer_to_load(sharded: Job) -> None:
    sharded.save(9)
    evaluates = sharded.started()
    evaluates.optimizer = None
    evaluates.door.load()
    assert (evaluates.run.iteration, evaluates.chunks[0].value) == (9, 9.0)


def test_a_shard_is_one_object_while_an_optimizer_looks_for_its_state(sharded: Job) -> None:
    """By the identity of its shard, of which ``to_local`` makes a new one at each call."""
    from megatron.core.dist_checkpointing import optimizer as core

    local_tensor = torch.ones(2)

    class Sharded(torch.Tensor):
        _local_tensor = local_tensor

        def to_local(self) -> torch.Tensor:
            return local_tensor.view(2)

    parameter = torch.ones(4).as_subclass(Sharded)
    asked: list[bool] = []

    def shards(state: Any, metadata: Any) -> dict[str, Any]:
        local = core.to_local_if_dtensor
        asked.append(local(parameter) is local(parameter) is local_tensor)
        return {}

    sharded.optimizer.sharded_state_dict = shards
    before = core.to_local_if_dtensor
    sharded.save(3)
    assert asked == [True] and core.to_local_if_dtensor is before


BOTH = ["check_optimizer", "check_model"]


@pytest.mark.parametrize(
    ("saved", "flags", "checked", "optimizer", "random"),
    [
        ({}, {}, BOTH, True, True),
        ({}, {"finetune": True}, [], False, False),
        ({}, {"no_load_optim": True}, ["check_model"], False, True),
        ({}, {"no_load_rng": True}, BOTH, True, False),
        ({"no_save_optim": True}, {}, ["check_model"], False, True),
        ({"no_save_rng": True}, {}, BOTH, True, False),
        ({"pipeline_model_parallel_size": 2}, {}, BOTH, True, False),
        ({"tensor_model_parallel_size": 2}, {}, BOTH, True, False),
        ({"tensor_model_parallel_size": 2}, {"no_load_optim": True}, ["check_model"], False, False),
        ({"tensor_model_parallel_size": 2}, {"finetune": True}, [], False, False),
    ],
)
def test_a_load_takes_what_was_saved_and_is_wanted(
    sharded: Job, monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], flags: dict[str, Any],
    checked: list[str], optimizer: bool, random: bool,
) -> None:  # fmt: skip
    """Random states of another layout are left alone."""
    vars(sharded.run.args).update(saved)
    sharded.save(9)
    usual = {name: ARGS[name] for name in saved}
    resumed = sharded.started(**{**usual, **flags})
    told: list[str] = []
    restored: list[Any] = []
    for name in BOTH:
        monkeypatch.setattr(loader, name, lambda *_, name=name: told.append(name))
    monkeypatch.setattr(random_state, "restore", lambda _, states: restored.append(states))
    resumed.door.load()
    resumed.door.restore_random_state()
    assert resumed.optimizer.moment == 9 * optimizer and bool(restored) is random
    assert list(dict.fromkeys(told)) == checked and resumed.chunks[0].value == 9.0
    other_layout = "parallel" in "".join(saved)
    assert ("(TP," in resumed.events) == (other_layout and not resumed.run.args.finetune)


class Together:
    """Wraps a strategy as megatron-core's class does, and notes with whom."""

    def __init__(self, given: list[Any], kind: Any) -> None:
        self._given, self._kind = given, kind

    def __call__(self, strategy: Any, group: Any, *rest: Any) -> Any:
        self._given.append((group, *rest))
        return self._kind(strategy, group, *rest)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_replicas_write_and_read_a_checkpoint_together_where_that_is_asked_for(
    sharded: Job, monkeypatch: pytest.MonkeyPatch, together: bool, constant: bool
) -> None:
    """The ranks that hold the same parameters; context-parallel ones are among them."""
    given: list[Any] = []
    asked: list[bool] = []
    group = mpu.get_data_parallel_group()

    def parameters_replicas(*, with_context_parallel: bool = False, **_: Any) -> Any:
        asked.append(with_context_parallel)
        return group

    monkeypatch.setattr(mpu, "get_data_parallel_group", parameters_replicas)
    for module, name in ((saver, "Save"), (loader, "Load")):
        name = f"FullyParallel{name}StrategyWrapper"
        monkeypatch.setattr(module, name, Together(given, getattr(fully_parallel, name)))
    args = sharded.run.args
    args.ckpt_assume_constant_structure, args.ckpt_fully_parallel_save = constant, together
    args.ckpt_fully_parallel_load = together
    for iteration in (8, 9):
        sharded.save(iteration)
    assert sharded.next().state() == (9, 9, 9, 0, 9)
    assert given == ([(group, constant), (group,)] if together else [])
    assert all(asked)


def test_a_state_that_does_not_fit_is_an_error_that_names_the_checkpoint(
    sharded: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded.save(9)
    unfit = (KeyError("x"), OSError("x"), dist_checkpointing.core.CheckpointingException("x"))
    for error in unfit:

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(dist_checkpointing, "load", fail)
        with pytest.raises(DataError, match=r"iter_0000009: does not fit this model \('?x"):
            sharded.next()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_in_the_background_commits_when_it_is_done(
    sharded: Job, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    given: list[Any] = []
    real = dist_checkpointing.save

    def save(*words: Any, **rest: Any) -> Any:
        given.append(rest["validate_access_integrity"])
        assert rest["async_sharded_save"] is background
        return real(*words, **rest)

    monkeypatch.setattr(dist_checkpointing, "save", save)
    args = sharded.run.args
    args.async_save, args.ckpt_assume_constant_structure = background, True
    sharded.save(3)
    tracker = sharded.folder / files.TRACKER
    assert given == [True], "at the first save"
    assert tracker.exists() is not background and sharded.door.last_saved == 3
    sharded.run.iteration = 4  # the run goes on
    sharded.door.poll()
    assert tracker.read_text() == "3" and sharded.next().state() == (3, 3, 3, 0, 3)
    sharded.save(5)
    assert given[-1] is False, "the structure is known"
    args.ckpt_assume_constant_structure = False
    sharded.save(6)
    assert given[-1] is True
    sharded.door.close()
    assert tracker.read_text() == "6"


@pytest.mark.parametrize(("distributed", "full"), [(False, False), (True, False), (True, True)])
def test_a_checkpoint_says_how_its_optimizer_is_divided(
    sharded: Job, distributed: bool, full: bool
) -> None:
    efficient = "distrib_optim_fully_reshardable_mem_efficient"
    args = sharded.run.args
    args.use_distributed_optimizer, args.dist_ckpt_optim_fully_reshardable = distributed, full
    setattr(args, efficient, True)
    sharded.save(9)
    kind = "fully_reshardable" if full else "dp_reshardable"
    expected = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    expected |= {"distrib_optim_sharding_type": kind} if distributed else {}
    expected |= {efficient: True} if full else {}
    group = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    assert sharded.chunks[0].metadata == expected | group
    resumed = sharded.next()
    noted = resumed.chunks[0].metadata
    assert {name: noted[name] for name in expected} == expected
    assert noted["dp_cp_group"] is group["dp_cp_group"]


@pytest.mark.parametrize(
    ("pipeline", "expert", "name"),
    [(1, 1, "mp_rank_03"), (4, 1, "mp_rank_03_002"), (1, 4, "mp_rank_03_001"),
     (4, 4, "mp_rank_03_002_001")],
)  # fmt: skip
def test_a_rank_writes_into_a_directory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, pipeline: int, expert: int, name: str
) -> None:
    groups = SimpleNamespace(
        get_pipeline_model_parallel_world_size=lambda: pipeline,
        get_expert_model_parallel_world_size=lambda: expert,
        get_tensor_model_parallel_rank=lambda: 3,
        get_pipeline_model_parallel_rank=lambda: 2,
        get_expert_model_parallel_rank=lambda: 1,
    )
    monkeypatch.setattr(contents, "mpu", groups)
    assert rank_file(Path("x")) == Path("x") / name / "model_optim_rng.pt"
    assert optimizer_file(Path("x")) == Path("x") / name / "distrib_optim.pt"
