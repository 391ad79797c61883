"""Output of the simulator: grids, pictures, cost files, the command line."""

import json

import pytest

from megatron.dpp.errors import DataError
from megatron.dpp.report.pictures.schedules import draw
from megatron.dpp.schedule import Action, Kind
from megatron.dpp.sim.arms import parts
from megatron.dpp.sim.conditions import uniform
from megatron.dpp.sim.costs import Shape, even_costs
from megatron.dpp.sim.measured import load_costs
from megatron.dpp.sim.result import Result, Slot, format_grid
from megatron.dpp.sim.schedules import ScheduleConfig
from megatron.dpp.sim_command import main
from tests.options.test_sequences import index


def run(capsys, *arguments):
    status = main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def cost_file(tmp_path, **changes):
    stages = [{"F": [1.0, 1.2], "B": [1.0], "W": [0.5], "activation_bytes": 9} for _ in range(4)]
    data = {"format": "dpp-costs", "version": 1, "num_ranks": 2, "num_chunks": 2}
    data |= {"stages": stages, "hops": [[0.1]] * 3}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data | changes))
    return str(path)


def test_grid():
    result = ScheduleConfig(split_backward=False).run(Shape(2, 1, 2), even_costs(2, 2))
    assert format_grid(result.slots).splitlines() == [
        "rank 0   0F0 0F1 .   .   0B0 -   .   0B1 -",
        "rank 1   .   0F0 0B0 -   0F1 0B1 -",
    ]


def test_a_grid_of_nothing():
    assert format_grid([[], []]) == "(nothing ran)"


def slot(kind, microbatch, start, end, piece=0):
    return Slot(Action(kind, 0, microbatch, piece), start, end)


def test_a_grid_has_few_columns_however_unlike_its_tasks_are():
    short, long = slot(Kind.F, 0, 0.0, 1.0), slot(Kind.B, 0, 1.0, 10_001.0)
    assert format_grid([[short, long]], 20) == "rank 0   0B0 " + "-   " * 18 + "-"
    assert format_grid([[slot(Kind.F, 0, 5.0, 5.0)]]) == "rank 0   .", "it takes no time"


def test_a_picture_names_the_fastest_first_and_joins_the_pieces_of_a_task():
    slow = Result([[slot(Kind.F, 0, 0.0, 4.0)]], [1.0], [2.0])
    fast = Result([[slot(Kind.F, 0, 0.0, 1.0), slot(Kind.W, 3, 1.0, 3.0, piece=2)]], [1.0], [3.0])
    found = draw({"abc": slow, "xyz": fast})
    assert found.title == "Xyz takes 25.0 % less time per step than abc"
    text = found.svg()
    assert "0F0" in text and "0W3" in text and str(Action(Kind.W, 0, 3, 2)) not in text
    assert draw({"xyz": slow}, "s").title == "One step takes 4 s, 2.000 x the least possible"


def test_one_microbatch_is_no_plural(capsys):
    status, out, _ = run(capsys, "--pp", "2", "--microbatches", "1", "--no-grid")
    assert status == 0 and ", 1 microbatch, " in out


def test_command_line_prints_grid_ratio_and_peak(capsys):
    status, out, _ = run(capsys, "--pp", "2", "--chunks", "1", "--microbatches", "2")
    assert status == 0
    assert "rank 0   0F0 0F1" in out
    assert out.splitlines()[2].startswith("dynamic")


def test_command_line_compares(capsys):
    status, out, _ = run(
        capsys, "--pp", "4", "--microbatches", "8", "--jitter", "0.3", "--seeds", "2", "--compare",
        "--slow-rank", "1:1.5", "--transient", "2x:20%", "--slow-link", "0-1:2", "--no-grid",
    )  # fmt: skip
    assert status == 0
    found = ratios(out)
    assert set(found) > {"dynamic", "1f1b", "interleaved", "zb-h1", "earlier-dpp"}
    assert found["dynamic"] < found["interleaved"]


