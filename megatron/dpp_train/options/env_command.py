"""``megatron-dpp env``: print the environment variables, their defaults and their values."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.dpp.command_line import new_parser
from megatron.dpp_train.options.environment import GROUPS, VARIABLES, markdown


def main(argv: Sequence[str] | None = None) -> int:
    """Print; the exit code."""
    text = "Print the environment variables, their defaults and their values."
    parser = new_parser("megatron-dpp env", text)
    parser.add_argument("--markdown", action="store_true", help="print docs/environment.md")
    if parser.parse_args(argv).markdown:
        print(markdown(), end="")
        return 0
    width = max(map(len, VARIABLES))
    for title, rows in GROUPS.items():
        print(f"{title.replace('`', '')}:")
        for row in rows:
            now = f"  [set to {os.environ[row.name]!r}]" if row.name in os.environ else ""
            meaning = row.meaning.replace("`", "")
            print(f"  {row.name:<{width}}  {row.default or '-':<10}  {meaning}{now}")
        print()
    return 0
