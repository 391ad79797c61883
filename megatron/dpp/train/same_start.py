"""Were all ranks started with the same arguments and versions? Found out before anything is built.

``initialize`` asks once, right after the ranks have met; a difference ends every rank with a
message that names it and both values, in place of a hang or of numbers that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any

from megatron.dpp import __version__
from megatron.dpp.errors import VersionMismatch

_PACKAGES = ("torch", "megatron-core")
_MAY_DIFFER = ("rank", "local_rank", "save", "load", "pretrained_checkpoint")
_PATHS = ("_path", "_dir", "_file", "_cfg")
"""What may differ from host to host: paths, and a rank's own number."""

_MAX_SHOWN = 5


def description(args: argparse.Namespace) -> dict[str, str]:
    """Everything that has to be equal, as text by name."""
    said = {
        "--" + name.replace("_", "-"): repr(value)
        for name, value in sorted(vars(args).items())
        if name not in _MAY_DIFFER and not name.endswith(_PATHS)
    }
    said["megatron.dpp"] = __version__
    said["Python"] = ".".join(platform.python_version_tuple()[:2])
    for package in _PACKAGES:
        try:
            said[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            said[package] = "not installed as a package"
    return said


def differences(own: dict[str, str], first: dict[str, str], rank: int, host: str) -> str:
    """What differs between a rank and rank 0, in words; empty when nothing does."""
    nothing = "not known"
    names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    shown = [
        f"{name} is {first.get(name, nothing)} on rank 0 and {own.get(name, nothing)} on "
        f"rank {rank} ({host})"
        for name in names[:_MAX_SHOWN]
    ]
    more = [f"{len(names) - _MAX_SHOWN} more differ"] if len(names) > _MAX_SHOWN else []
    return "; ".join(shown + more)


def check_agreement(args: argparse.Namespace, rank: int, world_size: int, store: Any) -> None:
    """Compare with rank 0 through the job's store; all ranks call it and all raise the same.

    Raises:
        VersionMismatch: names what differs, with both values and the host.
    """
    own = description(args)
    if rank == 0:
        store.set("dpp/arguments", json.dumps(own))
        found = [store.get(f"dpp/arguments/{peer}").decode() for peer in range(1, world_size)]
        store.set("dpp/arguments/verdict", next(filter(None, found), ""))
    else:
        first = json.loads(store.get("dpp/arguments").decode())
        store.set(f"dpp/arguments/{rank}", differences(own, first, rank, platform.node()))
    verdict = store.get("dpp/arguments/verdict").decode()
    if verdict:
        raise VersionMismatch(f"{verdict}: start all nodes with equal arguments and versions")
