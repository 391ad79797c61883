"""The data of a run as its flags name it: prefixes, with weights or without."""

from __future__ import annotations

import json
from typing import Any

from megatron.dpp.errors import DataError
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.text_files import read_text


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
        try:
            lists = json.loads(
                read_text(args.per_split_data_args_path, "--per-split-data-args-path")
            )
            paths = [lists[name] for name in ("train", "valid", "test")]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"--per-split-data-args-path {args.per_split_data_args_path}: "
                f"expected a JSON object with train, valid and test ({error})"
            ) from error
        return None, [path.split() if isinstance(path, str) else path for path in paths]
    paths = [args.train_data_path, args.valid_data_path, args.test_data_path]
    return None, paths if any(paths) else None
