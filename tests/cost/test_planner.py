"""The layout planner: parts of a model, balanced layouts, memory, and its command line."""

import dataclasses
import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp.report import whatif
from megatron.dpp.report.recorded import cost_file, recorded
from megatron.dpp.report.whatif import WhatIf
from megatron.dpp.schedule import Kind
from megatron.dpp.sim.costs import Shape
from megatron.dpp.sim.measured import parse_costs
from megatron.dpp_train.cost.device import known_gpu
from megatron.dpp_train.cost.memory import layer_bytes
from megatron.dpp_train.cost.model_costs import (
    ModelCosts,
    PartCosts,
    from_measured,
)
from megatron.dpp_train.cost.plan_command import main
from megatron.dpp_train.cost.planner import Planner, from_run
from megatron.dpp_train.cost.shape import LayerLayout, ModelShape, RunShape
from megatron.dpp_train.cost.times import collective_seconds, planning_costs
from megatron.dpp_train.options.layer_patterns import layout_stages
from tests.cost.test_costs import replays

LAYER = PartCosts((1.0, 1.0, 1.0), activation_bytes=10.0, state_bytes=100.0)
NOTHING = PartCosts((0.0, 0.0, 0.0))


def model(num_layers=16, head=2.0, **more):
    return ModelCosts(num_layers, LAYER, NOTHING, PartCosts((head,) * 3), hop=0.01, **more)


