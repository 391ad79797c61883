"""The state in a checkpoint: what is written, asked for and taken over, without a model."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import checkpointing, checksums, saving
from megatron.dpp_train.checkpoint import files as files
from megatron.dpp_train.checkpoint.checkpointing import Checkpointer, Wanted
from tests.checkpoint.test_checkpointing import Job
from tests.harmful import Harmful


class Optimizer:
    """Notes what it is asked for."""

    is_stub_optimizer = False

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def save_parameter_state(self, path: str) -> None:
        self.events.append(f"save {Path(path).name}")

    def load_parameter_state(self, path: str) -> None:
        assert not torch.is_grad_enabled(), "in fp32 it copies into views of parameters"
        self.events.append(f"load {Path(path).name}")

    def load_state_dict(self, state: Any) -> None:
        assert not torch.is_grad_enabled(), "in fp32 it copies into views of parameters"
        self.events.append(f"take {state}")

    def state_dict(self) -> str:
        return "optimizer's"

    def sharded_state_dict(self, state: Any, metadata: Any, **options: Any) -> Any:
        self.events.append(f"shards {sorted(options)}")
        return "optimizer's shards"


class Model:
    def state_dict_for_save_checkpoint(self) -> str:
        return "model's"

    def sharded_state_dict(self, metadata: Any) -> str:
        return "model's shards"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Job:
    """A rank whose write and read are the real ones."""
    made = Job(monkeypatch, tmp_path, world_size=2, async_save=False)
    del made.made._write
    patch = monkeypatch.setattr
    made.made._trainee = SimpleNamespace(
        optimizer=Optimizer(made.events), chunks=[Model()],
        scheduler=SimpleNamespace(
            state_dict=lambda: "scheduler's",
            load_state_dict=lambda state: made.events.append(f"schedule {state}"),
        ),
    )  # fmt: skip
    made.made._models, made.made._strategy = [Model()], None
    made.made._wanted = Wanted(progress=True, optimizer=True, random=True)
    patch(checkpointing, "_rank_directory", lambda: "mp_rank_00")
    patch(checkpointing.random_state, "collect", lambda args, *, sharded: ["states", sharded])
    patch(checkpointing.mpu, "get_expert_data_parallel_rank", lambda: 0)
    patch(checkpointing, "fill_state", lambda _: made.events.append("fill"))
    patch(checkpointing, "teach_sgd", lambda _: made.events.append("teach"))
    for name in ("own_steps", "add_steps"):
        patch(checkpointing, name, lambda *_, name=name: made.events.append(name))
    patch(checkpointing, "_content_metadata", lambda _: {"kind": "a", "dp_cp_group": "group"})
    return made


# torch --------------------------------------------------------------------------------------------


def test_a_torch_checkpoint_is_committed_by_the_save_that_wrote_it(job: Job) -> None:
    job.save(7)
    assert (job.folder / files.TRACKER).read_text() == "7"
    path = job.folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    assert state["model"] == "model's" and state["iteration"] == 7
    assert (state["optimizer"], state["opt_param_scheduler"]) == ("optimizer's", "scheduler's")
    assert state["rng_state"] == ["states", False]


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("replica", [0, 1])
def test_every_replica_writes_its_share_and_one_the_rest(
    job: Job, monkeypatch: pytest.MonkeyPatch, distributed: bool, optimizer: bool, replica: int
) -> None:
    monkeypatch.setattr(checkpointing.mpu, "get_expert_data_parallel_rank", lambda: replica)
    job.run.args.use_distributed_optimizer, job.run.rank = distributed, 5
    job.run.args.no_save_optim, job.run.args.no_save_rng = not optimizer, True

    def collect(*_: Any, **__: Any) -> None:
        job.events.append("collect")  # a collective of all replicas

    monkeypatch.setattr(checkpointing.random_state, "collect", collect)
    job.made._write_torch(job.folder)
    assert job.events == [*["save distrib_optim.pt"] * (distributed and optimizer), "collect"]
    path = job.folder / "mp_rank_00" / "model_optim_rng.pt"
    notes = [each.name for each in job.folder.glob(".checksums-*")]
    assert path.exists() is (replica == 0) and notes == [".checksums-5"] * (replica == 0)
    if path.exists():
        state = torch.load(path, weights_only=False)
        assert ("optimizer" in state) == ("opt_param_scheduler" in state) == optimizer
        assert "rng_state" not in state


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_optimizers_are_compared_where_one_was_saved_and_is_wanted(
    job: Job, monkeypatch: pytest.MonkeyPatch, wanted: bool, saved: bool
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(checkpointing, "check_optimizer", lambda *given: compared.append(given))
    state = {"args": "saved"} | ({"optimizer": 1} if saved else {})
    monkeypatch.setattr(torch, "load", lambda *_, **__: state)
    job.made._wanted.optimizer = wanted
    assert job.made._read_torch(files.Found(job.folder, 9)) is state
    assert compared == [(job.run.args, "saved", job.folder)] * (wanted and saved)
    state.pop("args")
    job.made._read_torch(files.Found(job.folder, 9))
    assert len(compared) == (wanted and saved), "an old checkpoint without arguments"


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("torch_dist", [False, True])
def test_an_optimizer_takes_its_state_and_its_share(
    job: Job, monkeypatch: pytest.MonkeyPatch, distributed: bool, torch_dist: bool
) -> None:
    monkeypatch.setattr(files.Found, "is_distributed", torch_dist)
    job.run.args.use_distributed_optimizer = distributed
    job.made._apply_optimizer(
        {"optimizer": "o", "opt_param_scheduler": "s"}, files.Found(job.folder, 9)
    )
    assert job.events == [
        *["add_steps"] * torch_dist, "take o",
        *["load distrib_optim.pt"] * (distributed and not torch_dist), "own_steps", "schedule s",
    ]  # fmt: skip
    job.events.clear()
    job.made._trainee.optimizer.is_stub_optimizer = True
    job.made._apply_optimizer(
        {"optimizer": "o", "opt_param_scheduler": "s"}, files.Found(job.folder, 9)
    )
    assert job.events == ["schedule s"], "a rank whose parameters are all frozen"


def test_the_state_of_sharded_parameters_is_taken_as_shards(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--use-torch-fsdp2``: PyTorch's optimizers mix no local tensors with sharded parameters."""
    monkeypatch.setattr(checkpointing, "as_shards", lambda optimizer, state: f"shards of {state}")
    job.run.args.use_torch_fsdp2 = True
    job.made._apply_optimizer(
        {"optimizer": "o", "opt_param_scheduler": "s"}, files.Found(job.folder, 9)
    )
    assert job.events == ["take shards of o", "own_steps", "schedule s"]


