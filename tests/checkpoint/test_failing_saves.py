"""Each file-system call of a save fails in turn, or is the last one of a killed process."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.dpp.errors import DataError
from megatron.dpp_train.checkpoint import checksums, guards
from megatron.dpp_train.checkpoint import files as files
from tests.checkpoint import shards
from tests.checkpoint.small import Job
from tests.failing_disk import KILLED, Disk, fork

# megatron-core's loads and saves use PyTorch's former names.
pytestmark = pytest.mark.filterwarnings("ignore:.*_state_dict. is deprecated:FutureWarning")


BEFORE = {
    "the first": (None, None),
    "the next": (3, None),
    "the same again": (6, None),
    "in the place of one": (5, 10),
}
"""By name: the iteration of the checkpoint before, and ``--save-retain-interval``."""


BY_OTHERS = (
    "metadata.json", "common.pt", ".metadata", ".metadata.tmp", "__0_0.distcp", "__0_1.distcp",
    "distrib_optim.pt",
)  # fmt: skip
"""Files that megatron-core writes, whose errors do not always name them."""


class Saves:
    """Saves of a run into folders of its own, on a disk that may fail."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, form: str, before: str) -> None:
        form, _, in_background = form.partition(" ")
        iteration, retain = BEFORE[before]
        self.job = Job(
            patch, folder, save_retain_interval=retain, use_distributed_optimizer=True,
            log_progress=True, no_save_rng=True, ckpt_format=form, async_save=bool(in_background),
        )  # fmt: skip
        patch.setattr(dist, "barrier", lambda: None)  # gloo's threads are not in a fork
        self._folder, self._count = folder, 0
        self._known: dict[tuple[Any, ...], set[int]] = {}
        self._template = folder / "template"
        self._template.mkdir()
        self.root = self._template
        self.disk = Disk(patch, folder)
        if iteration is not None:
            self.save(iteration)
        self.disk.heal()

    def again(self) -> None:
        """Begin in a new folder, which has the checkpoint before."""
        self.disk.heal()
        self._count += 1
        self.root = self._folder / str(self._count)
        shutil.copytree(self._template, self.root)

    def save(self, iteration: int) -> None:
        self.job.run.args.save = str(self.root)
        self.job.save(iteration)
        self.job.door.wait()

    def named(self) -> int | None:
        """Iteration of the checkpoint that a run would start from, which is whole."""
        args = argparse.Namespace(
            load=str(self.root), ckpt_step=None, pretrained_checkpoint=None,
            exit_on_missing_checkpoint=False,
        )  # fmt: skip
        found = files.find_start(args)
        return None if found is None else self.content(found)

    def content(self, found: files.Found) -> int:
        """The iteration in all files of a checkpoint, whose checksums are right."""
        sums = checksums.read(found.path)
        assert sums is not None
        checksums.check(found.path, sums, list(sums))
        if not found.is_distributed:
            files.check_whole(found, 1, 1)
        assert self._held(found, tuple(sums.items())) == {found.iteration}
        return found.iteration

    def _held(self, found: files.Found, sums: tuple[Any, ...]) -> set[int]:
        """The iteration in the files of these checksums; reading them takes longer than a save."""
        if sums in self._known:
            return self._known[sums]
        if found.is_distributed:
            held = shards.held(found.path, "weight", "moment")
        else:
            rank = found.path / "mp_rank_00"
            state = torch.load(rank / "model_optim_rng.pt", weights_only=False)
            held = {state["iteration"], int(state["model"]["weight"][0])}
            held.add(torch.load(rank / "distrib_optim.pt"))
        self._known[sums] = held
        return held

    def all_whole(self) -> None:
        """Whatever has the name of a checkpoint is one, or is refused."""
        for path in self.root.glob("iter_*"):
            if re.fullmatch(r"iter_\d+", path.name):
                self.content(files.Found(path, int(path.name[5:])))

    def check(self, before: int | None) -> None:
        """The state after a save of iteration 6 that did not end well, and what follows."""
        named = self.named()
        assert named in (before, 6)
        self.all_whole()
        restarted = self.root.with_name(f"{self.root.name}-restarted")
        shutil.copytree(self.root, restarted)
        self.save(6)  # by a run that does not load, and so tidies nothing
        assert self.named() == 6
        assert not files.unfinished(self.root)
        self.root = restarted
        files.tidy(self.root)
        assert self.named() == named
        assert not {path.suffix for path in self.root.glob("iter_*")} - {""}
        self.all_whole()
        self.save(9)
        assert self.named() == 9
        assert {path.suffix for path in self.root.iterdir()} <= {"", ".txt"}


