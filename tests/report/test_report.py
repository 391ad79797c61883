"""The report as its users meet it: the command, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.dpp.report import report_command
from megatron.dpp.report.analysis.sentences import duration
from megatron.dpp.report.pictures.picture import COLOURS
from megatron.dpp.trace.schema import IdleCause
from tests.report.injected import call, inject
from tests.report.synthetic import Run, write

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    return call(report_command.main, *arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("report")
    directory = write(inject(Run(chunks=2, iterations=6), "slow-rank", 1), base)
    static = Run(chunks=2, policy="megatron", split=False, schedule="pp")
    other = write(inject(static, "none", 1), base)
    lines = [{"iteration": i, "loss": 9.0 / i, "ms": 2.0, "tokens": 8} for i in range(1, 9)]
    (base / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = report("--benchmark_dir", str(directory), "--baseline", str(other), "--json")
    return base, directory, done


def test_the_numbers_are_json(made):
    _, _, done = made
    numbers = json.loads(done.stdout)
    assert done.returncode == 0
    assert numbers["totals"]["bubble"] > 0.1
    assert numbers["stragglers"][0]["kind"] == "slow-rank"
    assert numbers["what_if"][0]["name"].startswith("without slow-rank")
    assert numbers["baseline"]["run"]["schedule"] == "pp"
    assert numbers["fidelity"] == pytest.approx(1.0, abs=0.03)


def test_the_time_stands_beside_that_of_the_other_schedule(made, tmp_path):
    """Of a dynamic run the static order's, and the other way round."""
    static = made[1].with_name("data-1-pipeline-4-tensor-1-pp")
    for other, of in (("Megatron's static order", made[1]), ("dynamic schedule", static)):
        done = report(str(of), "--json", "--output", str(tmp_path / "page.html"))
        numbers = json.loads(done.stdout)
        gain = next(row["gain"] for row in numbers["what_if"] if row["name"] == other)
        more = f"{abs(gain) * 100:.1f} % {'less' if gain > 0 else 'more'} time per iteration than"
        said = f"{other} takes {more if abs(gain) >= 0.01 else 'as long as'} what ran"
        assert said in "".join(numbers["sentences"])


def test_a_sliced_run_has_no_predictions_and_says_so(tmp_path):
    own = str(write(Run(iterations=3, groups=(3, 1, 4)), tmp_path))
    done = report(own)
    assert "not simulated" in done.stdout
    numbers = json.loads(report(own, "--json").stdout)
    assert numbers["what_if"] == []
    page = Path(own, "report.html").read_text()
    assert "3 microbatches" in page and "No prediction" in page


def elements(text):
    """All elements of a page by name; fails where one is not closed in its place."""

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.found = [], []

        def handle_starttag(self, tag, attributes):
            above = [name for name, _ in self.open]
            self.found.append((tag, dict(attributes), above))
            if tag not in ("meta", "input", "br"):
                self.open.append((tag, self.getpos()))

        def handle_startendtag(self, tag, attributes):
            self.found.append((tag, dict(attributes), [name for name, _ in self.open]))

        def handle_endtag(self, tag):
            name, at = self.open.pop()
            assert name == tag, f"<{name}> of line {at} ended by </{tag}> of {self.getpos()}"

    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader.found


def test_the_page_is_well_formed_and_has_its_parts_in_order(made):
    text = (made[1] / "report.html").read_text()
    found = elements(text)
    headings = [re.sub("<.*?>", "", each) for each in re.findall(r"<h2>(.*?)</h2>", text)]
    parts = ("Findings", "Loss", "Beside", "Iteration", "The ranks idle", "What if", "The run")
    assert all(map(str.startswith, headings, parts)) and len(headings) == len(parts)
    assert {"F: forward", "B: backward", "W: weight gradient"} <= set(re.findall(">([^<]+)<", text))
    drawn = [attributes for tag, attributes, _ in found if tag == "svg"]
    assert len(drawn) == 3 and all(one["aria-label"] and one["viewbox"] for one in drawn)
    assert not re.search(r"(src|href)=", text), "it needs no network"


