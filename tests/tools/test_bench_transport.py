"""Reading of other programs' output by the transport's benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

from bench_transport import ucx_seconds  # noqa: E402

PRINTED = """\
+--------------+--------------+------------------------------+---------------------+
|              |              |        latency (usec)        |   bandwidth (MB/s)  |
+--------------+--------------+----------+---------+---------+----------+----------+
|     Test     | # iterations | 50.0%ile | average | overall |  average |  overall |
+--------------+--------------+----------+---------+---------+----------+----------+
                         500      5.903     5.961     5.961    10484.92   10484.92
"""


def test_ucx_perftests_heading_is_not_its_result() -> None:
    assert ucx_seconds(PRINTED) == pytest.approx(5.903e-6)