def ratios(out):
    """Ratios by schedule of a printed table."""
    lines = out[: out.index("\nratio: ")].splitlines()[2:]
    return {line[:24].strip(): float(line[35:43]) for line in lines}


@pytest.mark.parametrize("more", [[], ["--chunks", "1"], ["--lengths", "sft"], ["--jitter", "0.3"]])
def test_parts_of_a_comparison_add_up_to_the_whole(capsys, more):
    status, out, _ = run(capsys, "--pp", "2", "--compare", "--no-grid", *more)
    times = {line[:24].strip(): float(line[24:34]) for line in out.splitlines()[2:8]}
    static = next(iter(times))
    head, *rows = out[out.index("what comes from what") :].splitlines()
    assert status == 0 and head.split()[-5:] == ["peak", "W", "order", "memory", "all"]
    assert [row[:24].strip() for row in rows[:-1]] == list(times)
    for name, row in zip(times, rows, strict=False):
        *own, whole = (0.0 if cell == "-" else float(cell) for cell in row[33:].split())
        assert sum(own) == pytest.approx(whole, abs=0.16)
        assert whole == pytest.approx(100 * (1 - times[name] / times[static]), abs=0.16)


def test_parts_merge_the_ingredients_of_arms_that_were_not_timed():
    chain = {"b": ("a", "W"), "c": ("b", "order"), "d": ("c", "memory")}
    assert parts({"a": 10.0, "b": 8.0, "d": 5.0}, chain) == {
        "b": {"W": 0.2},
        "d": {"W": 0.2, "order + memory": pytest.approx(0.3)},
    }
    assert parts({"d": 5.0, "x": 1.0}, chain) == {}


def test_comparing_a_fused_backward_has_no_part_of_weights(capsys):
    out = run(capsys, "--pp", "2", "--compare", "--no-grid", "--split-backward", "off")[1]
    head = out[out.index("what comes from what") :].splitlines()[0]
    assert head.split()[-4:] == ["peak", "order", "memory", "all"]


def test_lengths_count_under_the_cap(capsys, tmp_path):
    """The dynamic schedule uses the memory that Megatron must reserve for the longest."""
    shape = ["--pp", "2", "--microbatches", "16", "--seeds", "4", "--compare", "--no-grid"]
    status, out, _ = run(capsys, *shape, "--lengths", "sft")
    found = ratios(out)
    assert status == 0 and "activations of the longest sequence held" in out
    assert found["dynamic"] < found["dynamic, cap by count"] < found["interleaved"]
    again = run(capsys, *shape, "--lengths", "sft")[1]
    assert again == out
    (tmp_path / "lengths").write_text("1000\n8000 2000\n1000\n")
    from_file = run(capsys, "--pp", "2", "--lengths", str(tmp_path / "lengths"))[1]
    assert "2 chunks, 4 microbatches" in from_file
    assert from_file == run(capsys, "--pp", "2", "--lengths", "1000,8000,2000,1000")[1]
    assert "held" in run(capsys, "--lengths", "0.5", "--no-grid")[1]


def test_ones_own_lengths_have_a_histogram_and_their_best_orders(capsys, tmp_path):
    lengths = [100] * 20 + [3000] * 4
    (tmp_path / "lengths").write_text("\n".join(map(str, lengths)))
    shape = ["--pp", "2", "--no-grid", "--compare"]
    out = run(capsys, *shape, "--lengths", str(tmp_path / "lengths"))[1]
    assert "24 sequences, 14000 tokens; median 100, 90 % up to 3000, longest 3000" in out
    found = ratios(out[out.index("2 ranks x") :])
    assert found["dynamic, best order"] <= found["dynamic"]
    assert found["interleaved, best order"] <= found["interleaved"]


