"""Builds the C++ extension of the transport; all metadata is in ``pyproject.toml``.

The wheel holds ``configs/`` and the sample corpora inside of the trainer's package.
Needs a C++17 compiler and pybind11, and nothing of CUDA, torch or libibverbs: those are opened at
run time where they exist. One build serves machines with and without GPUs.
"""

import os
import re
import shutil
import sys
from pathlib import Path

try:
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
except ModuleNotFoundError:
    sys.exit(
        f"error: {sys.executable} has no package pybind11, which the extension needs: "
        "pip install pybind11; or pip install ., which gets it"
    )
from setuptools import find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(
    str(path)
    for room in ("base", "transport", "python")
    for path in Path("csrc", room).glob("*.cc")
)
HEADERS = sorted(str(path) for path in Path("csrc").glob("*/*.h"))
FLAGS = ["-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread"]


def read_by(path: Path) -> set[Path]:
    """A file of csrc/ and the headers that it includes, directly or by others."""
    found, waiting = set(), [path]
    while waiting:
        found.add(path := waiting.pop())
        included = re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        waiting += {Path("csrc", name) for name in included} - found
    return found


def is_stale(built: str, source: str) -> bool:
    """True if an object file is missing, or older than what its source reads."""
    read = {*read_by(Path(source)), Path("setup.py")}
    return not Path(built).exists() or any(
        path.stat().st_mtime >= Path(built).stat().st_mtime for path in read
    )


class BuildWithCompiler(build_ext):
    """Says in one line what is missing, instead of a traceback."""

    def run(self) -> None:
        if not os.environ.get("CXX", "").strip():
            os.environ.pop("CXX", None)  # setuptools would run a compiler of no name
        compiler = os.environ.get("CXX", "g++").split()[0]
        if shutil.which(compiler) is None:
            sys.exit(
                f"error: no C++ compiler ({compiler}): install g++ 9 or later "
                "(Debian and Ubuntu: apt-get install g++) or name one in CXX"
            )
        super().run()


TRAINER = "megatron.dpp_train"
SHARED = {
    f"{TRAINER}.configs": "configs",
    f"{TRAINER}.configs.models": "configs/models",
    f"{TRAINER}.datasets_gpt": "datasets_gpt",
    f"{TRAINER}.datasets_bert": "datasets_bert",
}
"""Folders of the source tree that an installed trainer reads, too."""

ParallelCompile("NPY_NUM_BUILD_JOBS", needs_recompile=is_stale, default=2).install()

setup(
    packages=[
        *find_namespace_packages(include=["megatron.dpp*"]),
        *(SHARED if Path("megatron", "dpp_train").is_dir() else ()),
    ],
    package_dir=SHARED,
    package_data={"": ["*.html", "*.yaml", "*.json", "*.txt"]},
    ext_modules=[
        Pybind11Extension(
            "megatron.dpp.transport._native",
            SOURCES,
            include_dirs=["csrc"],
            depends=HEADERS,
            cxx_std=17,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildWithCompiler},
)