def test_every_colour_comes_from_one_table(made):
    text = (made[1] / "report.html").read_text()
    assert {*IdleCause} <= COLOURS.keys()
    known = {colour for pair in COLOURS.values() for colour in pair}
    assert set(re.findall("#[0-9a-f]{6}", text)) <= known
    body = text[text.index("<main>") : text.index("</main>")]
    for kind in "FBW":
        assert f"--{kind}:{COLOURS[kind][0]};" in text
        assert f'class="f-{kind}" fill="{COLOURS[kind][0]}"' in body


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_all_pictures_within_the_window(made, tmp_path):
    probe = """
    <script>
    onerror = message => { document.title = "error: " + message; };
    addEventListener("load", () => {
      const all = [...document.querySelectorAll("svg")].map(each => each.getBoundingClientRect());
      const drawn = all.filter(size => size.width > 300 && size.height > 40).length;
      document.title = JSON.stringify({drawn,
        wide: document.documentElement.scrollWidth - innerWidth});
    });
    </script>"""
    page = tmp_path / "page.html"
    page.write_text((made[1] / "report.html").read_text().replace("</head>", probe + "</head>"))
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=360,900",
        f"--user-data-dir={tmp_path}/browser", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-500:]
    found = json.loads(title[1])
    assert found["drawn"] == 3 and found["wide"] <= 0


def test_times_are_short():
    shown = [duration(ms) for ms in (13_049.9, 999.96, 930.7, 4.2151, 0.0312, 0, 125_000, -0.5)]
    assert shown == [
        "13.05 s", "1 s", "930.7 ms", "4.215 ms", "31.2 us", "0 ms", "125 s", "-0.5 ms",
    ]  # fmt: skip


def test_a_slow_link_that_costs_nothing_is_not_called_a_straggler(tmp_path):
    """On a busy machine a normal link may look slow, with a predicted gain of 0.0 to 0.4 %."""
    late = Run(
        microbatches=16,
        iterations=6,
        hop=lambda i, *ends: 900_000 if set(ends) == {0, 1} else 100_000,
    )
    directory = write(late, tmp_path)
    done = report("--benchmark_dir", str(directory), "--json")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["stragglers"] == [] and numbers["totals"]["stragglers"] == 0
    (harmless,) = numbers["without_effect"]
    assert (harmless["kind"], harmless["name"]) == (
        "slow-link",
        "stage 0 (rank 0) and stage 1 (rank 1)",
    )
    assert 0 <= harmless["effect"] < 0.01
    assert "No straggler." in numbers["sentences"]
    assert any(line.startswith("Without effect") for line in numbers["sentences"])


def test_two_ranks_that_are_equally_slow_are_both_named(tmp_path):
    """A faster rank gains nothing as long as the other is slow."""

    def cost(iteration, rank, kind, chunk, microbatch):
        return 15_000_000 if rank in (1, 2) else 10_000_000

    directory = write(Run(cost=cost, ranks=6, microbatches=18, iterations=6), tmp_path)
    numbers = json.loads(report("--benchmark_dir", str(directory), "--json").stdout)
    names = sorted(s["name"] for s in numbers["stragglers"])
    assert names == ["stage 1 (rank 1)", "stage 2 (rank 2)"]
    assert all(s["effect"] > 0.1 for s in numbers["stragglers"])
    alone = [p["gain"] for p in numbers["what_if"] if p["name"].startswith("without slow-rank")]
    assert max(alone) < 0.1


def test_wrong_arguments_are_errors_of_one_line(made, tmp_path):
    for arguments, message in (
        (("--benchmark_dir", str(tmp_path)), "no trace"),
        (("--benchmark_dir", str(made[1]), "--iteration", "99"), "--iteration 99"),
        (("--benchmark_dir", str(made[1]), "--threshold", "1"), "--threshold 1"),
    ):
        done = report(*arguments, "--output", str(tmp_path / "r.html"))
        assert done.returncode == (2 if message.startswith("--") else 1)
        assert done.stderr.startswith("megatron-dpp report: error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