def measured(layers, num_ranks, head=2.0, samples=(1.0,), slow=None):
    """A run whose layers take 1 ms each and whose last stage has a head."""
    stages = []
    for stage, count in enumerate(layers):
        time = count + (head if stage == len(layers) - 1 else 0.0)
        time *= 1.5 if stage == slow else 1.0
        kinds = {kind: [time * 1e-3 * sample for sample in samples] for kind in "FBW"}
        stages.append(kinds | {"activation_bytes": 7.0 * count})
    data = {"format": "dpp-costs", "version": 1, "num_ranks": num_ranks}
    data |= {"num_chunks": len(layers) // num_ranks, "stages": stages}
    return data | {"hops": [[1e-5]] * (len(layers) - 1)}


def command_line(capsys, *arguments):
    status = main(list(arguments), prog="plan.py")
    return status, *capsys.readouterr()


def test_layouts_are_written_as_megatron_reads_them():
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    layout = LayerLayout(2, (1, 3, 2, 0))
    parsed = layouts.PipelineParallelLayerLayout(layout.text(), pipeline_model_parallel_size=2)
    parsed.validate_layer_layout(num_layers=6, mtp_num_layers=0)
    assert parsed.virtual_pipeline_model_parallel_size == layout.num_chunks == 2
    counts = [
        sum(part.name == "decoder" for part in parsed.layout[rank][chunk])
        for chunk in range(2)
        for rank in range(2)
    ]
    assert counts == [1, 3, 2, 0]


@pytest.mark.parametrize("text", ["Et*3|(tt|)*2,tL", "E|(|tt)*2|L", "EttL"])
def test_layouts_are_read_as_megatron_reads_them(text):
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    names = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    stages = layouts.PipelineParallelLayerLayout.parse_str_to_list(text)
    assert layout_stages(text) == ["".join(names[x.name] for x in stage) for stage in stages]


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_ranks_balance_with_the_head_counted(chunks):
    planner = Planner(model(head=2.0, num_layers=18), 4, 8)
    layout = planner.balanced(chunks)
    assert sum(layout.layers) == 18
    assert [layout.rank_layers(r) for r in range(4)] in ([5, 5, 5, 3], [6, 5, 4, 3])


def test_the_plan_beats_the_default_layout():
    planner = Planner(model(head=3.0), 4, 16)
    best = planner.best([1, 2])[0]
    default = planner.predict(planner.default_layout(best.layout.num_chunks), "auto")
    assert best.seconds < 0.85 * default.seconds
    assert best.busiest_seconds < default.busiest_seconds


def test_searching_never_makes_it_worse():
    planner = Planner(model(head=2.5, sigma=0.1), 3, 6, seeds=2)
    start = planner.balanced(2)
    improved = planner.improve(start)
    assert sum(improved.layers) == 16
    assert planner.predict(improved, "auto").seconds <= planner.predict(start, "auto").seconds


def test_layers_leave_the_busiest_rank_first_and_go_to_no_busier_one():
    moves = Planner(model(head=0.0, num_layers=9), 3, 4).moves(LayerLayout(3, (2, 4, 3)))
    assert [move.layers for move in moves] == [(3, 3, 3), (2, 3, 4), (3, 4, 2)]
    kept = Planner(model(head=0.0, num_layers=4), 4, 4).moves(LayerLayout(4, (1, 1, 1, 1)))
    assert all(move.layers[1] and move.layers[2] for move in kept), "inner stages keep a layer"
    assert {move.layers for move in kept if 0 in move.layers} >= {(0, 2, 1, 1), (1, 2, 1, 0)}


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_search_keeps_to_its_bound(monkeypatch, seeds):
    """The bound counts the simulations of all seeds."""
    parts, start = (
        model(head=2.5, num_layers=18, sigma=0.1),
        LayerLayout(4, (2, 2, 2, 2, 2, 2, 3, 3)),
    )
    once = Planner(parts, 4, 8).num_simulated * (2 * 8 + 18)
    planner = Planner(parts, 4, 8, seeds=seeds, max_tasks=6 * once)
    tried = []
    predict = Planner.predict
    monkeypatch.setattr(
        Planner, "predict", lambda own, *given: tried.append(given) or predict(own, *given)
    )
    planner.improve(start)
    assert len(tried) == 1 + 6 // seeds


@pytest.mark.parametrize("layers", [(4, 4, 4, 4), (1, 7, 5, 3), (2, 2, 2, 2, 3, 2, 2, 1)])
@pytest.mark.parametrize("split", [True, False])
def test_no_schedule_beats_what_the_search_prunes_by(layers, split):
    planner = Planner(model(head=2.5), 4, 8, split_backward=split)
    layout = LayerLayout(4, layers)
    least = planner.least_seconds(layout)
    found = planner.predict(layout, "2p")
    assert found.busiest_seconds < least <= found.seconds < 1.5 * least


def test_layouts_that_cannot_win_are_not_simulated(monkeypatch):
    planner = Planner(model(head=0.0, num_layers=32), 8, 16)
    simulated = []
    predict = Planner.predict
    monkeypatch.setattr(
        Planner, "predict", lambda *args: simulated.append(args[1]) or predict(*args)
    )
    even = planner.default_layout(1)
    assert planner.improve(even) == even
    assert simulated == [even]


def test_what_is_beyond_the_simulated_microbatches_repeats_the_steady_state():
    layout = LayerLayout(4, (5, 4, 4, 3))
    whole = Planner(model(head=2.5), 4, 64).predict(layout, "auto")
    part = Planner(model(head=2.5), 4, 64, most_simulated=16).predict(layout, "auto")
    assert part.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert part.busiest_seconds == pytest.approx(whole.busiest_seconds)
    assert part.bubble == pytest.approx(whole.bubble, abs=0.01)


def test_memory_bounds_the_plan():
    free = Planner(model(), 4, 16).best([1])[0]
    assert max(free.peak_bytes) > 500
    tight = Planner(model(), 4, 16, memory_bytes=max(free.peak_bytes) - 1).best([1])[0]
    assert max(tight.peak_bytes) < max(free.peak_bytes)
    assert tight.seconds >= free.seconds
    with pytest.raises(ConfigError, match="no layout fits: 1 chunks need"):
        Planner(model(), 4, 16, memory_bytes=10).best([1])


def test_the_memory_that_would_do_is_that_of_the_least(monkeypatch):
    planner = Planner(model(), 4, 16, memory_bytes=2**30)
    peaks = itertools.chain((9, 3), itertools.repeat(5))  # the first is of the search

    def predict(layout, *_, **__):
        peak = (2**30, next(peaks) * 2**30)
        return SimpleNamespace(layout=layout, seconds=1.0, peak_bytes=peak)

    monkeypatch.setattr(planner, "predict", predict)
    with pytest.raises(ConfigError, match=r"1 chunks need 3\.0 GiB on a rank"):
        planner.best([1])


def test_memory_is_counted_as_training_measures_it():
    """Two microbatches, two ranks: the last one holds one activation and the deferred part of W."""
    head = PartCosts((6.0, 6.0, 0.0), activation_bytes=30.0)
    layer = PartCosts((1.0, 1.0, 1.0), activation_bytes=10.0, deferred_bytes=6.0)
    planner = Planner(ModelCosts(4, layer, NOTHING, head), 2, 2)
    peaks = planner.predict(LayerLayout(2, (2, 2)), "strict").peak_bytes
    # Rank 1 may hold 1 activation of 50 bytes, and B leaves 12 of them: a share of 0.24. Its second
    # forward waits for all of the first W; rank 0 has both microbatches in flight.
    assert peaks == (40.0, 50.0)
    assert planner.predict(LayerLayout(2, (2, 2)), "2p").peak_bytes == (40.0, 62.0)


def test_graphs_keep_a_slot_for_the_largest_chunk_of_every_activation_that_the_cap_allows():
    head = PartCosts((1.0, 1.0, 0.0), activation_bytes=3.0)
    graphs = ModelCosts(20, LAYER, NOTHING, head, slot_layers=0.5)
    layout = LayerLayout(2, (2, 4, 7, 7))
    state = [900.0, 1100.0]
    found = Planner(graphs, 2, 16).predict(layout, "megatron").peak_bytes
    # Megatron's order holds 5 on rank 0; on rank 1 one of as many is left to the head, which is
    # not in a slot.
    assert found == (state[0] + 5 * 75.0, state[1] + 4 * 75.0 + 3.0)
    few = Planner(graphs, 2, 2).predict(layout, "2p").peak_bytes
    assert few[0] == state[0] + 4 * 75.0  # two microbatches of two chunks
    fixed = Planner(graphs, 2, 16, split_backward=False).predict(layout, "megatron", "megatron")
    assert fixed.peak_bytes == (state[0] + 5 * 75.0, state[1] + 3 * 75.0 + 3.0)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="need more layers"):
        Planner(model(num_layers=4), 4, 8).best([4])


