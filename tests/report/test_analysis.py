"""The analysis finds injected causes, accounts for all time, and predicts gains."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.dpp.errors import DataError
from megatron.dpp.report.align import align
from megatron.dpp.report.analysis.model import (
    Arrival,
    JobShape,
    MessageId,
    OtherWork,
    RankIteration,
    Send,
    TaskRun,
    TracedIteration,
    Wait,
)
from megatron.dpp.report.analysis.sentences import EVEN_LAYERS, sentences, straggler_text
from megatron.dpp.report.analysis.stragglers import Culprit, StragglerSearch
from megatron.dpp.report.analysis.summary import PredictedTime, analyse
from megatron.dpp.report.analysis.times import (
    LinkSamples,
    TaskTimes,
    iteration_times,
    link_samples,
    painted,
)
from megatron.dpp.report.reader import TraceFile, open_run, read_events
from megatron.dpp.report.whatif import (
    WhatIf,
    hop_delay,
    predict_all,
    recorded_runs,
    removal,
    schedule_of,
)
from megatron.dpp.trace.schema import IdleCause
from tests.report.injected import CAUSES, analysed, culprit_of, inject
from tests.report.synthetic import Run


def run_for(seed: int) -> Run:
    return Run(chunks=1 + seed % 2, microbatches=10, iterations=6)


def check_culprits(analysis, cause, expected):
    assert [(c.kind, c.where(analysis.shape)) for c in analysis.culprits] == [(cause, expected)]
    (culprit,) = analysis.culprits
    assert culprit.share >= (0.5 if cause == "transient" else 1.0)
    assert culprit.rank not in culprit.victims
    assert straggler_text(culprit, analysis.shape)


def gain(times, before):
    return 1 - sum(t.total_ms for t in times) / sum(t.total_ms for t in before)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 12))]
)
def test_the_culprit_is_named_and_its_removal_gains_what_was_predicted(tmp_path, seed):
    run = run_for(seed)
    quiet = analysed(inject(run, "none", seed), tmp_path)
    assert quiet.culprits == []
    for cause in CAUSES:
        slow = analysed(inject(run, cause, seed), tmp_path)
        check_culprits(slow, cause, culprit_of(run, cause, seed))
        ranks, runs = slow.shape.pipelines()[0], recorded_runs(slow)
        what_if = WhatIf(runs)
        assert what_if.fidelity == pytest.approx(1.0, abs=0.005)
        change = removal(slow.culprits[0], runs, ranks)
        assert change is not None
        predicted, measured = what_if.predict("", change).gain, gain(quiet.times, slow.times)
        assert predicted == pytest.approx(measured, rel=0.1), cause


def test_a_rank_slow_in_the_last_iterations_only_has_a_since(tmp_path):
    run = Run(iterations=13)
    slow = inject(run, "slow-rank", 0)
    whole, culprit = slow.cost, int(culprit_of(run, "slow-rank", 0).split()[1])
    slow.cost = lambda i, *rest: whole(i, *rest) if i >= 8 else 10_000_000
    (found,) = analysed(slow, tmp_path).culprits
    assert (found.kind, found.rank, found.since) == ("slow-rank", culprit, 8)
    assert found.share == pytest.approx(5 / 12)


def test_every_nanosecond_of_the_window_is_accounted_for(tmp_path):
    analysis = analysed(Run(chunks=2), tmp_path)
    assert (len(analysis.times), analysis.skipped) == (2, [0])
    for times in analysis.times:
        assert times.ideal_ms == max(rank.busy_ms for rank in times.ranks.values())
        assert times.window_ms >= times.ideal_ms
        for rank in times.ranks.values():
            whole = rank.busy_ms + rank.other_ms + sum(rank.idle_ms.values())
            assert whole == pytest.approx(rank.window_ms, abs=1e-9)
            assert sum(rank.kinds_ms.values()) == pytest.approx(rank.busy_ms, abs=1e-9)
            assert rank.tail_ms == {"host": 0.05, "optimizer": 1.0}


def test_other_work_after_a_ranks_last_task_is_drain():
    task = TaskRun(0, 10, "F", 0, 0, 0)
    early = RankIteration(0, 1, 0, 50, tasks=[task], spans=[OtherWork(5, 30, "batch")])
    late = RankIteration(1, 1, 0, 50, tasks=[task._replace(end=40)])
    times = iteration_times(TracedIteration(1, {0: early, 1: late})).ranks[0]
    assert (times.busy_ms, times.other_ms, times.idle_ms) == (1e-5, 0, {"drain": 3e-5})
    assert times.tail_ms == {"host": 1e-5}


def test_totals_equal_those_summed_from_the_events(tmp_path):
    report = analysis = analysed(Run(chunks=2, iterations=2), tmp_path)
    for file, row in zip(analysis.files, report.ranks, strict=True):
        events = list(read_events(file))
        for kind in "FBW":
            total = sum(e["dur"] for e in events if e["args"].get("kind") == kind)
            assert row.kinds_ms[kind] * 2 == pytest.approx(total / 1000, rel=1e-9)
        sent = sum(e["args"]["bytes"] for e in events if e["cat"] == "send")
        assert row.sent_bytes * 2 == sent
        held = max(e["args"]["value"] for e in events if e["cat"] == "counter")
        assert row.peaks["held"] == held
    json.dumps(report.numbers(), allow_nan=False)
    assert sum(report.totals.bubble_by_cause.values()) == pytest.approx(report.totals.bubble)
    causes = [cause for cause, share in report.totals.bubble_by_cause.items() if share > 0.001]
    assert causes and all(IdleCause(cause).meaning in sentences(report)[2] for cause in causes)
    assert sentences(report)[-1] == "No straggler."


def names_of(what_if, shape):
    return {row.name for row in predict_all(what_if, [], shape)}


def test_other_schedules_do_not_name_the_run_itself(tmp_path):
    """A run whose W comes in pieces has the same schedule as its simulation."""
    analysis = analysed(Run(chunks=2), tmp_path)
    what_if = WhatIf(recorded_runs(analysis))
    what_if.config = dataclasses.replace(what_if.config, w_pieces=6)
    found = names_of(what_if, analysis.shape)
    assert "Megatron's static order" in found and "dynamic schedule" not in found


def test_a_finding_says_how_often_and_what_to_do():
    straggler = Culprit("heavy-stage", 1.45, 1.0, 5, rank=1, chunk=1, victims=(0,))
    shape = JobShape(2, 2, {0: 0, 1: 1}, {0: (0, 0), 1: (0, 0)}, "dpp")
    assert straggler_text(straggler, shape) == (
        "stage 1, chunk 1 has 1.45 times the work of the others, in every iteration; waiting most "
        "meanwhile: stage 0 (rank 0); another layout of the layers takes work from it"
    )
    assert "in 70 % of the iterations, since iteration 5" in straggler_text(
        dataclasses.replace(straggler, share=0.7), shape
    )


@pytest.mark.parametrize(
    ("replicas", "tensors", "name"),
    [
        (1, 1, "stage 1 (rank 1)"),
        (2, 1, "stage 1, replica 0 (rank 2)"),
        (1, 2, "stage 1, tensor rank 0 (rank 2)"),
        (2, 2, "stage 1, replica 0, tensor rank 0 (rank 4)"),
    ],
)
def test_all_reports_name_a_rank_by_stage_and_replica(replicas, tensors, name):
    places = [(p, d, t) for p in range(2) for d in range(replicas) for t in range(tensors)]
    rank = int(name.split()[-1][:-1])
    replica = {each: place[1:] for each, place in enumerate(places)}
    shape = JobShape(2, 1, {each: place[0] for each, place in enumerate(places)}, replica, "dpp")
    assert shape.name_of(rank) == name
    slow = Culprit("slow-rank", 1.5, 1.0, 5, rank=rank, victims=(0,))
    first = shape.name_of(0)
    assert straggler_text(slow, shape).startswith(f"{name} computes 1.50 times slower")
    assert straggler_text(slow, shape).endswith(f"waiting most meanwhile: {first}")
    link = Culprit("slow-link", 9.0, 1.0, 5, link=(0, rank))
    assert f"messages between {first} and {name} take" in straggler_text(link, shape)


def test_a_heavy_stages_work_is_not_promised_away(tmp_path):
    report = analysed(Run(chunks=2), tmp_path)
    heavy = PredictedTime("without heavy-stage (stage 1, chunk 1)", 1000, 826)
    report.what_if = [heavy, PredictedTime(EVEN_LAYERS, 1000, 928)]
    assert sentences(report)[-1].endswith(
        "17.4 % of an iteration if that work were gone; laid out evenly over all stages 7.2 %."
    )
    report.what_if = [dataclasses.replace(heavy, name="without slow-rank (stage 1 (rank 1))")]
    assert sentences(report)[-1].endswith("17.4 % of an iteration.")


def test_a_sliced_run_counts_its_microbatches(tmp_path):
    groups = (3, 1, 4)
    run = Run(iterations=1, policy="megatron", split=False, groups=groups)
    analysis = analysed(run, tmp_path)
    assert (analysis.facts["microbatches"], analysis.sliced) == (3, True)
    assert recorded_runs(analysis) == []
    whole = analysed(Run(iterations=1), tmp_path / "whole")
    assert (whole.facts["microbatches"], whole.sliced) == (8, False)


def test_a_run_that_kept_megatrons_order_is_simulated_with_it(tmp_path):
    analysis = analysed(Run(ranks=2, iterations=1, policy="megatron"), tmp_path / "2")
    (run,) = recorded_runs(analysis)
    config = schedule_of(run)
    assert (run.dynamic, config.policy, config.split_backward) == (True, "megatron", True)
    what_if = WhatIf([run])
    assert what_if.predict("").gain == pytest.approx(0.0, abs=0.02)
    found = names_of(what_if, analysis.shape)
    assert {"dynamic schedule", "Megatron's static order"} <= found
    (run,) = recorded_runs(analysed(Run(iterations=1, policy="auto"), tmp_path / "4"))
    assert schedule_of(run).policy == "dynamic"


def test_replicas_tell_a_heavy_stage_from_a_slow_rank():

    places = {rank: rank % 4 for rank in range(12)}
    shape = JobShape(4, 1, places, {rank: (rank // 4, 0) for rank in range(12)}, "dpp")

    def search(slow: set[int]) -> list[Culprit]:
        tasks = {
            (rank, 0): {"F": dict.fromkeys(range(8), 150 if rank in slow else 100)}
            for rank in range(12)
        }
        works = [TaskTimes(number, tasks) for number in range(5)]
        return StragglerSearch(shape, works, [{}] * 5, dict.fromkeys(places, 0)).find()

    assert [(c.kind, c.rank) for c in search({3})] == [("slow-rank", 3)]
    assert [(c.kind, c.rank) for c in search({1, 5})] == [("slow-rank", 1), ("slow-rank", 5)]
    assert [(c.kind, c.rank) for c in search({1, 5, 9})] == [("heavy-stage", 1)]


def test_iterations_that_not_all_ranks_finished_do_not_count(tmp_path):
    whole = analysed(Run(ranks=2, iterations=3), tmp_path)
    assert [t.number for t in whole.times] == [1, 2]
    path = whole.files[1].path
    text = path.read_text()

    def cut(before: str) -> list[TraceFile]:
        path.write_text(text[: text.index(f'"name":"{before}"') - 5])
        return open_run(path.parent)

    files = cut("iteration 2")
    assert [t.number for t in analyse(files, align(files)).times] == [0, 1]
    files = cut("iteration 0")
    with pytest.raises(DataError, match="no iteration that all 2 ranks finished"):
        analyse(files, align(files))


@given(st.lists(st.tuples(st.sampled_from("abc"), *[st.integers(0, 60)] * 2)))
def test_of_layers_that_cover_each_other_the_last_counts(layers):
    owners = {}
    for name, start, end in layers:
        owners |= dict.fromkeys(range(max(start, 5), min(end, 50)), name)
    assert painted(5, 50, layers) == Counter(owners.values())


def test_a_link_whose_messages_came_during_tasks_is_not_known_to_be_slow():
    """A busy receiver sees a message when its task ends, which bounds the delay from above only."""

    busy = LinkSamples(any=[11_000_000, 12_000_000, 9_000_000])
    quick = LinkSamples(any=[200_000] * 3, clean=[200_000] * 3)
    links = {(0, 1): quick, (1, 2): busy, (2, 1): busy, (2, 3): quick}
    shape = JobShape(4, 1, {r: r for r in range(4)}, dict.fromkeys(range(4), (0, 0)), "dpp")
    tasks = {(rank, 0): {"F": dict.fromkeys(range(8), 10_000_000)} for rank in range(4)}
    works = [TaskTimes(number, tasks) for number in range(5)]
    assert StragglerSearch(shape, works, [links] * 5, dict.fromkeys(range(4), 0)).find() == []
    assert hop_delay(links, range(4), 1) == pytest.approx(200e-6)
    slow = links | {(1, 2): LinkSamples(any=busy.any, clean=busy.any)}
    (found,) = StragglerSearch(shape, works, [slow] * 5, dict.fromkeys(range(4), 0)).find()
    assert (found.link, found.factor) == ((1, 2), 55.0)
    assert hop_delay(slow, range(4), 1) == pytest.approx(11e-3)


def test_a_message_taken_ahead_is_timed_only_where_the_device_was_idle():
    """A busy device reaches the message after its own task, so that time is not the link's."""

    def sampled(previous_end: int) -> LinkSamples:
        message = MessageId(0, 1, 0, "forward", 0)
        sender = RankIteration(0, 4, sends=[Send(1_000_000, message, 1 << 20, "cuda_ipc")])
        receiver = RankIteration(
            1, 4,
            tasks=[
                TaskRun(0, previous_end, "B", 0, 0, 0), TaskRun(1_950_000, 3_000_000, "F", 0, 0, 0),
            ],
            waits=[Wait(100_000, 1_960_000, "message", "F0")],
            arrivals=[Arrival(900_000, 1_940_000, message, ahead=True)],
        )  # fmt: skip
        iteration = TracedIteration(4, {0: sender, 1: receiver})
        return link_samples(iteration)[0, 1]

    assert sampled(previous_end=1_900_000).clean == []
    assert sampled(previous_end=950_000).clean == [940_000]
