"""Choices of ``--dpp-slice-tokens auto``, and the gain of an order of rows, in the simulator.

    python profiling/bench_slice_choice.py --seeds 4

Batches of 64 sequences; a step's time is over a rank's own work without overheads. ``whole`` runs
as ``--dpp-slice-tokens off``, ``rule`` in slices of some six units per rank, ``auto`` as chosen;
``planned`` with ``--order planned`` as well. ``--evaluations`` compares ``rule`` with ``whole`` in
steps without backwards. ``--rows`` weighs packed rows, as a host announces them.
``--equal`` counts where the choice for microbatches of one length is that of simulating all.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence

import harness

from megatron.dpp.errors import exit_with
from megatron.dpp.schedule import Geometry, Kind, Scheduler
from megatron.dpp.sim.batches import BatchSettings, ways_to_run
from megatron.dpp.sim.clock import simulate
from megatron.dpp.sim.costs import Costs, Hop
from megatron.dpp.sim.lengths import MIXES, LengthCosts
from megatron.dpp.sim.orders import Question, plan_batch
from megatron.dpp.sim.pipeline_model import PipelineModel
from megatron.dpp.sim.slices import Row, cut, groups_of, tokens_for
from megatron.dpp.sim.weighing import MARGIN, weigh_fixed, weigh_rows, with_overheads
from megatron.dpp.slice_sizes import LEAST_TOKENS, sizes_to_weigh

_COSTS = LengthCosts.transformer()
_NUM_SEQUENCES = 64
_MOST_EQUAL = 60_000 * 2048
"""Tasks of slices of 2,048 tokens of a run of one length that is simulated as a whole."""
_ARMS = ("whole", "rule", "auto", "whole, planned", "rule, planned", "auto, planned")

Cells = Iterator[tuple[object, ...]]
"""Rows of a table."""


def times_of(lengths: list[int], model: PipelineModel, packing: str) -> dict[str, float]:
    """Times of the arms, the share of slices, and the planner's processor time in milliseconds."""
    settings = BatchSettings(
        num_ranks=model.num_ranks, packing=packing, budget=model.longest, costs=_COSTS, slices=0
    )
    ways = {n: batch[0] for n, batch in ways_to_run(lengths, settings, weighs=True).items()}
    rule = tokens_for(sum(lengths), model.num_ranks, _COSTS)
    exact, work = with_overheads(model), sum(_COSTS.total([length]) for length in lengths)
    start = time.process_time()
    chosen = plan_batch(model, Question(ways, {}, "drawn", weighs=True))
    took = time.process_time() - start
    planned = plan_batch(model, Question(ways, {}, weighs=True))
    took_planned = time.process_time() - start - took
    assert chosen.choice is not None and planned.choice is not None
    tokens = chosen.choice.tokens
    found = {
        "whole": exact.seconds(ways[0]),
        "rule": exact.seconds(ways.get(rule, ways[0])),
        "auto": exact.seconds(ways[tokens]),
    }
    plans = (
        ("auto, planned", planned.choice.tokens, planned),
        ("whole, planned", 0, plan_batch(exact, Question({0: ways[0]}, {}))),
        ("rule, planned", rule, plan_batch(exact, Question({rule: ways.get(rule, ways[0])}, {}))),
    )
    for name, each, plan in plans:
        rows = ways.get(each, ways[0])
        found[name] = exact.seconds([rows[i] for i in plan.order], plan.policy)
    more = {"cut": float(tokens > 0), "ms": took * 1e3, "ms, planned": took_planned * 1e3}
    return {name: each / work for name, each in found.items()} | more


def evaluation(rows: Sequence[Row], model: PipelineModel) -> float:
    """Time of a step without backwards."""
    p, v, groups = model.num_ranks, model.num_chunks, groups_of(rows)
    units = [unit for row in rows for unit in row.units]
    forward = [[model.costs.of_work(Kind.F, unit.tokens, unit.squares) / v for unit in units]]
    none, hop = [[0.0] * len(units)] * (p * v), Hop((model.hop or 0) / 2, (model.hop or 0) / 2)
    costs = Costs(
        (forward * (p * v), none, none), [hop] * (p * v - 1),
        overhead=dict.fromkeys(range(p), model.overhead),
    )  # fmt: skip
    linked = groups if max(groups) > 1 else ()
    shapes = [Geometry(p, r, v, len(units), groups=linked, forward_only=True) for r in range(p)]
    lanes = [Scheduler(shape, policy="depth-first") for shape in shapes]
    return simulate(lanes, costs, split_backward=False).makespan


def evaluations(ranks: list[int], seeds: int) -> Cells:
    """Time of evaluations in slices of the rule over that of whole sequences: the least, the mean
    and the greatest, over equal lengths and mixes.
    """
    for p, v in itertools.product(ranks, (1, 2)):
        model = with_overheads(
            PipelineModel(num_ranks=p, num_chunks=v, longest=1, policy="auto", costs=_COSTS)
        )
        equal = itertools.product((6500, 8192, 16384, 32768, 131072), (1, 4, 16, 32))
        batches = [[length] * (each * p) for length, each in equal]
        for mix, seed in itertools.product(MIXES, range(seeds)):
            rng = random.Random(seed)
            batches.append([MIXES[mix].draw(rng) for _ in range(_NUM_SEQUENCES)])
        ratios = []
        for lengths in batches:
            tokens = tokens_for(sum(lengths), p, _COSTS)
            rule, whole = (
                [cut([length], each, _COSTS)[0] for length in lengths] for each in (tokens, 1 << 20)
            )
            ratios.append(evaluation(rule, model) / evaluation(whole, model))
        shown = min(ratios), statistics.fmean(ratios), max(ratios)
        yield p, v, len(ratios), *(f"{ratio:.3f}" for ratio in shown)


