"""``megatron-dpp train``: refuses directories that another run writes, then loads the rest.

The rest takes several times as long to load as this to answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.dpp.errors import DataError
from megatron.dpp.locks import check_named

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Start a run, as ``launch.main`` does; 2 if its directory is taken."""
    words = list(sys.argv[1:] if argv is None else argv)
    if is_taken(words):
        return BAD_INPUT
    from megatron.dpp_train.launch.main import main as start

    return start(words)


def is_taken(words: Sequence[str]) -> bool:
    """Print which run writes a directory that this command line names; True if there is one."""
    try:
        check_named(words, os.environ)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return True
    return False
