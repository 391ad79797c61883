"""Alignment of two real clocks: processes in time and network namespaces of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.dpp.report.aggregate_command import merge
from megatron.dpp.report.align import align
from megatron.dpp.report.reader import open_run

ROOT = Path(__file__).resolve().parents[2]
OFFSET_S = 1234


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a pair of virtual cables."""
    names = (f"dppA{os.getpid()}", f"dppB{os.getpid()}")
    try:
        for name in names:
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", "dpp0", "netns", names[0], "type", "veth", "peer", "name", "dpp0",
           "netns", names[1])  # fmt: skip
        for host, name in enumerate(names, 1):
            sh("ip", "-n", name, "address", "add", f"10.99.0.{host}/24", "dev", "dpp0")
            sh("ip", "-n", name, "link", "set", "dpp0", "up")
        sh("unshare", "--time", "--monotonic", "1", "--fork", "true")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        pytest.skip(f"this machine offers no network and time namespaces: {error}")
    yield names
    for name in names:
        sh("ip", "netns", "delete", name)


def test_a_real_offset_is_found_within_the_stated_uncertainty(networks, tmp_path):
    script = [sys.executable, str(Path(__file__).with_name("clock_peer.py"))]
    shifted = ["unshare", "--time", "--monotonic", str(OFFSET_S), "--fork", "--kill-child"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    peers = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                *clock,
                *script,
                str(rank),
                str(tmp_path),
                "10.99.0.1",
                "7099",
            ],
            env=environment,
        )
        for rank, (name, clock) in enumerate(zip(networks, ([], shifted), strict=True))
    ]
    try:
        assert [peer.wait(120) for peer in peers] == [0, 0]
    finally:
        for peer in peers:
            peer.kill()
    files = open_run(tmp_path)
    assert files[0].clock != files[1].clock
    found = align(files).offsets[files[1].clock]
    error_ns = abs(found.points[0][1] + OFFSET_S * 10**9)
    assert error_ns <= found.uncertainty_ns
    assert found.uncertainty_ns < 50_000_000  # below 2 ms where the machine is quiet
    merge(files, tmp_path / "merged.json")
