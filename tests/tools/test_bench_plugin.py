"""The command line, the lengths, the timed steps and the end of the plugin's benchmark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_parallel  # noqa: E402
import bench_plugin  # noqa: E402
import megatron_sources  # noqa: E402
from plugin_group import Line, timed  # noqa: E402

from megatron.dpp.config import DppConfig  # noqa: E402


def arguments(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> object:
    (folder / "v").mkdir()
    sources = ["--sources", str(folder), "--versions", "v"]
    monkeypatch.setattr(sys, "argv", ["bench_plugin.py", *sources, *words])
    return bench_plugin.parse_arguments()


def test_lengths_are_unlike_and_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = arguments(monkeypatch, tmp_path)
    for row, most in (("unlike", 16 * 1500), ("packed", 16 * 2048)):
        drawn = bench_plugin.lengths(args, row)
        assert drawn == bench_plugin.lengths(args, row) and len(drawn) == 16 and sum(drawn) < most
        assert len(set(drawn)) > 5 and all(16 <= one <= 2048 and one % 16 == 0 for one in drawn)
    assert sum(bench_plugin.lengths(args, "packed")) > 0.9 * 16 * 2048
    unlike, padded = (bench_plugin.lengths(args, row) for row in ("unlike", "bucketed"))
    assert all(one <= other < 1.5 * one + 256 for one, other in zip(unlike, padded, strict=True))
    _, _, settings = bench_plugin.arm_of("megatron", "bucketed")
    assert set(padded) <= set(DppConfig(**settings).buckets(2048))


def test_own_graphs_and_queues_are_process_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = arguments(
        monkeypatch, tmp_path, "--queues=1,8", "--arms", "static,static-graphs,megatron,dynamic"
    )
    assert [*bench_plugin.process_groups(args, "equal")] == [
        ("1", ["static", "dynamic"]),
        ("8", ["static", "megatron", "dynamic"]),
        ("8", ["static-graphs"]),
    ]
    assert len([*bench_plugin.process_groups(args, "unlike")]) == 2


def test_each_table_is_a_command_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "v").mkdir()
    words = ["--sources", str(tmp_path), "--versions", "v"]
    every = bench_plugin.parse_cases([*words, "--cases", ",".join(bench_plugin.CASES)])
    assert [args.cases for args in every] == list(bench_plugin.CASES)
    fp8 = next(args for args in every if args.cases == "fp8")
    assert "--fp8-format hybrid" in fp8.more and "--swiglu" in fp8.more
    small = bench_plugin.parse_cases([*words, "--cases", "long", "--sequence", "64"])
    assert (small[0].sequence, small[0].layers_of) == (64, "transformer_engine")
    assert [args.cases for args in bench_plugin.parse_cases(words)] == [""]
    with pytest.raises(SystemExit):
        bench_plugin.parse_cases([*words, "--cases", "short"])
    assert "--cases short: expected of lengths, " in capsys.readouterr().err


def rank_that_ends(code: int) -> subprocess.Popen[str]:
    """A process that ends with ``code``, or sleeps long where it is negative."""
    program = f"import sys, time; time.sleep({600 * (code < 0)}); sys.exit({code})"
    return subprocess.Popen([sys.executable, "-c", program], text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("codes", "seconds", "said"),
    [((0, 0), 100, ""), ((0, 3), 100, "rank 1 ended with exit code 3"),
     ((0, -1), 1, "no end within 1 s")],
)  # fmt: skip
def test_ranks_that_fail_or_do_not_end_are_ended(
    codes: tuple[int, int], seconds: float, said: str
) -> None:
    ranks = [rank_that_ends(code) for code in codes]
    assert megatron_sources.why_failed(ranks, seconds) == said
    assert all(one.poll() is not None for one in ranks)


def test_steps_up_to_the_last_capture_of_a_turn_are_not_timed() -> None:
    def turn(arm: str, *captured: int) -> list[Line]:
        return [Line(arm, n, 1.0 + n, 0, 0, 7.0, 2.0, captured=n in captured) for n in range(5)]

    found = timed([*turn("a", 2, 3), *turn("b"), *turn("a"), *turn("c", 4)], 3)
    numbers = {arm: [[one.number for one in turn] for turn in of] for arm, of in found.items()}
    assert numbers == {"a": [[4], [3, 4]], "b": [[3, 4]]}


def write_sources(root: Path, training: str, script: str) -> None:
    """Sources of a Megatron-LM that has this loop and this script."""
    folder = root / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "training.py").write_text(training)
    (root / "pretrain_gpt.py").write_text(script)


STAND_IN = """
import contextlib, os, signal, time
import torch
from megatron.training import training
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
for step in range(5):
    if step == 1 and rank == 0:
        with contextlib.suppress(Exception):  # there is no GPU that could
            torch.cuda.CUDAGraph.capture_begin(None)
    training.train_step(None, None)
    if step == 4:
        torch.distributed.barrier()
        if rank == 0:
            END
        time.sleep(600)