def test_parts_are_solved_from_a_run():
    data = measured([2, 2, 2, 1], 4, head=2.0, samples=(0.9, 1.0, 1.1))
    solved = from_measured(parse_costs(data, "run"), [2, 2, 2, 1])
    assert solved.layer.times == pytest.approx((1e-3,) * 3)
    assert solved.head.times == pytest.approx((2e-3,) * 3)
    assert solved.embedding.times == pytest.approx((0.0,) * 3)
    assert solved.layer.activation_bytes == 7.0
    assert 0.05 < solved.sigma < 0.25


def test_a_run_that_layers_do_not_explain_is_refused():
    costs = parse_costs(measured([2, 2, 2, 2], 4, slow=1), "run")
    with pytest.raises(DataError, match=r"stage \d: its F takes .* slow rank"):
        from_measured(costs, [2, 2, 2, 2])
    with pytest.raises(DataError, match="3 layer counts for 4"):
        from_measured(costs, [2, 2, 2])
    two = parse_costs(measured([2, 2], 2), "run")
    with pytest.raises(DataError, match="at least one between"):
        from_measured(two, [2, 2])


@pytest.mark.parametrize(
    ("seconds", "fits"), [(1.69, False), (1.71, True), (2.29, True), (2.31, False)]
)
def test_a_stage_may_be_15_percent_off_its_layers_either_way(seconds, fits):
    """Of five inner stages of two layers, the others make up for the fourth."""
    data = measured([2] * 7, 7)
    rest = (10.0 - seconds) / 4
    for stage in range(1, 6):
        data["stages"][stage]["B"] = [1e-3 * (seconds if stage == 3 else rest)]
    costs = parse_costs(data, "run")
    if fits:
        assert from_measured(costs, [2] * 7).layer.times[Kind.B] == pytest.approx(1e-3)
        return
    with pytest.raises(DataError, match=r"stage 3: its B takes .*, but 2 layers of 1\.000 ms"):
        from_measured(costs, [2] * 7)


