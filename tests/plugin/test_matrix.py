"""The table in docs/plugin-tests.md has what test_hosts.py runs, and nothing else."""

from __future__ import annotations

import inspect

from tests.plugin import matrix, test_hosts
from tests.plugin.hosts import VERSIONS

SLOW = {
    name
    for name, test in inspect.getmembers(test_hosts, inspect.isfunction)
    if any(mark.name == "slow" for mark in getattr(test, "pytestmark", ()))
}
OTHERS = {
    "test_every_version_and_layout",
    "test_masks_of_documents_are_not_cut",
    "test_packed_rows_in_slices",
    "test_packed_rows_in_a_planned_order",
}
"""Of the first the cases have rows, the second compares no numbers, the third has its own table,
the fourth differs from the host by rounding."""
REPORT = """<testsuites><testsuite>
<testcase name="test_every_version_and_layout[core_v0.16.1-pp2]"/>
<testcase name="test_every_version_and_layout[main-2026-08-22-pp2-x2]"><failure/></testcase>
<testcase name="test_every_version_and_layout[core_v0.17.1-dp2-pp2-x2]"><skipped/></testcase>
<testcase name="test_microbatches_that_the_static_schedule_refuses[main-2026-08-22]"/>
<testcase name="test_numbers_are_those_of_the_static_schedule[core_v0.19.0]"/>
</testsuite></testsuites>"""


def test_each_case_has_a_row() -> None:
    assert set(matrix.ROWS) == {*test_hosts.CASES, *SLOW - OTHERS}


def test_the_page_has_these_rows_and_columns() -> None:
    everything = {(row, version): "passed" for row in matrix.ROWS for version in VERSIONS}
    page = matrix.in_page(matrix.PAGE.read_text(encoding="utf-8")).splitlines()
    made = matrix.table(everything).splitlines()
    assert page[:2] == made[:2]
    assert [line.split(" | ")[0] for line in page] == [line.split(" | ")[0] for line in made]


def test_a_report_becomes_cells() -> None:
    found = matrix.results(REPORT)
    assert found == {
        ("pp2", "core_v0.16.1"): "passed",
        ("pp2-x2", "main-2026-08-22"): "failed",
        ("dp2-pp2-x2", "core_v0.17.1"): "skipped",
        ("test_microbatches_that_the_static_schedule_refuses", "main-2026-08-22"): "passed",
    }
    rows = matrix.table(found).splitlines()[2:]
    assert rows[0] == "| 2 stages (2) | equal | - | - | - | - | - |"
    assert rows[1] == "| 2 stages x 2 chunks (2) | - | - | - | - | - | **fails** |"
    assert rows[-2].endswith("| - | - | - | - | - | runs |")
