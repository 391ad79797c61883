"""Writes ``requirements-lock.txt``: the versions with which the tests last passed.

    python tools/lock.py            # after tools/test.sh, in the environment that it used
    python tools/lock.py --check    # names what the file lacks or contradicts; status 1 then

``pip install --constraint requirements-lock.txt -r requirements.txt`` gives these versions.
PyTorch's packages of CUDA are left out: its wheel pins them, and a build without CUDA has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-lock.txt"
_SOURCES = ("requirements.txt", "requirements-dev.txt")
_OF_CUDA = ("nvidia-", "cuda-")
_HEAD = "# Written by tools/lock.py: the versions with which the tests passed.\n"


def read(path: Path) -> Iterator[Requirement]:
    """The requirements of a file that hold on this platform."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text and _is_wanted(found := Requirement(text)):
            yield found


def _is_wanted(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def installed() -> dict[str, Version]:
    """The packages that the requirements need, directly or not, with their versions here."""
    wanted = [each for name in _SOURCES for each in read(ROOT / name)]
    found: dict[str, Version] = {}
    while wanted:
        name = canonicalize_name(wanted.pop().name)
        if name in found or name.startswith(_OF_CUDA):
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # not for this platform, or not installed yet
        found[name] = Version(Version(distribution.version).public)
        wanted += filter(_is_wanted, map(Requirement, distribution.requires or ()))
    return found


def locked() -> dict[str, Version]:
    """The versions of the file."""
    pins = list(read(LOCK))
    return {canonicalize_name(each.name): Version(str(each.specifier)[2:]) for each in pins}


def problems() -> list[str]:
    """A line for each package that the file lacks, or has in a version that is not allowed."""
    pins = locked()
    lines = [f"{name} {version} has no line" for name, version in sorted(installed().items())
             if name not in pins]  # fmt: skip
    for source in _SOURCES:
        for each in read(ROOT / source):
            version = pins.get(canonicalize_name(each.name))
            if version is not None and not each.specifier.contains(version, prereleases=True):
                lines.append(f"{each.name} is {version}, {source} asks for {each.specifier}")
    return lines


def main() -> int:
    """Writes the file, or checks it."""
    if "--check" in sys.argv[1:]:
        found = problems()
        for line in found:
            print(f"{LOCK.name}: {line}; run tools/lock.py after the tests passed", file=sys.stderr)
        return int(bool(found))
    pins = [f"{name}=={version}\n" for name, version in sorted(installed().items())]
    LOCK.write_text(_HEAD + "".join(pins), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