def run(hidden_size, seq_length, vocab_size, **more):
    model = ModelShape(
        hidden_size=hidden_size, seq_length=seq_length, vocab_size=vocab_size, num_heads=1,
        num_groups=1, head_size=hidden_size, ffn_hidden_size=4 * hidden_size,
    )  # fmt: skip
    return RunShape(model=model, layers=(4,), **more)


def test_shapes_count_operations():
    small, wide = (planning_costs(run(64, 32, words)) for words in (1000, 2000))
    forward, backward, weight = small.layer.times
    assert weight == pytest.approx(2 * 12 * 64 * 64 * 32 / 7.1e14)
    between = forward - weight - 1.5 * 2 * 32 * 32 * 64 / 7.1e14
    assert between == pytest.approx(4.2 * layer_bytes(run(64, 32, 1000)) / 4.8e12)
    assert weight < forward < backward
    assert wide.head.times == pytest.approx([2 * seconds for seconds in small.head.times])


def test_state_is_all_that_training_keeps_of_a_parameter():
    parts = planning_costs(run(64, 32, 1000))
    assert parts.layer.state_bytes == 18 * (12 * 64 * 64 + 13 * 64)
    assert parts.head.state_bytes == 18 * (1000 * 64 + 2 * 64)
    assert parts.embedding.state_bytes == 18 * 1000 * 64


def test_shapes_count_collectives():
    """Without collectives the head of a tensor-parallel pipeline equals too many layers."""
    plain = run(1024, 1024, 51200, micro_batch=8)
    shared = dataclasses.replace(plain, tensor=2)
    alone, sums = planning_costs(plain), planning_costs(shared)
    each = collective_seconds(shared, known_gpu("H200"))
    assert each == pytest.approx(4e-5 + 2 * 8 * 1024 * 1024 / (0.95 * 3.6e11))
    # The norms' inputs, which tensor parallelism does not shard, are passed over in full.
    assert sums.layer.times[0] > alone.layer.times[0] / 2 + 2 * each
    assert sums.layer.times[2] == pytest.approx(alone.layer.times[2] / 2)
    spread = planning_costs(dataclasses.replace(shared, sequence_parallel=True))
    assert sum(spread.layer.times) > sum(sums.layer.times)
    assert sum(sums.head.times) / sum(sums.layer.times) < 0.9 * (
        sum(alone.head.times) / sum(alone.layer.times)
    )


def test_command_line_from_shapes(capsys):
    arguments = "--pp 4 --num-layers 16 --hidden-size 2048 --seq-length 2048 --vocab-size 50304"
    status, out, _ = command_line(capsys, *arguments.split(), "--memory", "80GiB")
    assert status == 0
    assert "--pipeline-model-parallel-layout 'E" in out
    assert "Why: the head costs as much as" in out


def test_command_line_from_a_cost_file(capsys, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(measured([4, 4, 4, 4], 4, head=3.0)))
    status, out, _ = command_line(capsys, str(path), "--num-layers", "16", "--chunks", "1,2")
    assert status == 0
    assert "measured" in out and "= 3.00 layers" in out
    status, _, err = command_line(capsys, str(path))
    assert status == 2 and "--num-layers (or --layers) is required" in err
    status, _, err = command_line(capsys, str(path), "--num-layers", "15")
    assert status == 2 and "--layers" in err


@pytest.mark.parametrize(("num_ranks", "policy"), [(2, "megatron"), (3, "dynamic")])
def test_predictions_are_of_the_policy_that_runs(num_ranks, policy):
    """Plans for two ranks were simulated with the dynamic order, which does not run there."""
    planner = Planner(model(head=2.5), num_ranks, 6)
    layout = LayerLayout(num_ranks, tuple(range(1, num_ranks * 2 + 1)))
    found, named = planner.predict(layout, "2p"), planner.predict(layout, "2p", policy)
    other = planner.predict(layout, "2p", {"megatron": "dynamic"}.get(policy, "megatron"))
    assert found == named != other


