"""Output of the simulator: grids, pictures, the command line."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from megatron.dpp.schedule import Action, Kind
from megatron.dpp.sim.arms import parts
from megatron.dpp.sim.costs import Shape, even_costs
from megatron.dpp.sim.result import SimulatedTask, format_grid
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim_command import main

Capsys = pytest.CaptureFixture[str]


def output(capsys: Capsys, words: str, status: int = 0) -> str:
    """The command's output; its error line where ``status`` is not 0."""
    try:
        assert main(words.split()) == status
    except SystemExit as end:
        assert end.code == status
    out, err = capsys.readouterr()
    return err if status else out


def rows(out: str) -> dict[str, list[float]]:
    """Makespan, ratio, peak and the peaks of all ranks by schedule of a printed table."""
    begin, end = out.index("schedule  "), out.index("\nratio: ")
    lines = out[begin:end].splitlines()[1:]
    return {line[:32].strip(): [float(x) for x in line[32:].split()] for line in lines}


def slot(kind: Kind, microbatch: int, start: float, end: float) -> SimulatedTask:
    return SimulatedTask(Action(kind, 0, microbatch), start, end)


def test_grids() -> None:
    result = ScheduleConfig(split_backward=False).run(Shape(2, 1, 2), even_costs(2, 2))
    assert format_grid(result.slots).splitlines() == [
        "rank 0   0F0 0F1 .   .   0B0 -   .   0B1 -",
        "rank 1   .   0F0 0B0 -   0F1 0B1 -",
    ]
    short, long = slot(Kind.F, 0, 0.0, 1.0), slot(Kind.B, 0, 1.0, 10_001.0)
    assert format_grid([[short, long]], 20) == "rank 0   0B0 " + "-   " * 18 + "-"
    assert format_grid([[slot(Kind.F, 0, 5.0, 5.0)]]) == "rank 0   .", "it takes no time"
    assert format_grid([[], []]) == "(nothing ran)"


def test_the_command_prints_the_simulated_step(capsys: Capsys) -> None:
    out = output(capsys, "--pp 2 --chunks 1 --microbatches 2 --hop 0")
    found = ScheduleConfig().run(Shape(2, 1, 2), even_costs(2, 2))
    expected = [found.makespan, found.ratio, max(found.peak_held), *found.peak_held]
    assert rows(out) == {"dynamic": pytest.approx(expected, rel=1e-3)}
    assert out.startswith("2 ranks x 1 chunks, microbatches: 2, seeds: 1\n")
    assert out.endswith(f"\ndynamic\n{format_grid(found.slots)}\n")


def test_a_comparison_has_all_schedules_under_the_same_draws(capsys: Capsys) -> None:
    words = "--pp 4 --microbatches 8 --jitter 0.3 --seeds 2 --compare --no-grid "
    words += "--slow-rank 1:1.5 --transient 2x:20% --slow-link 0-1:2"
    out = output(capsys, words)
    found = rows(out)
    assert set(found) > {"dynamic", "1f1b", "interleaved", "zb-h1", "gpipe"}
    assert found["dynamic"][1] < found["interleaved"][1]
    assert all(ratio > 1 for _, ratio, *_ in found.values())
    alone = rows(output(capsys, words.replace("--compare", "--policy 1f1b")))
    assert alone == {"1f1b": found["1f1b"]}
    assert output(capsys, words) == out
    assert rows(output(capsys, f"{words} --seed 5"))["dynamic"] != found["dynamic"]


@pytest.mark.parametrize("more", ["", "--chunks 1", "--lengths sft", "--jitter 0.3"])
def test_parts_of_a_comparison_add_up_to_the_whole(capsys: Capsys, more: str) -> None:
    out = output(capsys, f"--pp 2 --compare --no-grid {more}")
    times = {name: row[0] for name, row in rows(out).items()}
    peaks = {name: row[2] for name, row in rows(out).items()}
    head, *lines = out[out.index("what comes from what") :].splitlines()
    assert head.split()[-5:] == ["peak", "W", "order", "memory", "all"]
    static = lines[0][:24].strip()
    for line in lines[:-1]:
        name, cells = line[:24].strip(), line[33:].split()
        assert float(line[24:33]) == pytest.approx(peaks[name], rel=0.01)
        *own, whole = (0.0 if cell == "-" else float(cell) for cell in cells)
        assert sum(own) == pytest.approx(whole, abs=0.16)
        assert whole == pytest.approx(100 * (1 - times[name] / times[static]), abs=0.16)
    fused = output(capsys, f"--pp 2 --compare --no-grid --split-backward off {more}")
    assert " W " not in fused[fused.index("what comes from what") :].splitlines()[0]


def test_parts_merge_the_ingredients_of_arms_that_were_not_timed() -> None:
    chain = {"b": ("a", "W"), "c": ("b", "order"), "d": ("c", "memory")}
    assert parts({"a": 10.0, "b": 8.0, "d": 5.0}, chain) == {
        "b": {"W": 0.2},
        "d": {"W": 0.2, "order + memory": pytest.approx(0.3)},
    }
    assert parts({"d": 5.0, "x": 1.0}, chain) == {}


