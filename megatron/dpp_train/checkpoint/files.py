"""The directories of checkpoints: find, check, begin, commit and tidy them.

Megatron-LM's form: ``DIR/latest_checkpointed_iteration.txt`` names the newest of
``DIR/iter_0000010``, ``DIR/iter_0000020``, ... A checkpoint is written as
``iter_0000020.unfinished`` and renamed when every rank is done; the tracker file is replaced after
that. So the tracker names a whole checkpoint whenever a job dies. ``saver`` fills the
directories; nothing here needs a process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.errors import DataError, one_line, shown
from megatron.dpp.safe_files import open_to_read, private_directory, share_directory
from megatron.dpp_train.checkpoint import checksums, durable
from megatron.dpp_train.checkpoint.reader import read_pickle
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.text_files import read_text

TRACKER = "latest_checkpointed_iteration.txt"
_UNFINISHED, _REPLACED, _REMOVED = ".unfinished", ".replaced", ".removed"
_MOST_TRACKER_BYTES = 1 << 12
_HEADS = ("metadata.json", "common.pt", ".metadata")
_ENGINE_OPTIMIZER, _ENGINE_MODEL = "_optim_states.pt", "_model_states.pt"
_ARCHIVE = b"PK\x03\x04"
"""The start of a file that ``torch.save`` wrote."""


@dataclass(frozen=True)
class Found:
    """A checkpoint on disk.

    Attributes:
        release: a model without training state, of iteration 0.
        pretrained: from ``--pretrained-checkpoint``. The run loads the model alone.
    """

    path: Path
    iteration: int
    release: bool = False
    pretrained: bool = False

    @property
    def is_distributed(self) -> bool:
        """Written by megatron-core's dist_checkpointing (``torch_dist``), not as ``torch``
        files.
        """
        return (self.path / "metadata.json").is_file()

    @property
    def is_deepspeed(self) -> bool:
        """Written by DeepSpeed's engine (``--deepspeed-zero-stage``)."""
        return next(self.path.glob(f"*{_ENGINE_OPTIMIZER}"), None) is not None