def choices_for_rows(ranks: list[int]) -> Cells:
    """The choice for packed rows of ``sft`` sequences: simulated time of the best slices over that
    of whole rows, or its lower bound where none can gain 10 %.
    """
    shapes = ((16384, 64), (32768, 64), (32768, 16), (131072, 16))
    for p, v, (length, number) in itertools.product(ranks, (1, 2), shapes):
        model = PipelineModel(
            num_ranks=p, num_chunks=v, longest=length, policy="auto", costs=_COSTS
        )
        rng, rows = random.Random(0), []
        for _ in range(number):
            row: list[int] = []
            while sum(row) < length:
                row.append(min(MIXES["sft"].draw(rng), length - sum(row)))
            rows.append(tuple(row))
        start = time.process_time()
        choice = weigh_rows(model, tuple(rows))
        took = time.process_time() - start
        cut = [each for tokens, each in choice.times.items() if tokens]
        ratio = f"{min(cut):.3f}" if cut else f"at least {choice.least:.3f}"
        way = f"slices of {choice.tokens}" if choice.tokens else "whole"
        yield p, v, number, length, way, ratio, f"{took * 1e3:.0f}"


def choices_for_equal(ranks: list[int]) -> Cells:
    """Runs of 5, 8, 12 and 16 microbatches per rank, of which fewer are simulated: in how many is
    the choice to cut that of simulating all, and the most time lost by another one.
    """
    cases = list(itertools.product((1, 2), (1024, 4096), (8192, 16384, 65536), (5, 8, 12, 16)))
    for p in ranks:
        right, lost = 0, []
        for v, hidden, length, each in cases:
            model = PipelineModel(
                num_ranks=p, num_chunks=v, longest=length, policy="auto",
                costs=LengthCosts.transformer(hidden),
            )  # fmt: skip
            number, exact = each * p, with_overheads(model)
            if exact.num_tasks([[length]]) * number * length > _MOST_EQUAL:
                continue
            sizes = sizes_to_weigh(length * number, p, least=LEAST_TOKENS)
            ways = {n: cut([length], n, model.costs) * number for n in (1 << 20, *sizes)}
            times = {n % (1 << 20): exact.seconds(rows) for n, rows in ways.items()}
            best = min(times[n] for n in sizes)
            found = weigh_fixed(model, length, number).tokens
            right += (found > 0) == (best <= (1 - MARGIN) * times[0])
            lost.append(times[found] / min(times.values()) - 1)
        yield p, len(lost), right, f"{max(lost):.1%}"


def choices(ranks: list[int], seeds: int) -> Cells:
    """Mean times of the arms, over a rank's own work."""
    for mix, p, v, packing in itertools.product(MIXES, ranks, (1, 2), ("none", "even")):
        model = PipelineModel(
            num_ranks=p, num_chunks=v, longest=MIXES[mix].longest, policy="auto", costs=_COSTS
        )
        found = []
        for seed in range(seeds):
            rng = random.Random(seed)
            lengths = [MIXES[mix].draw(rng) for _ in range(_NUM_SEQUENCES)]
            found.append(times_of(lengths, model, packing))
        means = {name: statistics.fmean(one[name] for one in found) for name in found[0]}
        cells = [f"{means[name]:.3f}" for name in _ARMS]
        cells += [f"{means['cut']:.2f}", *(f"{means[name]:.0f}" for name in ("ms", "ms, planned"))]
        yield mix, p, v, packing, *cells


def main() -> int:
    parser = harness.new_parser(
        __doc__, seeds=(4, "batches, of which rows are means"), ranks=("2,4,8", "pipeline sizes"),
        evaluations=(False, "steps without backwards"), equal=(False, "microbatches of one length"),
        rows=(False, "packed rows of hosts"),
    )  # fmt: skip
    args = parser.parse_args()
    words = args.ranks.split(",")
    if args.seeds < 1 or not all(word.isdecimal() and int(word) >= 2 for word in words):
        parser.error("--seeds must be at least 1, --ranks sizes of 2 or more, like 2,4,8")
    ranks = [int(word) for word in words]
    if args.rows:
        heads, rows = (
            "p | chunks | rows | tokens | choice | slices / whole | ms",
            choices_for_rows(ranks),
        )
    elif args.equal:
        heads, rows = "p | runs | as with all | most time lost", choices_for_equal(ranks)
    elif args.evaluations:
        heads, rows = (
            "p | chunks | batches | least | mean | greatest",
            evaluations(ranks, args.seeds),
        )
    else:
        heads = " | ".join(("lengths | p | chunks | packing", *_ARMS, "cut", "ms", "ms, planned"))
        rows = choices(ranks, args.seeds)
    harness.print_table(heads, rows)
    return 0


if __name__ == "__main__":
    exit_with(main)