Make = Callable[[str, str], Saves]


@pytest.fixture
def make(one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    return lambda form, before: Saves(monkeypatch, tmp_path, form, before)


QUICK = ("torch_dist", "the first")
CASES = [
    *(pytest.param("torch", before, False, id=before) for before in BEFORE),
    *(pytest.param("torch", before, True, id=f"{before}, all calls from one on",
                   marks=() if before == "in the place of one" else pytest.mark.slow)
      for before in BEFORE),
    *(pytest.param(form, before, False, id=f"{before}, {form}",
                   marks=() if (form, before) == QUICK else pytest.mark.slow)
      for before in BEFORE for form in ("torch_dist", "torch_dist in the background")),
]  # fmt: skip


@pytest.mark.parametrize(("form", "before", "lasts"), CASES)
def test_a_save_whose_calls_fail_names_the_file_and_leaves_a_whole_checkpoint(
    make: Make, form: str, before: str, lasts: bool
) -> None:
    saves, number, errors = make(form, before), 0, 0
    while True:
        saves.again()
        saves.disk.fail_at(number, lasts=lasts)
        failed = None
        try:
            saves.save(6)
        except DataError as error:
            failed = str(error)
        calls = list(saves.disk.calls)
        saves.disk.heal()
        if number >= len(calls):
            break
        call, path = calls[number]
        if failed is None:
            assert saves.named() == 6, "only what follows the commit may fail in silence"
        else:
            errors += 1
            assert "iter_0000006.unfinished: saving failed: " in failed
            if Path(path).name not in BY_OTHERS:
                named = [each for _, each in (calls[number:] if lasts else calls[number:][:1])]
                assert any(each in failed for each in named), (call, failed)
            assert "Input/output error" in failed, (call, failed)
        saves.check(BEFORE[before][0])
        number += 1
    assert number > 20 and errors > 15


SELDOM = ("the first", "the next")


@pytest.mark.parametrize(
    "before", [pytest.param(b, marks=pytest.mark.slow if b in SELDOM else ()) for b in BEFORE]
)
def test_a_save_killed_in_any_call_leaves_a_whole_checkpoint(make: Make, before: str) -> None:
    saves, number = make("torch", before), 0
    while True:
        saves.again()
        saves.disk.kill_at(number)
        status = fork(lambda: saves.save(6))
        saves.disk.heal()
        assert status in (0, KILLED)
        if status == 0:
            break
        saves.check(BEFORE[before][0])
        number += 1
    assert number > 20 and saves.named() == 6


@pytest.mark.parametrize(("free", "is_full"), [(0, True), ((1 << 20) - 1, True), (1 << 20, False)])
def test_a_disk_without_room_is_said_to_be_full(
    free: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=free, total=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: path.stat() and usage)
    with pytest.raises(DataError) as raised, guards.saving(tmp_path / "none" / "yet", 4):
        raise RuntimeError("no")
    assert ("no space left on device" in str(raised.value)) == is_full


def test_all_ranks_that_could_not_write_are_named(tmp_path: Path) -> None:
    error = RuntimeError("unnamed")
    error.failures = {3: ("disk gone", "stack"), 1: ("disk full", "stack")}  # type: ignore[attr-defined]
    said = "failed: rank 1: disk full; rank 3: disk gone"
    with pytest.raises(DataError, match=said), guards.saving(tmp_path, 4):
        raise error
