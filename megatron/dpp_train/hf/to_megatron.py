"""Turns a Hugging Face folder into a Megatron checkpoint that any layout loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from megatron.dpp.errors import DataError
from megatron.dpp.locks import lock_directory
from megatron.dpp.safe_files import private_directory
from megatron.dpp_train.checkpoint import checksums, durable
from megatron.dpp_train.checkpoint import files as checkpoint_files
from megatron.dpp_train.hf import Entry, checkpoint
from megatron.dpp_train.hf.fields import CONFIG, ORIGIN
from megatron.dpp_train.hf.folder import Folder, copy_files, one_dtype
from megatron.dpp_train.hf.model import args_of_model
from megatron.dpp_train.hf.rules import join

Progress = Callable[[int], None]


def to_megatron(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    family_file: Path | None = None,
    progress: Progress,
) -> list[str]:
    """Convert the model in ``source`` to a checkpoint in ``target``, which must not exist.

    Args:
        dtype: of the checkpoint; that of the source by default.
        family_file: a Python file with a further family.
        progress: called with the bytes of each tensor that is written.

    Returns:
        Notes: fields of ``config.json`` that no flag stands for.

    Raises:
        DataError: the source cannot be converted, or the target exists.
    """
    folder = Folder(source, family_file)
    sizes = folder.config.sizes
    kind = dtype or one_dtype(folder.dtypes, source)

    def read(entry: Entry) -> torch.Tensor:
        whole = join(entry.rule, folder.read(entry), sizes)
        progress(whole.nbytes)
        return whole

    with unfinished(target) as scratch:
        release = scratch / "release"
        release.mkdir()
        checkpoint.write(
            release,
            list(folder.entries()),
            sizes,
            kind,
            read,
            args_of_model(folder.config),
        )
        checksums.write(release)
        origin = scratch / ORIGIN
        origin.mkdir()
        shutil.copyfile(source / CONFIG, origin / CONFIG)
        copy_files(source, origin)
        checksums.write(origin)
        (scratch / checkpoint_files.TRACKER).write_text("release", encoding="utf-8")
    return list(folder.config.notes)


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A directory beside ``target`` that gets its name at the end. Until then nothing takes it for
    a result; after a kill the next attempt removes it.

    Raises:
        DataError: ``target`` exists, or another process writes it.
    """
    target = target.absolute()
    scratch = target.with_name(f".{target.name}.unfinished")
    try:
        if target.exists():
            raise DataError(f"{target}: exists; name another target, or remove it")
        private_directory(scratch)
        with lock_directory(scratch, "convert:"):
            new = scratch / "new"
            try:
                shutil.rmtree(new, ignore_errors=True)  # left by a kill
                new.mkdir()
                yield new
                new.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except DataError:
        with suppress(OSError):
            scratch.rmdir()  # where it could not be locked; that of another process is not empty
        raise
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else ""
        where = f"{Path(name).name}: " if name.startswith(str(scratch)) else ""
        room = durable.no_room(target.parent, "target")
        raise DataError(f"{target}: {where}{error.strerror or error}{room}") from error