@pytest.mark.parametrize("dynamic", [True, False])
def test_predictions_are_as_long_as_the_run_was(capsys, tmp_path, dynamic):
    """A run takes longer than its tasks and hops; predictions have the same surplus."""
    layers, data = [4, 4, 4, 4], measured([4, 4, 4, 4], 4, head=3.0)
    plain, alone = from_run(parse_costs(data, "run"), layers)
    assert alone == 1.0
    planner = Planner(plain, 4, 8, split_backward=dynamic)
    words = ("auto", "dynamic") if dynamic else ("megatron", "megatron")  # of four ranks
    simulated = planner.predict(LayerLayout(4, tuple(layers)), *words).seconds
    seconds = [9.0, 1.1 * simulated]
    data["run"] = {"seconds": seconds, "num_microbatches": 8, "dynamic": dynamic}
    longer, factor = from_run(parse_costs(data, "run"), layers)
    assert factor == pytest.approx(1.1)
    assert longer.head.times == pytest.approx([1.1 * each for each in plain.head.times])
    assert longer.hop == pytest.approx(1.1 * plain.hop)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    status, out, _ = command_line(capsys, str(path), "--num-layers", "16", "--chunks", "1")
    assert status == 0 and "all times are 1.100 times as long as traced" in out
    data["run"]["num_microbatches"] = 0
    with pytest.raises(DataError, match="run of 0 microbatches"):
        parse_costs(data, "run")


def test_memory_that_a_trace_does_not_tell_is_not_printed_as_none(capsys, tmp_path):
    costs = measured([4, 4, 4, 4], 4)
    for stage in costs["stages"]:
        stage.pop("activation_bytes", None)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    status, out, _ = command_line(capsys, str(path), "--num-layers", "16", "--chunks", "1")
    assert status == 0 and " -  Et" in out and "0.00  E" not in out


def test_a_run_with_another_layout_is_refused(capsys, tmp_path):
    """A planned run has fewer layers beside the head. Read as an even layout, it has no head."""
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(measured([5, 5, 5, 1], 4, head=3.0)))
    status, _, err = command_line(capsys, str(path), "--num-layers", "16")
    assert status == 1 and "stage 3: its tasks take 12.000 ms, less than 4 layers of" in err
    assert err.endswith("megatron-dpp plan --layers any\n")
    status, out, _ = command_line(capsys, str(path), "--layers", "5,5,5,1", "--chunks", "1")
    assert status == 0 and "= 3.00 layers" in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--chunks 0", "--chunks 0: expected numbers of at least 1"),
        ("--chunks 1,x", "--chunks 1,x: expected numbers of at least 1"),
        ("--layers 4,4,4,-4", "--layers 4,4,4,-4: expected numbers of at least 0"),
        ("--layers 4,4,4,3", "--layers 4,4,4,3: 15 layers, but --num-layers 16"),
        ("--pp 0", "--pp 0: must be at least 1"),
        ("--tensor-parallel 0", "--tensor-parallel 0: must be at least 1"),
        ("--tflops 0", "--tflops 0.0: must be above 0"),
        ("--jitter 50", "--jitter 50.0: must be in 0 .. 5.0"),
        ("--memory 80GiB", "--memory: a trace does not tell how large weights and optimizer are"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_their_flags(capsys, tmp_path, flags, why):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(measured([4, 4, 4, 4], 4)))
    status, _, err = command_line(capsys, str(path), "--num-layers", "16", *flags.split())
    assert status == 2 and err.startswith(f"plan.py: error: {why}") and err.count("\n") == 1


def test_a_run_whose_tasks_take_no_time_is_refused(capsys, tmp_path):
    data, path = measured([4, 4, 4, 4], 4, samples=(0.0,)), tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    status, _, err = command_line(capsys, str(path), "--num-layers", "16")
    assert status == 1 and "the run's layers take no time" in err
    data["stages"][1]["activation_bytes"] = -1
    with pytest.raises(DataError, match="activation_bytes -1"):
        parse_costs(data, "run")


def test_the_spread_of_times_counts_both_sides_of_their_median():
    logs = (-8.0, -6.0, -4.0, -2.0, 0.0, 1.0, 2.0, 3.0, 4.0)
    data = measured([2, 2, 2], 3, head=0.0, samples=[math.exp(log) for log in logs])
    found = from_measured(parse_costs(data, "run"), [2, 2, 2])
    assert found.sigma == pytest.approx((2.0 + 4.0) / 1.349), "each of them nine times"
    for stage in data["stages"]:
        stage.update({"F": [1e-3, 4e-3], "B": [0.0], "W": [0.0]})
    few = from_measured(parse_costs(data, "run"), [2, 2, 2])
    assert few.sigma == 0.0, "six samples tell nothing"