def test_lengths_come_from_token_files(capsys, tmp_path):
    index(tmp_path / "x_text_document")
    out = run(capsys, "--no-grid", "--lengths", str(tmp_path / "x_text_document.idx"))[1]
    assert "4 sequences, 151 tokens" in out and "8 microbatches" in out
    status, _, error = run(capsys, "--lengths", str(tmp_path / "nowhere.idx"))
    assert status == 1 and "no such file" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--microbatches", "0"], "--microbatches 0: must be at least 1"),
        (["--lengths", "7"], "a sigma must be a number from 0 to 5"),
        (["--lengths", "nowhere"], "expected sft, long, SIGMA"),
        (["--lengths", "10,x"], "not a list of lengths in tokens"),
        (["--lengths", "10,20", "--longest", "5"], "--longest 5: a microbatch has 20 tokens"),
        (["--lengths", "sft", "--condition", "jit.3"], "--costs and --condition have costs of"),
        (["--pp", "0"], "--pp 0: must be at least 1"),
        (["--pp", "9" * 20], "at most 1,048,576 are simulated"),
        (["--policy", "fastest"], "error: --policy fastest"),
        (["--cap", "0.1p"], "error: --cap: 0.1p"),
        (["--group", "2"], "--group 2: must be at least the number"),
        (["--slow-rank", "one"], "expected a value like 1:1.5"),
        (["--slow-rank", "4:2"], "ranks 0 .. 3"),
        (["--slow-rank", "1:0"], "above 0"),
        (["--slow-rank", "1.5:2"], "expected a value like"),
        (["--slow-link", "0-2:1"], "not neighbours"),
        (["--slow-link", "1-0:1"], "up to 3, or 3-0"),
        (["--slow-link", "4-5:1"], "not neighbours"),
        (["--slow-link", "3-0:1", "--chunks", "1"], "not neighbours"),
        (["--hop", "-1"], "--hop -1"),
        (["--lead", "-1"], "--lead -1"),
        (["--jitter", "nan"], "--jitter nan"),
        (["--cap", "20GiB"], "--cap 20GiB"),
        (["--svg", "/nowhere/step.svg"], "--svg /nowhere/step.svg"),
        (["--jitter", "1e9"], "--jitter 1e+09: must be a number from 0 to 5"),
        (["--transient", "2x:0%"], "share"),
        (["--transient", "0x:20%"], "the factor must be above 0"),
        (["--costs", "nowhere.json"], "No such file"),
        (["--w-pieces", "0"], "--w-pieces 0"),
        (["--longest", "9"], "--longest needs --lengths sft, long, LIST or FILE"),
        (["--longest", "9", "--lengths", "0.5"], "--longest needs --lengths sft, long, LIST"),
        (["--hop", "1", "--condition", "jit.1"], "has hops of its own; leave out --hop"),
        (["--cap", "2p", "--policy", "1f1b"], "--cap changes nothing in 1f1b; leave it out"),
        (
            ["--lead", "0.1", "--beta", "0.1", "--policy", "gpipe", "--policy", "interleaved"],
            "--beta, --lead changes nothing in gpipe, interleaved",
        ),
        (["--cap", "2p", "--policy", "earlier-dpp"], "--cap changes nothing in earlier-dpp"),
        (["--group", "4", "--chunks", "1"], "--group changes nothing in dynamic of one chunk"),
        (
            ["--w-pieces", "2", "--compare", "--split-backward", "off"],
            "--w-pieces changes nothing in dynamic, gpipe, 1f1b, interleaved, zb-h1, earlier-dpp "
            "with a fused backward",
        ),
    ],
)
def test_command_line_refuses(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == (1 if message == "No such file" else 2)
    assert message in err


def test_costs_from_a_file(capsys, tmp_path):
    status, out, _ = run(capsys, "--costs", cost_file(tmp_path), "--microbatches", "4")
    assert status == 0
    assert out.startswith("2 ranks x 2 chunks, 4 microbatches")
    assert load_costs(cost_file(tmp_path)).costs(2).durations[0] == [[1.1, 1.1]] * 4


@pytest.mark.parametrize("flags", [["--pp", "4"], ["--chunks", "1"], ["--hop", "0.5"]])
def test_a_cost_file_has_its_own_ranks_and_hops(capsys, tmp_path, flags):
    path = cost_file(tmp_path)
    status, _, err = run(capsys, "--costs", path, *flags)
    assert status == 2 and f"has its own ranks, chunks and hops; leave out {flags[0]}" in err
    assert run(capsys, "--costs", path, "--pp", "2", "--chunks", "2")[0] == 0


def test_flags_that_one_of_several_schedules_takes_are_taken(capsys):
    for flags in (
        ("--policy", "1f1b", "--policy", "dynamic", "--cap", "2p"),
        ("--policy", "zb-h1", "--beta", "0.2"),
        ("--policy", "interleaved", "--group", "4"),
        ("--policy", "earlier-dpp", "--lead", "0.1"),
        ("--compare", "--beta", "0.2", "--split-backward", "off"),
    ):
        assert run(capsys, *flags)[0] == 0


def test_all_arms_of_a_comparison_fuse_backwards_alike(capsys):
    """Those at the static schedule's memory had all W apart whatever --split-backward said."""

    def row(name, *words):
        late = ("--pp", "2", "--w-pieces", "4", "--overhead", "0.04", "--no-grid", "--compare")
        out = run(capsys, *late, *words)[1]
        return next(line for line in out.splitlines() if line.startswith(name + " "))

    for name in ("Megatron's order + W", "dynamic, cap static"):
        split, stock = (row(name, "--split-backward", word) for word in ("on", "stock:1"))
        assert split != stock == row(name)


def test_a_fused_cost_file_cannot_be_split(capsys, tmp_path):
    path = cost_file(tmp_path, stages=[{"F": [1], "B": [2], "W": []}] * 4)
    status, _, err = run(capsys, "--costs", path, "--split-backward", "on")
    assert status == 2 and "take --split-backward off" in err
    for words in (["--split-backward", "off"], []):
        assert run(capsys, "--costs", path, *words, "--compare")[0] == 0


def test_backwards_are_split_by_the_word_or_by_the_hosts_time(capsys):
    """A launch-bound pipeline of equal lengths fuses backwards while others wait for their W."""

    def out(*words):
        shape = ("--pp", "2", "--w-pieces", "4", "--no-grid", *words)
        return run(capsys, *shape)[1]

    late = ("--overhead", "0.04")
    assert out("--split-backward", "auto") == out("--split-backward", "on")
    assert out(*late) == out(*late, "--split-backward", "stock:1")
    assert out(*late) != out(*late, "--split-backward", "on")
    unlike = (*late, "--lengths", "1,2,3,4,1,2,3,4")
    assert out(*unlike) == out(*unlike, "--split-backward", "on")
    with pytest.raises(SystemExit):
        run(capsys, "--split-backward", "stock")
    assert "stock: expected auto, on, off or stock:N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "format"),
        ({"version": 2}, "version 2"),
        ({"hops": []}, "need 4 stages and 3 hops"),
        ({"stages": [{"F": [], "B": [1], "W": []}] * 4}, "F needs 1 or more"),
        ({"stages": [{"F": [-1], "B": [1], "W": []}] * 4}, "none negative"),
        ({"stages": [{"B": [1], "W": []}] * 4}, "KeyError: 'F'"),
        ({"run": {"seconds": [0.0], "num_microbatches": 4, "dynamic": True}}, "both are above 0"),
        ({"run": {"seconds": [1.0], "num_microbatches": 0, "dynamic": True}}, "both are above 0"),
    ],
)
def test_broken_cost_files_are_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        load_costs(cost_file(tmp_path, **changes))


def test_pictures(capsys, tmp_path):
    picture = tmp_path / "step.svg"
    status, out, _ = run(capsys, "--pp", "2", "--microbatches", "4", "--svg", str(picture))
    assert status == 0 and f"drawn: {picture}" in out
    assert picture.read_text().startswith("<svg")


def test_uniform_is_the_designs_unit():
    costs = uniform(Shape(4, 2, 3))
    assert costs.durations[0][7] == [0.5] * 3
    assert costs.hops[0].latency + costs.hops[0].occupancy == pytest.approx(0.005)
