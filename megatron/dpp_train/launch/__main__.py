"""``python -m megatron.dpp_train.launch``: the end of the launch scripts (``examples/launch.sh``).

It refuses directories that another run writes, then loads ``scripts.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from megatron.dpp_train.launch.door import BAD_INPUT, is_taken


def named(words: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The words behind RECIPE and ROLE; the directory of checkpoints as a flag, where there is one.

    >>> named(["gpt", "node", "out", "tensorboard"], {})
    ['--save', 'out', 'out', 'tensorboard']
    """
    rest = list(words[2:])
    first = rest[0] if rest and not rest[0].startswith("-") else ""
    path = (first or env.get("CHECKPOINT_PATH")) if words[:1] != ["flags"] else ""
    return ["--save", path, *rest] if path else rest


def main() -> int:
    """Start a run; 2 if its directory is taken."""
    words = sys.argv[1:]
    is_worker = words[1:2] == ["worker"] and not os.environ.get("NODE_RANK")
    if not is_worker and is_taken(named(words, os.environ)):
        return BAD_INPUT
    from megatron.dpp_train.launch.scripts import main as start

    return start(words)


if __name__ == "__main__":
    sys.exit(main())