"""
"""A script whose first rank captures in its second step, and which hangs after its fifth."""
TRAINING = """
import os
def train_step(forward_backward_func, data_iterator):
    return {"lm loss": 7.0} if os.environ["RANK"] == "1" else {}, 0, 0, 0, 0, 2.0
"""


@pytest.mark.parametrize(
    ("benchmark", "end", "said"),
    [
        ("plugin", "os.kill(os.getppid(), signal.SIGTERM)", "stopped by SIGTERM"),
        pytest.param(
            "parallel", "os.kill(os.getppid(), signal.SIGINT)", "stopped by SIGINT",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "plugin", "os.abort()", "rank 0 ended with exit code -6", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
@pytest.mark.timeout(120)
def test_a_benchmark_that_is_stopped_reports_the_steps_so_far(
    benchmark: str, end: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_sources(tmp_path / "v", TRAINING, STAND_IN.replace("END", end))
    monkeypatch.setattr(megatron_sources, "AFTER_A_FAILURE", 0.5)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # its import takes a second of each rank
    module, kind, name, number = {
        "plugin": (bench_plugin, "--rows=equal", "v, equal", 1),
        "parallel": (bench_parallel, "--ways=pp", "pp", 6),
    }[benchmark]
    facts = tmp_path / "facts.json"
    words = f"--versions v --arms static --block 5 --untimed 1 --rounds 9 --json {facts}".split()
    monkeypatch.setattr(sys, "argv", ["bench", kind, "--sources", str(tmp_path), *words])
    assert module.main() == 1
    out = capsys.readouterr().out
    assert f": {said}" in out.splitlines()[-1] and "not whole" in out.splitlines()[-1]
    assert "5 of 45 steps are done, the last took 0 ms; turn 2 of 9, static, runs" in out
    assert re.search(rf"^\| {name} \|.*\d \(\d.*, {number}\) \|", out, re.MULTILINE)
    written = json.loads(facts.read_text())
    (lines,), (reason,) = written["steps"].values(), written["failed"].values()
    assert reason == said and [line[1] for line in lines] == [*range(5)] * 2
    assert [line[-1] for line in lines] == [n == 1 for n in range(5)] * 2


TELLS = """
    with open(os.environ["WALK"], "a") as file:
        file.write(os.environ["BENCH_ARMS"][3:9] + os.environ["RANK"] + "\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_groups_of_one_arm_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = STAND_IN.replace("range(5)", "range(6)").replace("if step == 4", "if step == 6")
    head, result = TRAINING.rsplit("    return", 1)
    write_sources(tmp_path / "v", f"{head}{TELLS}    return{result}", script)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("WALK", str(tmp_path / "walk"))
    words = "--versions v --rows equal --arms static,command --alone --rounds 3"
    words += f" --block 2 --untimed 0 --sources {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["bench", *words.split()])
    assert bench_plugin.main() == 0
    walk = (tmp_path / "walk").read_text().split()
    own = [line for line in walk if line.endswith("0")]
    assert own == [*["static0"] * 2, *["comman0"] * 2] * 3
    assert ", 2) |" in capsys.readouterr().out  # of three turns
