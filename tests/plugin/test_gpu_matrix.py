"""The rows of gpu_plugin_matrix.py, as far as a machine without a GPU can tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import gpu_plugin_matrix as matrix  # noqa: E402

from tests.plugin.hosts import ENGINE, NEWEST, Hosts  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_megatrons_own_parser_reads_the_flags_of_every_row(hosts: Hosts) -> None:
    """Rows whose script the archive lacks say so."""
    found = dict(matrix.parsed(hosts, NEWEST, list(matrix.ROWS), ENGINE))
    assert found.keys() == matrix.ROWS.keys()
    for name, said in found.items():
        assert said in ("read", f"no {matrix.ROWS[name].script} in {NEWEST}"), name
    assert found["sft"] == "read"
