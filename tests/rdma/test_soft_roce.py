"""Real verbs on a machine without any: soft-RoCE in an emulated machine (``vm.py``).

``tools/test.sh --rdma`` runs this, and trains with ``--long``; it may install Debian packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.transport.test_sanitizers import build

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NATIVE_SECONDS, LINKS_SECONDS, TRAINING_SECONDS, SET_UP_SECONDS = 900, 2400, 3000, 900
"""For a machine that does much else: several times what two free cores need."""

ENVIRONMENT = (
    "OMP_NUM_THREADS=1", "TORCHDYNAMO_DISABLE=1", "PYTHONWARNINGS=ignore",
    "PYTHONDONTWRITEBYTECODE=", f"PYTHONPATH={REPOSITORY}",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    "rdma" not in os.environ.get("DPP_REQUIRE", "").split(","),
    reason="boots an emulated machine with soft-RoCE: runs with tools/test.sh --rdma",
)


def in_guest(seconds: int, *command: str) -> str:
    """Runs a command in the guest and returns its output; fails unless it exits with 0 in time."""
    vm = [sys.executable, str(HERE / "vm.py"), "--timeout", str(seconds), "--memory", "6G", "--"]
    ran = subprocess.run([*vm, *command], capture_output=True, text=True, cwd=REPOSITORY)
    assert ran.returncode == 0, f"{ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    print(ran.stdout)
    return ran.stdout


@pytest.mark.timeout(NATIVE_SECONDS + SET_UP_SECONDS)
def test_the_native_side_over_soft_roce(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        built = [
            pool.submit(build, program, "", tmp_path, patience=SET_UP_SECONDS)
            for program in ("stress", "speed")
        ]
    for program in built:
        program.result()
    said = in_guest(NATIVE_SECONDS, "bash", str(HERE / "guest.sh"), str(tmp_path))
    assert "100 iters" in said and "20 rpings" in said  # the control
    assert "10000 messages over rdma: every byte arrived, in order" in said
    assert "20 messages over rdma: every byte arrived, in order" in said
    mib = 1.048576
    for size in (4194304, 16777216):
        reference = float(re.search(rf"ib_write_bw {size}: (\S+)", said)[1]) * mib  # type: ignore[index]
        ours = float(re.search(rf"ours {size}: (\S+)", said)[1])  # type: ignore[index]
        print(f"{size} bytes: {ours / reference:.2f} of ib_write_bw")
        assert ours >= 0.5 * reference  # 0.95 on a quiet machine; this catches a collapse
    cut = re.search(r"the cut was named after (\d+) s: (.*)", said)
    assert cut is not None and int(cut[1]) <= 15, cut
    # The side whose own port went down says so; the other one runs out of retries.
    assert re.search("which is down: cable or switch|cannot be reached over RDMA", cut[2]), cut


def prepared(folder: Path) -> str:
    """Builds the extension and the sample's tokens here; the guest would need many minutes."""
    setup = ["bash", "tools/setup.sh"]
    subprocess.run(setup, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHON": sys.executable})
    tokens = folder / "sample"
    words = ["--vocab-file", "datasets_gpt/vocab.json", "--merge-file", "datasets_gpt/merges.txt"]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--output-prefix", str(tokens)]
    make = [sys.executable, "tools/preprocess_data.py", "--input", "datasets_gpt/dataset.json"]
    subprocess.run([*make, *words, "--append-eod"], check=True, cwd=REPOSITORY)
    return f"{tokens}_text_document"


def checked_in_guest(name: str, seconds: int, **variables: str) -> str:
    """Runs a file of tests in the guest."""
    words = ["-m", "pytest", "-x", "-q", "-s", "--long", "-p", "no:cacheprovider"]
    words += ["--basetemp", "/run/pytest", str(HERE / name)]
    settings = [f"{key}={value}" for key, value in {"DPP_REQUIRE": "rdma", **variables}.items()]
    said = in_guest(seconds, "env", *ENVIRONMENT, *settings, sys.executable, *words)
    assert "skipped" not in said
    return said


@pytest.mark.slow
@pytest.mark.timeout(LINKS_SECONDS + SET_UP_SECONDS)
def test_settings_blackouts_and_a_card_that_fails() -> None:
    checked_in_guest("guest_links.py", LINKS_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(TRAINING_SECONDS + SET_UP_SECONDS)
def test_blackouts_and_experts_of_two_hosts_change_no_number(tmp_path: Path) -> None:
    said = checked_in_guest("guest_training.py", TRAINING_SECONDS, DATA_PATH=prepared(tmp_path))
    assert "iterations with blackouts and without: equal, bit by bit" in said