def test_progress_that_an_old_checkpoint_lacks_is_none(job: Job) -> None:
    job.made._trainee.optimizer, job.made._trainee.chunks, job.made._models = None, [], []
    job.run.consumed_train_samples = job.run.skipped_train_samples = 5
    job.run.consumed_valid_samples = 5
    job.made._apply({"iteration": 9, "args": SimpleNamespace()}, files.Found(job.folder, 9))
    assert (job.run.consumed_train_samples, job.run.skipped_train_samples) == (0, 0)
    assert job.run.consumed_valid_samples == 0 and job.run.flops_so_far == 0.0


def test_loading_a_torch_file_runs_nothing_that_it_names(job: Job) -> None:
    path = job.folder / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    torch.save({"model": Harmful(job.folder / "made")}, path)
    job.folder.joinpath("mp_rank_00").rename(files.begin(job.folder, 9) / "mp_rank_00")
    files.commit(job.folder, 9)
    job.run.args.load = str(job.folder)
    with pytest.raises(DataError, match=r"model_optim_rng\.pt: asks for posix\.mkdir, which is"):
        job.made.load()
    assert not (job.folder / "made").exists()


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
    monkeypatch.setattr(saving.dist, "all_gather_object", gather)
    job.run.args.world_size = world_size
    found = files.Found(job.folder, 9)
    for job.run.rank in range(world_size):
        saving.verify(job.run, found)
    assert sorted(compared) == names
    (job.folder / "file3").write_text("FILE3")
    said[:] = ["file of another rank"] if world_size > 1 else []
    job.run.rank = 3 % world_size
    with pytest.raises(DataError, match=r"(file of another rank; )?.*file3: damaged since"):
        saving.verify(job.run, found)
    (job.folder / checksums.NAME).unlink()
    said[:], job.events[:] = [], []
    saving.verify(job.run, found)
    assert job.events == [f"{job.folder}:"], "said, and loaded unverified"


# torch_dist ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loading", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_request_for_the_optimizers_state_fills_it_first(
    job: Job, loading: bool, wanted: bool
) -> None:
    """By the flags of a save, or what a load takes over."""
    job.made._wanted.optimizer = wanted if loading else not wanted
    job.run.args.no_save_optim = not wanted if not loading else wanted
    state = job.made._sharded_state({}, with_random=True, loading=loading)
    assert state["model"] == "model's shards" and state["rng_state"] == ["states", True]
    assert ("optimizer" in state) == ("opt_param_scheduler" in state) == wanted
    asked = ["fill", "teach", "shards ['is_loading']"] if loading else ["shards []"]
    assert job.events == (asked if wanted else [])
    assert "rng_state" not in job.made._sharded_state({}, with_random=False)
    job.made._trainee.optimizer = None  # of a run that only evaluates
    assert "optimizer" not in job.made._sharded_state({}, with_random=True, loading=loading)


