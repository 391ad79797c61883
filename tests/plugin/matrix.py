"""The table of versions and features in ``docs/plugin-tests.md``, made from a run of test_hosts.py.

tools/test.sh --long tests/plugin/test_hosts.py --junitxml=hosts.xml
python -m tests.plugin.matrix hosts.xml
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.plugin.hosts import VERSIONS

PAGE = Path(__file__).parents[2] / "docs" / "plugin-tests.md"
COLUMNS = dict(
    zip(
        VERSIONS,
        (
            "0.16.1",
            "0.17.1",
            "0.18.2",
            "0.19.0 (0.19.1 inside)",
            "0.19.2 (wheel)",
            "main of 2026-08-22 (0.20.0)",
        ),
        strict=True,
    )
)
"""Version -> head of its column."""
ROWS = {
    "pp2": "2 stages (2)",
    "pp2-x2": "2 stages x 2 chunks (2)",
    "pp4-x2": "4 stages x 2 chunks (4)",
    "tp2-pp2": "2 stages, tensor parallelism 2 (4)",
    "dp2-pp2-x2": "2 stages x 2 chunks, 2 replicas, "
    "`--overlap-grad-reduce --use-distributed-optimizer` (4)",
    "dp2-pp2-gather": "2 stages, the same and `--overlap-param-gather` (4)",
    "experts": "4 experts, `--expert-model-parallel-size 1` (2)",
    "experts-ep2": "the same with `--expert-model-parallel-size 2` (4)",
    "delays": "2 stages x 2 chunks with injected delays (2)",
    "test_a_resumed_run_continues_bit_by_bit": "save, resume, 2 stages x 2 chunks (2)",
    "test_one_pipeline_rank_runs_the_static_schedule": "one pipeline rank passes through, "
    "`--dpp-strict` refuses (1)",
    "test_microbatches_that_the_static_schedule_refuses": "3 microbatches on 2 stages x 2 chunks, "
    "which the host's own schedule refuses (2)",
    "test_sequences_in_slices_of_every_version": "2 stages, `--dpp-slice-tokens 16`, dynamic and "
    "Megatron's order (2)",
}
"""Case of test_every_version_and_layout, or another test -> label of its row, with its ranks."""
_NOT_COMPARED = "test_microbatches_that_the_static_schedule_refuses"
_NAME = re.compile(r"(?P<test>\w+)\[(?P<version>[\w.]+?(?:-\d{4}-\d\d-\d\d)?)(?:-(?P<case>.+))?\]")


def results(report: str) -> dict[tuple[str, str], str]:
    """(row, version) -> "passed", "failed" or "skipped".

    Args:
        report: JUnit's XML, as pytest writes it.
    """
    found = {}
    for case in ET.fromstring(report).iter("testcase"):
        match = _NAME.fullmatch(case.attrib["name"])
        if match is None or (row := match["case"] or match["test"]) not in ROWS:
            continue
        outcome = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[row, match["version"]] = (
            "passed" if not outcome else "skipped" if outcome == {"skipped"} else "failed"
        )
    return found


def table(found: dict[tuple[str, str], str]) -> str:
    """The table in Markdown, from what ``results`` returns."""
    lines = [["configuration (ranks)", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for row, label in ROWS.items():
        passed = "runs" if row == _NOT_COMPARED else "equal"
        words = {"passed": passed, "failed": "**fails**", "skipped": "-"}
        cells = (words[found.get((row, version), "skipped")] for version in COLUMNS)
        lines.append([label, *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace(" --- ", "---")


def in_page(page: str) -> str:
    """The table as the page has it."""
    return page[page.index("| configuration (ranks)") :].partition("\n\n")[0] + "\n"


def main() -> None:
    """Put the table of the given reports into the page."""
    page, found = PAGE.read_text(encoding="utf-8"), {}
    for report in sys.argv[1:]:
        found |= results(Path(report).read_text(encoding="utf-8"))
    made = table(found)
    PAGE.write_text(page.replace(in_page(page), made), encoding="utf-8")


if __name__ == "__main__":
    main()
