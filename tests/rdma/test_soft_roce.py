"""Real verbs on a machine without any: soft-RoCE in an emulated machine (``vm.py``).

``tools/test.sh --rdma`` runs this; it takes some minutes and may install Debian packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transport.test_sanitizers import build

HERE = Path(__file__).resolve().parent
GUEST_SECONDS = 420
GUEST_FAILED = 125

ENVIRONMENT = (
    "OMP_NUM_THREADS=1", "TORCHDYNAMO_DISABLE=1", "PYTHONWARNINGS=ignore",
    "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={HERE.parents[1]}",
)  # fmt: skip

pytestmark = [
    pytest.mark.timeout(GUEST_SECONDS + 300),
    pytest.mark.skipif(
        "rdma" not in os.environ.get("DPP_REQUIRE", "").split(","),
        reason="boots an emulated machine with soft-RoCE: runs with tools/test.sh --rdma",
    ),
]


def in_guest(*command: str) -> str:
    """What a command prints in the guest; fails with it unless it ends with status 0."""
    vm = [sys.executable, str(HERE / "vm.py"), "--timeout", str(GUEST_SECONDS), "--"]
    ran = subprocess.run([*vm, *command], capture_output=True, text=True, cwd=HERE.parents[1])
    assert ran.returncode == 0, f"{ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    print(ran.stdout)
    return ran.stdout


def test_the_native_side_over_soft_roce(tmp_path: Path) -> None:
    for program in ("stress", "speed"):
        build(program, "", tmp_path)
    said = in_guest("bash", str(HERE / "guest.sh"), str(tmp_path))
    assert "100 iters" in said  # the control
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


def test_training_over_soft_roce_is_that_over_shared_memory() -> None:
    assert "3 iterations over rdma and over shm: equal, bit by bit" in in_guest(
        "env", *ENVIRONMENT, sys.executable, str(HERE / "train.py")
    )