def test_every_task_has_the_overhead_of_its_own_rank():
    tasks = {kind: [[1.0]] * 4 for kind in Kind}
    run = SimpleNamespace(
        shape=SimpleNamespace(num_ranks=2, num_chunks=2, num_microbatches=1), overhead=[0.5, 0.25],
        split=True, num_pieces=3, tasks=tasks, hops=[[0.1]] * 3, window=9.0, dynamic=True,
    )  # fmt: skip
    stages = cost_file([run])["stages"]
    assert [stage["F"] for stage in stages] == [[1.5], [1.25]] * 2
    assert [stage["W"] for stage in stages] == [[2.5], [1.75]] * 2


@pytest.mark.parametrize(
    ("backward", "weights", "kept"),
    [(2, 2, True), (2, 0, True), (2, 1, False), (1, 2, False)],
)
def test_an_iteration_without_all_its_tasks_gives_no_costs(
    backward: int, weights: int, kept: bool
) -> None:
    counts = {"F": 2, "B": backward, "W": weights}
    kinds = {kind: dict.fromkeys(range(count), 10**9) for kind, count in counts.items()}
    job = SimpleNamespace(num_chunks=1, schedule="dpp")
    ran = SimpleNamespace(tasks={(3, 0): kinds}, orders={3: [("F", 0, 0)]})
    times = SimpleNamespace(ranks={3: SimpleNamespace(idle={})}, window=10**9, total=10**9)
    found = recorded(job, [3], ran, {}, times)
    assert (found is not None) == kept
    if found:
        assert found.tasks[2] == [[1.0] * 2 if weights else [0.0] * 2]
        assert found.split == (weights > 0)


def test_times_that_vary_keep_their_mean():
    parts = model(sigma=1.0)
    times = parts.costs(Shape(1, 1, 40_000), [16], seed=1).durations[0][0]
    assert statistics.fmean(times) == pytest.approx(parts.stage_times([16], Kind.F)[0], rel=0.05)
    assert min(times) < max(times) / 10


def test_no_rank_begins_before_its_first_input_can_come():
    parts = model(head=0.0, num_layers=6)
    planner = Planner(dataclasses.replace(parts, hop=0.25), 3, 2)
    forward, each = [2.0] * 3, [6.0] * 3  # two layers of 1 s for each of F, B and W
    begins = [0.0, forward[0] + 0.25, forward[0] + forward[1] + 0.5]
    expected = max(b + 2 * e for b, e in zip(begins, each, strict=True))
    assert planner.least_seconds(LayerLayout(3, (2, 2, 2))) == pytest.approx(expected)


@pytest.mark.parametrize(("pipeline", "head", "replayed"), [(1, 0.0, True), (1, 9.0, False),
                                                            (2, 9.0, True)])  # fmt: skip
def test_the_head_counts_where_it_is_in_the_only_chunk(monkeypatch, pipeline, head, replayed):
    layer = (0.0,) * 3
    given = {"graphs": "auto", "num_layers": 1, "pipeline": pipeline, "chunks": 1}
    assert replays(monkeypatch, layer, head, **given) == replayed


def test_layers_that_defer_nothing_keep_nothing():
    nothing = dataclasses.replace(LAYER, deferred_bytes=0.0)
    parts = model()
    assert parts.deferred_bytes([2, 3]) == [20.0, 30.0]
    assert dataclasses.replace(parts, layer=nothing).deferred_bytes([2, 3]) == [0.0, 0.0]


def test_what_follows_the_pipeline_stays_as_long(monkeypatch):
    run = SimpleNamespace(window=10.0, tail=1.0, replayed=lambda: 5.0)
    monkeypatch.setattr(whatif, "schedule_of", lambda run: None)
    found = WhatIf([run]).in_recorded_order(
        "half", lambda run: SimpleNamespace(replayed=lambda: 2.5)
    )
    assert (found.now_ms, found.then_ms) == (11e3, 6e3)
