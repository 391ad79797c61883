"""The report as its users meet it: the script, the HTML in a real browser, the pictures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.dpp.trace.scalars import IterationScalars
from tests.trace.injected import inject
from tests.trace.synthetic import Channel, Run, write

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def report(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "profiling/report.py"), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("report")
    directory = write(inject(Run(chunks=2), "slow-rank", 1), base)
    static = Run(chunks=2, policy="megatron", split=False, schedule="pp")
    other = write(inject(static, "none", 1), base)
    done = report(
        *("--benchmark_dir", str(directory), "--baseline", str(other)),
        *("--plots", str(base / "png"), "--costs", str(base / "costs.json")),
        *("--json", "--fail-if", "bubble>0.1", "--fail-if", "iteration_ms>1e6"),
    )
    return base, directory, done


def test_the_numbers_are_json_and_a_broken_limit_is_status_2(made):
    _, _, done = made
    numbers = json.loads(done.stdout)
    assert done.returncode == 2
    assert done.stderr.count("limit broken") == 1
    assert "bubble>0.1" in done.stderr
    assert numbers["stragglers"][0]["kind"] == "slow-rank"
    assert numbers["what_if"][0]["name"].startswith("without slow-rank")
    assert numbers["baseline"]["run"]["schedule"] == "pp"
    assert numbers["fidelity"] == pytest.approx(1.0, abs=0.03)


def test_plots_without_matplotlib_are_refused_in_a_line(made, tmp_path):
    _, directory, _ = made
    hidden = "import sys; sys.modules['matplotlib'] = None\n"  # importing it raises
    (tmp_path / "sitecustomize.py").write_text(hidden)
    done = report(
        *("--benchmark_dir", str(directory), "--output", str(tmp_path / "report.html")),
        *("--plots", str(tmp_path / "png")),
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1
    assert done.stderr == "report.py: --plots needs matplotlib: pip install matplotlib\n"
    assert not (tmp_path / "png").exists()


def test_a_slow_link_that_costs_nothing_is_not_called_a_straggler(tmp_path):
    """On a busy machine a normal link may look slow, with a predicted gain of 0.0 to 0.4 %."""
    late = Run(microbatches=16, hop=lambda i, *ends: 900_000 if set(ends) == {0, 1} else 100_000)
    directory = write(late, tmp_path)
    done = report("--benchmark_dir", str(directory), "--json", "--fail-if", "stragglers>0")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["stragglers"] == []
    (harmless,) = numbers["without_effect"]
    assert (harmless["kind"], harmless["name"]) == ("slow-link", "link 0-1")
    assert 0 <= harmless["effect"] < 0.01
    assert "No straggler." in numbers["sentences"]
    assert any(line.startswith("Without effect") for line in numbers["sentences"])


def test_two_ranks_that_are_equally_slow_are_both_named(tmp_path):
    """A faster rank gains nothing as long as the other is slow."""

    def cost(iteration, rank, kind, chunk, microbatch):
        return 15_000_000 if rank in (1, 2) else 10_000_000

    directory = write(Run(cost=cost, ranks=6, microbatches=18), tmp_path)
    numbers = json.loads(report("--benchmark_dir", str(directory), "--json").stdout)
    assert sorted(s["name"] for s in numbers["stragglers"]) == ["rank 1", "rank 2"]
    assert all(s["effect"] > 0.1 for s in numbers["stragglers"])
    alone = [p["gain"] for p in numbers["what_if"] if p["name"].startswith("without slow-rank")]
    assert max(alone) < 0.1


def test_every_plot_is_a_png(made):
    pictures = list((made[0] / "png").iterdir())
    assert len(pictures) == 9
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_wrong_arguments_are_errors_of_one_line(made, tmp_path):
    for arguments, message in (
        (("--benchmark_dir", str(tmp_path)), "no trace"),
        (("--benchmark_dir", str(made[1]), "--iteration", "99"), "--iteration 99"),
        (("--benchmark_dir", str(made[1]), "--fail-if", "bubble"), "expected a total"),
        (("--benchmark_dir", str(made[1]), "--skip", "3"), "none is left"),
        (("--benchmark_dir", str(made[1]), "--skip", "-1"), "--skip -1"),
        (("--benchmark_dir", str(made[1]), "--threshold", "1"), "--threshold 1"),
    ):
        done = report(*arguments, "--output", str(tmp_path / "r.html"))
        assert done.returncode == 1
        assert done.stderr.startswith("report.py: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


PROBE = """
<script>
window.onerror = (message) => { document.title = "error: " + message; };
addEventListener("load", () => {
  const canvas = document.getElementById("timeline");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    colours.add(pixels[i] << 16 | pixels[i+1] << 8 | pixels[i+2]);
  const all = shown.length;
  const [left, top, width, height] = shown.find(s => s[4][4] === "0F0");
  const at = {clientX: 5, clientY: 5, bubbles: true};
  const event = new PointerEvent("pointermove", at);
  Object.defineProperty(event, "offsetX", {value: left + width / 2});
  Object.defineProperty(event, "offsetY", {value: top + height / 2});
  canvas.dispatchEvent(event);
  const tip = document.getElementById("tip").textContent;
  const before = view[1] - view[0];
  zoom(0.5, 300);
  const zoomed = (view[1] - view[0]) / before;
  document.querySelector("#filters input[type=checkbox]").click();
  const filtered = shown.length;
  const bars = document.querySelectorAll("#bars .bar").length;
  const rows = [...document.querySelectorAll("table")].map(t => t.rows.length);
  const found = {colours: colours.size, all, tip, zoomed, filtered, bars, rows};
  document.body.dataset.probe = JSON.stringify(found);
});
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_a_browser_draws_hovers_zooms_and_filters_without_errors(made, tmp_path):
    text = (made[1] / "report.html").read_text()
    assert "http" not in text.replace("http-equiv", "")
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    marker = 'data-probe="'
    assert marker in done.stdout
    probe = done.stdout.split(marker)[1].split('"')[0].replace("&quot;", '"')
    found = json.loads(probe)
    assert found["colours"] > 5
    assert found["tip"].startswith("0F0 on rank 0\n")
    assert "F of chunk 0, microbatch 0" in found["tip"]
    assert found["zoomed"] == pytest.approx(0.5)
    assert 0 < found["filtered"] < found["all"]
    assert found["bars"] == 4
    assert len(found["rows"]) == 6
    assert min(found["rows"]) >= 2


def test_scalars_for_tensorboard():
    scalars = IterationScalars()
    channel = Channel(0, 1, 0, 0)
    assert scalars.latest == {}
    for event in (
        ("T", 10, 40, 1, "F", 0, 0, 0),
        ("C", 40, 40, 1, "held", 2),
        ("C", 41, 41, 1, "held", 1),
        ("P", 40, 41, 1, channel, 0, 100, "shm"),
        ("P", 60, 61, 1, channel, 1, 100, "shm"),
        ("T", 50, 80, 1, "B", 0, 0, 0),
        ("C", 90, 90, 1, "memory", 4096),
        ("I", 0, 100, 1),
    ):
        scalars.add(event)
    assert scalars.latest == {
        "dpp/held": 2.0,
        "dpp/bytes/0-1": 200.0,
        "dpp/memory-bytes": 4096.0,
        "dpp/bubble": 0.25,
    }
    scalars.add(("I", 100, 200, 2))
    assert scalars.latest == {}