def test_a_shard_is_one_object_while_an_optimizer_looks_for_its_state(job: Job) -> None:
    """By the identity of its shard, of which ``to_local`` makes a new one at each call."""
    from megatron.core.dist_checkpointing import optimizer as core

    class Sharded(torch.Tensor):
        _local_tensor = torch.ones(2)

        def to_local(self) -> torch.Tensor:
            return self._local_tensor.view(2)

    parameter = torch.ones(4).as_subclass(Sharded)
    asked: list[bool] = []

    def shards(state: Any, metadata: Any) -> str:
        local = core.to_local_if_dtensor
        asked.append(local(parameter) is local(parameter) is Sharded._local_tensor)
        return "optimizer's shards"

    job.made._trainee.optimizer.sharded_state_dict = shards
    before = core.to_local_if_dtensor
    job.made._sharded_state({}, with_random=True)
    assert asked == [True] and core.to_local_if_dtensor is before


def group(*, with_context_parallel: bool) -> str:
    """Of the ranks that hold the same parameters: context-parallel ones are among them."""
    return "data and context" if with_context_parallel else "data"


class Reader:
    """A ``torch_dist`` checkpoint with these arguments; notes each request."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch, **saved: Any) -> None:
        self.checked: list[str] = []
        self.requests: list[tuple[bool, bool]] = []
        self.strategies: list[Any] = []
        usual = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        common = {"args": SimpleNamespace(**usual | saved)}
        core, patch = checkpointing.dist_checkpointing, monkeypatch.setattr
        patch(core, "load_common_state_dict", lambda path: common)
        patch(core, "load_content_metadata", lambda preloaded_state_dict: None)
        patch(core, "load", self._load)
        patch(checkpointing, "get_default_load_sharded_strategy", lambda path: "plain")
        patch(checkpointing, "FullyParallelLoadStrategyWrapper", lambda *given: given)
        patch(checkpointing.mpu, "get_data_parallel_group", group)
        for name in ("check_optimizer", "check_model"):
            patch(checkpointing, name, lambda *_, name=name: self.checked.append(name))
        job.run.args.ckpt_fully_parallel_load = False
        job.run.args.dist_ckpt_strictness = "strict"
        real = job.made._sharded_state
        job.made._sharded_state = lambda metadata, **given: self._note(real, metadata, **given)
        self.error: Exception | None = None

    def _note(self, real: Any, metadata: Any, *, with_random: bool, loading: bool) -> Any:
        assert metadata["dp_cp_group"] == "data and context"
        state = real(metadata, with_random=with_random, loading=loading)
        self.requests.append(("optimizer" in state, "rng_state" in state))
        return state

    def _load(self, request: Any, path: str, strategy: Any, strict: str) -> Any:
        self.strategies.append(strategy)
        assert strict == "strict"
        if self.error is not None:
            raise self.error
        return {"rng_state": "kept", "path": path}


@pytest.mark.parametrize(
    ("saved", "wanted", "checked", "request_"),
    [
        ({}, (True, True, True), ["check_optimizer", "check_model"], (True, True)),
        ({}, (False, False, False), [], (False, False)),
        ({}, (True, False, True), ["check_model"], (False, True)),
        ({"no_save_optim": True}, (True, True, True), ["check_model"], (False, True)),
        ({"no_save_rng": True}, (True, True, True), ["check_optimizer", "check_model"],
         (True, False)),
        ({"pipeline_model_parallel_size": 2}, (True, True, True),
         ["check_optimizer", "check_model"], (True, False)),
        ({"tensor_model_parallel_size": 2}, (True, True, False),
         ["check_optimizer", "check_model"], (True, False)),
        ({"tensor_model_parallel_size": 2}, (True, False, True), ["check_model"], (False, False)),
        ({"tensor_model_parallel_size": 2}, (False, False, False), [], (False, False)),
    ],
)  # fmt: skip
def test_a_load_asks_for_what_was_saved_and_is_wanted(
    job: Job, monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any],
    wanted: tuple[bool, bool, bool], checked: list[str], request_: tuple[bool, bool],
) -> None:  # fmt: skip
    """Random states of another layout are left alone."""
    reader = Reader(job, monkeypatch, **saved)
    job.made._wanted = Wanted(*wanted)
    state = job.made._read_distributed(files.Found(job.folder, 9))
    assert reader.checked == checked and reader.requests == [request_]
    assert reader.strategies == ["plain"]
    assert state["path"] == str(job.folder)
    assert ("rng_state" in state) == request_[1]
    assert ("(TP," in job.events) == (wanted[0] and "parallel" in "".join(saved))


def test_replicas_read_a_checkpoint_together_where_that_is_asked_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(job, monkeypatch)
    job.run.args.ckpt_fully_parallel_load = True
    job.made._read_distributed(files.Found(job.folder, 9))
    assert reader.strategies == [("plain", "data and context")]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_replicas_write_a_checkpoint_together_unless_told_otherwise(
    job: Job, monkeypatch: pytest.MonkeyPatch, together: bool, constant: bool
) -> None:
    plain = SimpleNamespace(use_cached_ckpt_structure=False)
    monkeypatch.setattr(checkpointing, "get_default_save_sharded_strategy", lambda kind: plain)
    monkeypatch.setattr(checkpointing, "FullyParallelSaveStrategyWrapper", lambda *given: given)
    monkeypatch.setattr(checkpointing.mpu, "get_data_parallel_group", group)
    args = job.run.args
    args.ckpt_assume_constant_structure, args.ckpt_fully_parallel_save = constant, together
    made = job.made._save_strategy()
    assert made == ((plain, "data and context", constant) if together else plain)
    assert plain.use_cached_ckpt_structure is constant


def test_a_state_that_does_not_fit_is_an_error_that_names_the_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(job, monkeypatch)
    for error in (KeyError("x"), OSError("x"), checkpointing.dist_checkpointing.core.
                  CheckpointingException("x")):  # fmt: skip
        reader.error = error
        with pytest.raises(DataError, match="does not fit this model"):
            job.made._read_distributed(files.Found(job.folder, 9))


@pytest.mark.parametrize("background", [False, True])
def test_a_save_in_the_background_commits_when_it_is_done(
    job: Job, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    given: dict[str, Any] = {}
    later: list[Any] = []
    request = SimpleNamespace(add_finalize_fn=later.append)

    def save(state: Any, folder: str, strategy: Any, **rest: Any) -> Any:
        given.update(rest, folder=folder, strategy=strategy)
        return request if background else None

    @contextlib.contextmanager
    def bound(*, in_background: bool) -> Iterator[None]:
        assert in_background is background
        yield

    core, patch = checkpointing.dist_checkpointing, monkeypatch.setattr
    patch(core, "save", save)
    patch(checkpointing, "bound_writers", bound)
    patch(checkpointing, "bound_request", lambda one: one)
    patch(checkpointing, "noting", lambda one, *_: one)
    patch(checkpointing, "note_shards", lambda *_: job.events.append("sums"))
    job.made._save_strategy = lambda: "strategy"
    queued: list[Any] = []
    job.made._queue = SimpleNamespace(
        schedule_async_request=queued.append, get_num_unfinalized_calls=lambda: 0
    )
    args = job.run.args
    args.ckpt_format, args.async_save = "torch_dist", background
    args.ckpt_assume_constant_structure, args.no_save_rng = True, False
    job.save(3)
    assert given["validate_access_integrity"] is True, "at the first save"
    assert given["async_sharded_save"] is background and given["strategy"] == "strategy"
    assert given["content_metadata"] == {"kind": "a"}
    assert ("sums" in job.events) is not background
    assert (job.folder / files.TRACKER).exists() is not background
    assert queued == [request] * background
    if background:
        job.run.iteration = 4
        later[0]()  # the run has gone on
        assert (job.folder / files.TRACKER).read_text() == "3"
    job.save(5)
    assert given["validate_access_integrity"] is False, "the structure is known"
    args.ckpt_assume_constant_structure = False
    job.save(6)
    assert given["validate_access_integrity"] is True


@pytest.mark.parametrize(("distributed", "full"), [(False, False), (True, False), (True, True)])
def test_a_checkpoint_says_how_its_optimizer_is_divided(
    monkeypatch: pytest.MonkeyPatch, distributed: bool, full: bool
) -> None:
    monkeypatch.setattr(checkpointing.mpu, "get_data_parallel_group", group)
    efficient = "distrib_optim_fully_reshardable_mem_efficient"
    args = argparse.Namespace(
        use_distributed_optimizer=distributed, dist_ckpt_optim_fully_reshardable=full,
        **{efficient: True},
    )  # fmt: skip
    kind = "fully_reshardable" if full else "dp_reshardable"
    expected = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True,
                "dp_cp_group": "data and context"}  # fmt: skip
    expected |= {"distrib_optim_sharding_type": kind} if distributed else {}
    expected |= {efficient: True} if full else {}
    assert checkpointing._content_metadata(args) == expected


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
    monkeypatch.setattr(checkpointing, "mpu", groups)
    assert checkpointing._rank_directory() == name


def test_a_checkpointer_is_that_of_one_or_several_chunks() -> None:
    made: Any = object.__new__(Checkpointer)
    made._models = ["a"]
    assert made._named_models() == [("model", "a")]
    made._models = ["a", "b"]
    assert made._named_models() == [("model0", "a"), ("model1", "b")]