def directory(root: str | Path, iteration: int) -> Path:
    """Directory of a whole checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def unfinished_directory(root: str | Path, iteration: int) -> Path:
    """Directory of a checkpoint that is being written."""
    return directory(root, iteration).with_suffix(_UNFINISHED)


def rank_directory(tensor: int, pipeline: int | None, expert: int | None) -> str:
    """The directory of one rank's file inside a ``torch`` checkpoint.

    Args:
        tensor, pipeline, expert: ranks in the groups; None where the group has one member.
    """
    places = [f"_{place:03d}" for place in (pipeline, expert) if place is not None]
    return f"mp_rank_{tensor:02d}{''.join(places)}"


def begin(root: str | Path, iteration: int) -> Path:
    """Make an empty directory to write into, which nobody else may enter until :func:`commit`; one
    left by an earlier attempt goes away."""
    path = unfinished_directory(root, iteration)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
    private_directory(path)
    return path


def commit(root: str | Path, iteration: int) -> None:
    """Add checksums to the directory from :func:`begin`, and make it the newest checkpoint."""
    final = directory(root, iteration)
    checksums.write(final.with_suffix(_UNFINISHED))
    share_directory(final.with_suffix(_UNFINISHED))
    old = final.with_suffix(_REPLACED)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    final.with_suffix(_UNFINISHED).rename(final)
    write_tracker(root, iteration)
    shutil.rmtree(old, ignore_errors=True)


def write_tracker(root: str | Path, iteration: int) -> None:
    """Replace the tracker file in one step, so that a reader sees the old or the new number."""
    tracker = Path(root) / TRACKER
    scratch = tracker.with_suffix(".new")
    durable.write_text(scratch, str(iteration))
    scratch.replace(tracker)


def find(root: str | None, step: int | None = None) -> Found | None:
    """The checkpoint that a run with ``--load root --ckpt-step step`` starts from; None when there
    is none.

    Raises:
        DataError: the tracker file is broken, or names a checkpoint that is not there.
    """
    if root is None:
        return None
    tracker = Path(root) / TRACKER
    if step is None:
        if not os.path.lexists(tracker):
            return _without_tracker(Path(root))
        text = read_text(tracker, most=_MOST_TRACKER_BYTES).strip()
        if text == "release":
            return Found(Path(root) / "release", 0, release=True)
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise DataError(f"{tracker}: holds {shown(text)}, expected an iteration number")
        step = int(text)
    path = directory(root, step)
    if not path.is_dir():
        replaced = path.with_suffix(_REPLACED)  # died between the two renames of commit()
        if replaced.is_dir():
            return Found(replaced, step)
        names = ", ".join(each.name for each in _whole(Path(root)))
        there = f"{names} (--ckpt-step or --step names one)" if names else "none"
        raise DataError(f"{path}: no such checkpoint; there are: {there}")
    return Found(path, step)


def _without_tracker(root: Path) -> Found | None:
    """The checkpoint of a job that died in its first save, before the tracker file; None where
    there is no checkpoint. A tracker file that was lost is an error: parameters would be random."""
    there = _whole(root)
    if len(there) == 1 and (there[0] / checksums.NAME).is_file():
        return Found(there[0], int(there[0].name.removeprefix("iter_")))
    if there:
        raise DataError(
            f"{root / TRACKER}: missing, but there are {', '.join(each.name for each in there)}; "
            "name an iteration (--ckpt-step or --step), or start anew without --load"
        )
    return None


def _whole(root: Path) -> list[Path]:
    """Directories of checkpoints that have their names."""
    name = re.compile(r"iter_[0-9]{7,18}")
    return sorted(each for each in root.glob("iter_*") if name.fullmatch(each.name))


def find_named(path: Path, step: int | None = None) -> Found | None:
    """The checkpoint in a directory of checkpoints, or the one that ``path`` is, whatever its name;
    None when there is none.

    Raises:
        DataError: as :func:`find`.
    """
    own = any((path / name).is_file() for name in _HEADS) or any(path.glob("mp_rank_*"))
    if step is None and own:
        path = path.resolve()
        named = re.fullmatch(r"iter_(\d+)", path.name)
        return Found(path, int(named[1]) if named else 0, release=named is None)
    return find(str(path), step)


def find_start(args: Settings) -> Found | None:
    """The checkpoint that a run starts from; needs no process group. ``args.start``, where a
    program sets it, is that checkpoint. ``--ckpt-step`` is of the directory that is read.

    Raises:
        DataError: there is none although the flags demand one, or it is broken.
    """
    found = getattr(args, "start", None)
    own = args.load and (os.path.lexists(Path(args.load) / TRACKER) or _whole(Path(args.load)))
    if found is None and args.pretrained_checkpoint and not own:
        found = find(args.pretrained_checkpoint, args.ckpt_step)
        if found is None:
            raise DataError(
                f"--pretrained-checkpoint {args.pretrained_checkpoint}: no checkpoint there"
            )
        found = dataclasses.replace(found, pretrained=True)
    elif found is None:
        found = find(args.load, args.ckpt_step)
        if found is None and args.load and args.exit_on_missing_checkpoint:
            raise DataError(
                f"--load {args.load}: no checkpoint there (--exit-on-missing-checkpoint)"
            )
    if found is not None:
        _check_heads(found.path)
    return found


def _check_heads(path: Path) -> None:
    """Compare the files that are read before the rest is compared with their checksums."""
    sums = checksums.read(path) or {}
    checksums.check(path, sums, [name for name in _HEADS if name in sums])


def unfinished(root: str | Path) -> list[Path]:
    """Directories of checkpoints that were never completed."""
    return sorted(Path(root).glob(f"iter_*{_UNFINISHED}"))


def tidy_own(args: Settings) -> list[str]:
    """:func:`tidy` the directory that a run loads from, if it also saves there. Another job may be
    saving to any other."""
    if not (args.load and args.save and Path(args.load).is_dir()):
        return []
    return tidy(args.load) if Path(args.load).resolve() == Path(args.save).resolve() else []


def tidy(root: str | Path) -> list[str]:
    """Remove what killed saves left behind; a line for each. Only one rank may call this."""
    lines = []
    for path in unfinished(root):
        shutil.rmtree(path, ignore_errors=True)
        how = "cannot be removed" if path.exists() else "removed"
        lines.append(f"{path.name}: a save was interrupted here; {how}, the one before is used")
    for path in Path(root).glob(f"iter_*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in sorted(Path(root).glob(f"iter_*{_REPLACED}")):
        final = path.with_suffix("")
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            path.rename(final)
            lines.append(f"{final.name}: restored; a save that was to replace it was interrupted")
        except OSError as error:
            lines.append(f"{path.name}: used as it is; renaming it failed ({error.strerror})")
    return lines


def check_whole(
    found: Found, tensor: int, pipeline: int, expert: int = 1, expert_tensor: int = 1
) -> None:
    """Refuse a checkpoint that lacks files, or that this layout cannot read.

    Args:
        tensor, pipeline, expert: this run's parallel sizes; a ``torch`` checkpoint must have the
            same.
        expert_tensor: the tensor-parallel size of experts; it counts with ``expert`` above 1.

    Raises:
        DataError: naming the file.
    """
    if found.is_distributed:
        _check_distributed(found.path)
        return
    names = {path.name for path in found.path.glob("mp_rank_*")}
    if not names:
        raise DataError(
            f"{found.path}: neither metadata.json (torch_dist) nor mp_rank_* (torch) is there"
        )
    expected = {
        rank_directory(
            rank % tensor,
            stage if pipeline > 1 else None,
            rank // expert_tensor % expert if expert > 1 else None,
        )
        for stage in range(pipeline)
        for rank in range(math.lcm(tensor, expert_tensor * expert))
    }
    if names != expected:
        raise DataError(
            f"{found.path} holds {', '.join(sorted(names))}, but this run needs "
            f"{', '.join(sorted(expected))}: a torch checkpoint cannot change its tensor, "
            "pipeline or expert parallel size (torch_dist can)"
        )
    for name in sorted(names):
        path = found.path / name / "model_optim_rng.pt"
        if not path.is_file() or not path.stat().st_size:
            raise DataError(f"{path}: missing or empty")
        _check_end(path)


def check_engine(found: Found, stage: int | None, replicas: int) -> None:
    """Refuse a checkpoint of DeepSpeed's engine that this run cannot read.

    Args:
        stage: this run's ``--deepspeed-zero-stage``.
        replicas: its number of data-parallel ranks, which must be the checkpoint's.

    Raises:
        DataError: naming the file, or the stage and the number it was saved with.
    """
    if stage is None:
        raise DataError(
            f"{found.path} was saved by DeepSpeed's engine: add --deepspeed-zero-stage (with "
            "megatron-dpp train: --mode zero --engine deepspeed)"
        )
    ranks = re.compile(r"zero_pp_rank_(\d+)_")
    saved = {match[1] for path in found.path.iterdir() if (match := ranks.search(path.name))}
    if saved != {str(rank) for rank in range(replicas)}:
        raise DataError(
            f"{found.path} holds the shares of data-parallel ranks {', '.join(sorted(saved))}, but "
            f"this run has {replicas}: start that many replicas"
        )
    is_third = next(found.path.glob(f"zero_pp_rank_*{_ENGINE_MODEL}"), None) is not None
    if is_third != (stage == 3):
        saved_stage = "3" if is_third else "1 or 2"
        raise DataError(
            f"{found.path} was saved with --deepspeed-zero-stage {saved_stage}, this run has "
            f"{stage}: its engine reads what it wrote"
        )
    for path in sorted(found.path.glob("*.pt")):
        if not path.stat().st_size:
            raise DataError(f"{path}: empty; the checkpoint is not whole")
        _check_end(path)


def _check_end(path: Path) -> None:
    """Refuse a file of ``torch.save`` that is cut short: the list of its parts is at its end."""
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(len(_ARCHIVE)) == _ARCHIVE and not zipfile.is_zipfile(file):
            raise DataError(f"{path}: {size} bytes, and its end is missing; copy it again")


def _check_distributed(path: Path) -> None:
    for name in ("common.pt", ".metadata"):
        if not (path / name).is_file():
            raise DataError(f"{path / name}: missing; the checkpoint is not whole")
    _check_end(path / "common.pt")
    try:
        ends: dict[str, int] = {}
        for info in read_pickle(path / ".metadata").storage_data.values():
            name, end = Path(info.relative_path).name, info.offset + info.length
            if name != info.relative_path or min(info.offset, info.length) < 0:
                raise DataError(f"{path / '.metadata'}: a tensor is in {shown(info.relative_path)}")
            ends[name] = max(ends.get(name, 0), end)
    except DataError:
        raise
    except Exception as error:  # a broken pickle raises anything
        why = one_line(error, 200)
        raise DataError(f"{path / '.metadata'}: unreadable ({why})") from error
    for name, end in sorted(ends.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else -1
        if size < end:
            state = "missing" if size < 0 else f"{size} bytes, expected at least {end}"
            raise DataError(f"{file}: {state}; the checkpoint is not whole")


def remove(path: Path) -> None:
    """Delete an old checkpoint, which loses its name before its files. What cannot be deleted
    stays, and so does a symbolic link.
    """
    if path.is_symlink():
        return
    removed = path.with_suffix(_REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
