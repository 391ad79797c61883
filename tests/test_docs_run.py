"""The commands of README and docs run as pasted, in order, in a fresh clone and one shell per page.

A block that is marked as bash holds commands to paste. Templates with placeholders stand in blocks
without a language. :data:`EXCEPTIONS` lists every command that does not run as it stands.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY
from tests.test_docs_commands import PAGES

_PAGE_S = 1800
_NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"(?<![\w./])\[|\.\.\.(?!\w)|(?<= )[A-Z][A-Z_ -]*(?= |$)")


class Instead(NamedTuple):
    """Commands that run otherwise than pasted.

    Args:
        command: what such a command looks like.
        instead: what runs in its place (``re.sub``); empty where nothing does.
        reason: why.
    """

    command: str
    instead: str
    reason: str


EXCEPTIONS = (
    Instead(r"^bash tools/test\.sh.*", r"bash tools/test.sh --help", "the suite holds this test"),
    Instead(
        r"^(?:nice )?(?:\w+=\S+ )*(megatron-dpp bench [\w-]+).*", r"\1 --help",
        "minutes to hours, and GPUs",
    ),
    Instead(r"^(NUM_NODES=2 .*)$", r"\1 --gpu H100 --dry-run", "two nodes of eight GPUs"),
    Instead(
        r"^(MASTER_ADDR=\S+ bash run_(?:master|worker)_)", r"DRY_RUN=1 \1", "two machines"
    ),
    Instead(
        r"^(.*bash (?:examples/(?:gpt3|bert)/train_|run_single_bert).*)",
        r"DRY_RUN=1 GPUS_PER_NODE=8 \1",
        "a large model on GPUs",
    ),
    Instead(r"^(srun|sbatch|kubectl|docker) .*", "", "a cluster and its tools"),
    Instead(r"^(nvidia-cuda-mps-control|ibv_rc_pingpong|rping) .*", "", "NVIDIA's or RDMA's tools"),
    Instead(
        r"^megatron-dpp (?:convert|evaluate|generate|train) .*llama.*", "",
        "a downloaded model; tests/hf runs such commands with a small one",
    ),
    Instead(
        r"^megatron-dpp .*--family-file .*", "",
        "a model and a file of the reader's; tests/families runs them with a small one",
    ),
    Instead(
        r"^(.*-m pip install deepspeed)", "", "installs into the environment that tests share"
    ),
    Instead(r"^torchrun .*--hidden-size 2048 .*", "", "two GPUs"),
    Instead(r"^megatron-dpp train .*--engine deepspeed.*", "", "DeepSpeed"),
    Instead(r"^(megatron-dpp plan benchmark/traced2.*)", "", "a trace of four GPUs"),
    Instead(
        r"^megatron-dpp report --benchmark_dir benchmark/data-1-pipeline-4-\S+ --json$", "",
        "a trace of the benchmark above it",
    ),
    Instead(
        r"^(megatron-dpp monitor --web .*)", r"timeout --preserve-status -s TERM 30 \1",
        "serves until Ctrl-C",
    ),
    Instead(r"^jq .*", "", "jq"),
    Instead(
        r"^((?:\w+=\S+ )*)(bash run_single_gpt\.sh)", r"\1TRAIN_ITERS=4 \2",
        "two minutes each; the README's first one runs whole",
    ),
)  # fmt: skip


def commands_of(page: str) -> Iterator[str]:
    """The commands of a page's bash blocks; a comment behind a command stays."""
    for block in BLOCK.findall((REPOSITORY / page).read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield line


def to_run(page: str) -> list[str]:
    """Those commands, with exceptions in place of what cannot run here."""
    found = []
    for number, line in enumerate(commands_of(page)):
        whole = page == "README.md" and number == 0
        command = re.sub(r"\s+#.*", "", line).strip()
        for each in () if whole else EXCEPTIONS:
            changed = re.sub(each.command, each.instead, command)
            if changed != command or not changed:
                command = changed
                break
        else:
            command = line
        found += [command] if command else []
    return found


def test_bash_blocks_hold_no_placeholders() -> None:
    wrong = [
        f"{page}: {line}"
        for page in PAGES
        for line in commands_of(page)
        if PLACEHOLDER.search(re.sub(r"\s+#.*", "", line))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_command_stands_in_an_indented_block() -> None:
    """Nothing would run or check it there."""
    start = re.compile(r"^    (?:megatron-dpp|bash|python3?|torchrun|\./\w+) ", re.MULTILINE)
    wrong = [page for page in PAGES if start.search((REPOSITORY / page).read_text("utf-8"))]
    assert not wrong


def test_every_exception_is_needed() -> None:
    lines = [re.sub(r"\s+#.*", "", line).strip() for page in PAGES for line in commands_of(page)]
    unused = [
        each.command
        for each in EXCEPTIONS
        if not any(re.search(each.command, line) for line in lines)
    ]
    assert not unused


def test_benchmarks_that_are_asked_for_help_exist() -> None:
    """``bench sliced`` was asked in the place of ``bench sliced-train``."""
    lines = [line for page in PAGES for line in to_run(page)]
    names = {line.split()[2] for line in lines if line.startswith("megatron-dpp bench ")}
    script = "profiling/bench_{}.py"
    assert names
    assert not [n for n in names if not (REPOSITORY / script.format(n.replace("-", "_"))).exists()]


def fresh_clone(folder: Path) -> dict[str, str]:
    """Clone the committed tree; the environment of a new shell whose Python is this one's.

    The clone gets this tree's extension, which set-up builds again where sources differ.
    """
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(folder)], check=True)
    (folder / "build").mkdir()
    libraries = (REPOSITORY / "megatron").rglob("*.so")
    for path in (*libraries, *(REPOSITORY / "build").glob("extension*.json")):
        shutil.copy(path, folder / path.relative_to(REPOSITORY))
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TERM") if name in os.environ}
    path = [str(Path(sys.executable).parent), *os.defpath.split(":"), "/usr/local/bin"]
    return {**kept, **_NO_CUDA, "PATH": ":".join(path)}


@pytest.mark.slow
@pytest.mark.timeout(_PAGE_S)
@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_commands_run_as_pasted(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    env = fresh_clone(folder)
    status = tmp_path / "status"
    script = ["source tools/activate.sh"] if "README" not in page and "index" not in page else []
    lines = [*script, *to_run(page)]
    text = "\n".join(f"{line}\necho $? >>'{status}'" for line in lines)
    ran = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=env, timeout=_PAGE_S, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    codes = status.read_text().split()
    failed = [line for line, code in zip(lines, codes, strict=True) if code != "0"]
    assert not failed, "\n".join([*failed, ran.stdout[-4000:]])