def test_lengths_count_under_the_cap_and_have_better_orders(capsys: Capsys, tmp_path: Path) -> None:
    words = "--pp 2 --microbatches 16 --compare --no-grid --lengths sft"
    found, climbed = (rows(output(capsys, f"{words} --climb {n}")) for n in (0, 40))
    assert found["dynamic"][0] < found["interleaved"][0]
    for name, more in (("dynamic, cap static", "dynamic"), ("fused, cap static", "dynamic, fused")):
        assert found[name][2] < found[more][2]
    for name in ("interleaved", "Megatron's order + W", "dynamic"):
        best = f"{name}, best order"
        assert climbed[best][0] <= found[best][0] <= found[name][0]
    assert climbed["interleaved, best order"][0] < 0.95 * found["interleaved"][0]
    (tmp_path / "lengths").write_text("1000\n8000 2000\n1000\n")
    from_file = output(capsys, f"--pp 2 --lengths {tmp_path / 'lengths'}")
    assert "microbatches: 4" in from_file
    assert from_file == output(capsys, "--pp 2 --lengths 1000,8000,2000,1000")
    one, two = (
        rows(output(capsys, f"--pp 2 --lengths 8,8 {x}"))["dynamic"] for x in ("", "--longest 16")
    )
    assert two[2] == pytest.approx(one[2] / 2)
    spread = rows(output(capsys, "--lengths 0.5 --no-grid"))["dynamic"]
    assert spread != rows(output(capsys, "--no-grid"))["dynamic"]


def test_lengths_come_from_lists_and_token_files(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("\n".join(["100"] * 20 + ["3000"] * 4))
    out = output(capsys, f"--pp 2 --no-grid --lengths {tmp_path / 'lengths'}")
    assert "24 sequences, 14000 tokens; median 100, longest 3000" in out
    lengths = np.array([40, 31, 51, 33], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * 2])
    index = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
    index += np.array([4, 5], "<u8").tobytes() + lengths.tobytes()
    index += pointers.astype("<i8").tobytes() + np.arange(5, dtype="<i8").tobytes()
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(bytes(2 * int(lengths.sum())))
    out = output(capsys, f"--no-grid --lengths {tmp_path / 'x.idx'}")
    assert "4 sequences, 151 tokens" in out and "microbatches: 8" in out
    assert "no such file" in output(capsys, f"--lengths {tmp_path / 'nowhere.idx'}", 1)


REFUSED = {
    "--microbatches 0": "--microbatches: 0: must be from 1",
    "--pp 0": "--pp: 0: must be from 1",
    "--pp 4000 --chunks 400": "at most 1,048,576 are simulated",
    "--hop -1": "--hop: -1: must be from 0",
    "--jitter nan": "--jitter: nan: must be from 0 to 5",
    "--split-backward stock": "stock: expected auto, on, off or stock:N",
    "--lengths 7": "a sigma must be from 0 to 5",
    "--lengths nowhere": "expected sft, long, packed, SIGMA",
    "--lengths 10,x": "not a list of lengths in tokens",
    "--lengths 10,20 --longest 5": "--longest 5: a microbatch has 20 tokens",
    "--lengths sft --condition jit.3": "give one of them",
    "--policy fastest": "error: --policy fastest",
    "--cap 0.1p": "error: --cap: 0.1p",
    "--cap 20GiB": "--cap 20GiB: expected no bytes",
    "--slow-rank one": "expected a value like 1:1.5",
    "--slow-rank 4:2": "a rank of 0 .. 3",
    "--slow-link 0-2:1": "not neighbours",
    "--slow-link 3-0:1 --chunks 1": "not neighbours",
    "--transient 2x:0%": "expected a share",
    "--svg /nowhere/step.svg": "--svg /nowhere/step.svg: No such file",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_command_refuses(capsys: Capsys, words: str) -> None:
    line = output(capsys, words, 2)
    assert REFUSED[words] in line.splitlines()[-1] and line.count("\n") <= 2


def test_backwards_are_split_by_the_word(capsys: Capsys) -> None:
    """All arms of a comparison do so alike."""

    def out(words: str) -> str:
        return output(capsys, f"--pp 2 --w-pieces 4 --no-grid --compare {words}")

    late = "--overhead 0.04"
    assert out("--split-backward auto") == out("--split-backward on")
    stock, split = rows(out(f"{late} --split-backward stock:1")), rows(out(late))
    for name in ("Megatron's order + W", "dynamic, cap static", "dynamic"):
        assert stock[name] != split[name], name


def test_a_picture_draws_every_task_of_every_schedule(capsys: Capsys, tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    words = f"--pp 2 --chunks 1 --microbatches 3 --policy 1f1b --policy dynamic --svg {picture}"
    out = output(capsys, words)
    assert f"drawn: {picture}" in out
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    times = {name: row[0] for name, row in rows(out).items()}
    best, worst = min(times.values()), max(times.values())
    assert f"Dynamic takes {100 * (1 - best / worst):.1f} % less time per step than 1f1b" in text
    for task in ("0F0", "0F2", "0B1", "0W2"):
        assert re.search(rf"\b{task}\b", text), task
