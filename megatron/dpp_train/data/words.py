"""The data of a run as its flags name it: prefixes, with weights or without."""

from __future__ import annotations

from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.text_files import read_json, read_text


def data_words(args: Settings) -> tuple[list[str] | None, list[Any] | None]:
    """Prefixes, or weights and prefixes, as the data flags give them: ``(for all splits, per
    split)``, one of them None. A split without data has None.

    Raises:
        DataError: a file named by ``--data-args-path`` or ``--per-split-data-args-path`` is bad.
    """
    if args.data_args_path:
        return read_text(args.data_args_path, "--data-args-path").split(), None
    if args.data_path:
        return list(args.data_path), None
    if args.per_split_data_args_path:
        return None, _split_words(args.per_split_data_args_path)
    paths = [args.train_data_path, args.valid_data_path, args.test_data_path]
    return None, paths if any(paths) else None


def _split_words(path: str) -> list[list[str] | None]:
    """The words of each split in the file of ``--per-split-data-args-path``."""
    lists = read_json(path, "--per-split-data-args-path")
    found: list[list[str] | None] = []
    for name in ("train", "valid", "test"):
        words: Any = lists.get(name, False) if isinstance(lists, dict) else False
        if isinstance(words, str):
            words = words.split()
        if isinstance(words, list) and all(isinstance(each, str | int | float) for each in words):
            words = [str(each) for each in words]
        elif words is not None:
            raise DataError(
                f"--per-split-data-args-path {path}: expected a JSON object with the data prefixes "
                "of train, valid and test"
            )
        found.append(words)
    return found
