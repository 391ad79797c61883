"""Ranks that load damaged checkpoints: one error that names the checkpoint, or its content."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from megatron.dpp.errors import DppError
from megatron.dpp_train.checkpoint import checksums, loader
from tests.checkpoint.small import Job

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_state_dict. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
]
FILES = {
    "torch_dist": [".metadata", "common.pt", "metadata.json", "__0_0.distcp", "__0_1.distcp"],
    "torch": ["mp_rank_00/model_optim_rng.pt"],
}


def saved(patch: pytest.MonkeyPatch, folder: Path, form: str) -> tuple[Job, Path]:
    """A run whose checkpoint has no checksums, as those of other programs."""
    job = Job(patch, folder, ckpt_format=form, no_save_rng=True)
    job.save(3)
    path = folder / "iter_0000003"
    (path / checksums.NAME).unlink()
    return job, path


def load(job: Job) -> str:
    """The error of a load; ``loaded`` without one."""
    try:
        job.next()
    except DppError as error:
        text = str(error)
        assert text.count("\n") == 0 and len(text) < 1000 and "iter_0000003" in text, text
        return text
    return "loaded"


def test_a_checkpoint_that_lacks_an_object_does_not_fit(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ended in PyTorch's RuntimeError, with the stacks of all ranks."""
    job, path = saved(monkeypatch, tmp_path, "torch_dist")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    del metadata.state_dict_metadata["weight"]
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "weight"}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    said = load(job)
    assert "does not fit this model" in said and "weight" in said


def tried(patch: pytest.MonkeyPatch, folder: Path, form: str, number: int) -> Counter[str]:
    """Results of loads after random changes: a flipped bit, a lost end, lost bytes, zeros."""
    job, path = saved(patch, folder, form)
    drawn, found = random.Random(8), Counter[str]()
    for _ in range(number):
        name = drawn.choice([name for name in FILES[form] if (path / name).exists()])
        content = (path / name).read_bytes()
        broken, at = bytearray(content), drawn.randrange(len(content))
        change = drawn.choice(["bit", "bit", "end", "cut", "zeros"])
        if change == "bit":
            broken[at] ^= 1 << drawn.randrange(8)
        elif change == "end":
            del broken[at:]
        elif change == "cut":
            del broken[at : at + drawn.randrange(1, 64)]
        else:
            broken[at : at + 64] = bytes(len(broken[at : at + 64]))
        (path / name).write_bytes(broken)
        try:
            found["loaded" if load(job) == "loaded" else "refused"] += 1
        except BaseException as error:  # PyTorch's CheckpointException is no Exception
            found[f"{name}, {change}: {type(error).__name__}: {str(error)[:120]}"] += 1
        (path / name).write_bytes(content)
    assert load(job) == "loaded"
    return found


@pytest.mark.parametrize("form", FILES)
def test_random_damage_is_refused_in_one_line_or_changes_values_only(
    form: str, one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Values and names that nothing reads cannot be told from others without checksums."""
    found = tried(monkeypatch, tmp_path, form, 60)
    assert set(found) == {"loaded", "refused"}, found
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("form", FILES)
def test_each_flipped_bit_is_refused_where_there_are_checksums(
    form: str, one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, drawn = Job(monkeypatch, tmp_path, ckpt_format=form, no_save_rng=True), random.Random(9)
    job.save(3)
    whole = sorted(each for each in (tmp_path / "iter_0000003").rglob("*") if each.is_file())
    names = {each.name for each in whole}
    assert {checksums.NAME, *(Path(name).name for name in FILES[form])} - {"__0_1.distcp"} <= names
    for turn in range(100):
        path = whole[turn % len(whole)]
        content = bytearray(before := path.read_bytes())
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
        assert load(job) != "loaded", path
        path.write_bytes(before)
    assert load(job) == "loaded"


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("change", ["moved", "written"])
def test_a_checkpoint_that_changes_between_its_check_and_its_load_is_refused(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, change: str
) -> None:
    """One whose bits changed then was loaded."""
    job, path = saved(monkeypatch, tmp_path, form)
    file = path / FILES[form][-1]

    def verified(*_: object) -> None:
        if change == "moved":
            path.rename(tmp_path / "elsewhere")
        else:
            file.write_bytes(file.read_bytes())
            os.utime(file, ns=(0, 1))

    monkeypatch.setattr(loader, "verify", verified)
    said = load(job)
    if change == "moved":
        assert "does not fit" not in said and "No such file" in said
    else:
        assert said == f"{file}: written or moved while it was loaded; start again"


@pytest.mark.parametrize("strictness", ["raise_all", "log_all", "raise_unexpected"])
def test_keys_are_compared_where_pytorch_describes_the_strides_of_tensors(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strictness: str
) -> None:
    """PyTorch 2.15 does, and megatron-core made empty tensors with all that is described."""
    job, path = saved(monkeypatch, tmp_path, "torch_dist")
    job.run.args.dist_ckpt_strictness = strictness
    taken = TensorProperties.__setstate__

    def with_strides(self: TensorProperties, state: Any) -> None:
        taken(self, state)
        self.__dict__["strides"] = None

    monkeypatch.setattr(TensorProperties, "__setstate__", with_strides)
    assert load(job) == "loaded"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    del metadata.state_dict_metadata["weight"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    if strictness.startswith("raise"):
        assert "weight" in load(job)
