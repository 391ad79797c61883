"""The checks of a command line in a training script that was started without ``train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.dpp.errors import BAD_USAGE, DppError, print_error
from megatron.dpp_train.presets import flag_table
from megatron.dpp_train.presets.checks import check


def check_command_line(argv: Sequence[str]) -> None:
    """Leave the process with status 2 and one line where a command line cannot work. Does nothing
    for ``--help``, and where no table of Megatron's flags was made yet."""
    table = flag_table.saved()
    if table is None or {"--help", "-h"} & set(argv):
        return
    try:
        check(argv, table, world_size=int(os.environ.get("WORLD_SIZE") or 1))
    except DppError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_error(error)
        sys.exit(BAD_USAGE)
