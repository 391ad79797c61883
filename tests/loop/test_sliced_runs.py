"""Runs with ``--dpp-slice-tokens`` over sequences of unlike length."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.data.test_sequences import write_chats
from tests.loop.several import train_each
from tests.parity.runs import Result

LENGTHS = [random.Random(n).choice((9, 30, 70, 110, 200, 257)) for n in range(48)]
"""Tokens of chats; those above 1.5 slices of 64 tokens are cut."""
CHATS = (
    "--sft --seq-length 256 --max-position-embeddings 256 --num-layers 4 --global-batch-size 8 "
    "--pipeline-model-parallel-size 2 --split 6,1,1 --eval-iters 1 --eval-interval 2 "
    "--optimizer sgd --lr 0.05 --hidden-dropout 0 --attention-dropout 0 --use-dpp"
)
SLICED = "--dpp-slice-tokens 64"
REPLICAS = "--use-distributed-optimizer --optimizer adam --adam-eps 0.1"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear "
    "--no-bias-gelu-fusion --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
FOUR = "--pipeline-model-parallel-size 4"
ORDERS = {
    "static": f"{SLICED} --dpp-policy megatron --no-dpp-split-backward",
    "dynamic": SLICED,
    "late": f"{SLICED} --dpp-inject delay:4ms,message-delay:6ms --dpp-activation-cap 1.3seq",
}


def train(folder: Path, num_ranks: int, more: str, runs: dict[str, str]) -> dict[str, Result]:
    data = f"--data-path {write_chats(folder / 'x', LENGTHS)}"
    lines = {name: f"{CHATS} {more} {flags}" for name, flags in runs.items()}
    return train_each(folder, num_ranks, lines, data, timeout=250)


def check_equal(runs: dict[str, Result], names: tuple[str, ...]) -> None:
    first = runs[names[0]]
    for name in names[1:]:
        assert runs[name].column("lm loss") == first.column("lm loss"), name
        assert runs[name].evaluations == first.evaluations and runs[name].hashes == first.hashes


def check_near(one: Result, other: Result) -> None:
    losses = [
        [*r.column("lm loss"), *(row["lm loss"] for row in r.evaluations)] for r in (one, other)
    ]
    assert len(losses[0]) == len(losses[1]) > 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert one.column("grad norm") == pytest.approx(other.column("grad norm"), rel=1e-4)


@pytest.mark.timeout(280)
def test_slices_train_as_whole_sequences_do(tmp_path: Path) -> None:
    """In any order, a replayed one included."""
    late = f"{ORDERS['late']} --dpp-record DIR/order"
    replayed = {"replayed": f"{SLICED} --dpp-replay DIR/order --dpp-activation-cap 1.3seq"}
    arms = {"whole": "", "static": ORDERS["static"], "late": late, **replayed}
    runs = train(tmp_path, 2, "--train-iters 2", arms)
    check_equal(runs, ("static", "late", "replayed"))
    check_near(runs["whole"], runs["late"])


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "more",
    [
        "--train-iters 20 --packing even --position-embedding-type rope",
        "--train-iters 20 --calculate-per-token-loss",
        f"--train-iters 6 {CHUNKS} --packing even --num-layers 4",
        "--train-iters 6 --tensor-model-parallel-size 2 --sequence-parallel --packing even",
        f"--train-iters 6 --packing even {REPLICAS}",
        f"--train-iters 6 --packing even {EXPERTS}",
        f"--train-iters 6 {RECOMPUTE}",
        f"--train-iters 6 --packing even {FOUR}",
        f"--train-iters 6 --packing even {FOUR} --num-layers 8 {CHUNKS}",
    ],
    ids=[
        *("packed", "per token", "two chunks", "tensor", "replicas", "experts", "recompute"),
        *("four stages", "four stages, two chunks"),
    ],
)
def test_sliced_layouts_train_as_whole_sequences_do(tmp_path: Path, more: str) -> None:
    num_ranks = 4 if any(word in more for word in ("tensor", "distributed", FOUR)) else 2
    runs = train(tmp_path, num_ranks, more, {"whole": "", **ORDERS})
    check_equal(runs, tuple(ORDERS))
    check_near(runs["whole"], runs["dynamic"])


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_resumed_run_of_slices_is_the_same(tmp_path: Path) -> None:
    """From the middle of an epoch. Other slices are told, also from or to whole sequences."""
    where = "--save DIR/saved --save-interval 3"
    last = "--train-iters 6 --exit-interval 5"
    runs = train(
        tmp_path, 2, "--packing even",
        {
            "all": f"{SLICED} --train-iters 6",
            "first": f"{SLICED} --train-iters 6 --exit-interval 3 {where}",
            "second": f"{SLICED} --train-iters 6 --load DIR/saved",
            "smaller": f"--dpp-slice-tokens 128 {last} --load DIR/saved",
            "whole": f"{last} --load DIR/saved --save DIR/whole --save-interval 5",
            "cut": f"{SLICED} --train-iters 6 --load DIR/whole",
        },
    )  # fmt: skip
    whole, second = runs["all"], runs["second"]
    assert second.column("lm loss") == whole.column("lm loss")[3:]
    assert second.hashes == whole.hashes
    said = [line for line in (tmp_path / "output").read_text().splitlines() if "saved with" in line]
    sizes = [("64", "128"), ("64", "off"), ("off", "64")]
    assert len(said) == len(sizes)
    for line, (there, here) in zip(said, sizes, strict=True):
        assert f"saved with --dpp-slice-tokens {there}, this run has {here}: it goes on" in line


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [(4, REPLICAS), (4, FOUR), (2, CHUNKS)],
    ids=["replicas", "four stages", "two chunks"],
)
def test_resumed_layouts_of_slices_are_the_same(tmp_path: Path, num_ranks: int, more: str) -> None:
    """From the middle of an epoch, replayed from there, too."""
    where = "--train-iters 6 --exit-interval 3 --save DIR/saved --save-interval 3"
    rest = f"{SLICED} --train-iters 6 --load DIR/saved"
    runs = train(
        tmp_path, num_ranks, f"--packing even {more}",
        {
            "all": f"{SLICED} --train-iters 6",
            "first": f"{SLICED} {where}",
            "second": f"{rest} --dpp-record DIR/order",
            "replayed": f"{rest} --dpp-replay DIR/order",
        },
    )  # fmt: skip
    check_equal(runs, ("second", "replayed"))
    assert runs["second"].column("lm loss") == runs["all"].column("lm loss")[3:]
    assert runs["second"].hashes == runs["all"].hashes


COSTS = {"fixed": 1.92, "per_token": [1, 1, 1], "per_square": [0.002, 0.004, 0]}
"""Measured times with which slices of 64 tokens pay in some batches."""


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_auto_takes_what_is_faster_in_each_batch_and_resumes_alike(tmp_path: Path) -> None:
    """Also replayed, and on all ranks; whole batches are those of a run without slices."""
    (tmp_path / "costs").write_text(json.dumps(COSTS))
    (tmp_path / "dear").write_text(json.dumps(COSTS | {"fixed": 1e4}))
    auto = "--dpp-slice-tokens auto --length-costs DIR/costs"
    where = "--train-iters 6 --exit-interval 3 --save DIR/saved --save-interval 3"
    # Six: sums of losses, and weighted ones, round alike in powers of two.
    dear = "--train-iters 6 --length-costs DIR/dear --global-batch-size 6"
    runs = train(
        tmp_path, 2, "--global-batch-size 4",
        {
            "all": f"{auto} --train-iters 6 --dpp-record DIR/order",
            "again": f"{auto} --train-iters 6 --dpp-replay DIR/order",
            "first": f"{auto} {where}",
            "second": f"{auto} --train-iters 6 --load DIR/saved",
            "whole": "--train-iters 6 --length-costs DIR/costs",
            "dear": f"--dpp-slice-tokens auto {dear}",
            "off": dear,
            "planned": f"{auto} --order planned --train-iters 6",
        },
    )  # fmt: skip
    check_equal(runs, ("all", "again"))
    assert runs["second"].column("lm loss") == runs["all"].column("lm loss")[3:]
    assert runs["second"].hashes == runs["all"].hashes
    for name in ("all", "planned"):
        check_near(runs["whole"], runs[name])
    assert runs["dear"].column("lm loss") == runs["off"].column("lm loss")
    assert runs["dear"].hashes == runs["off"].hashes
    lines = (tmp_path / "order.rank0").read_text().splitlines()[1:]
    assert any("groups" in json.loads(line) for line in lines)
    said = (tmp_path / "output").read_text()
    assert said.count("--dpp-slice-tokens auto takes slices of 64 tokens: a step in") == 4
    assert said.count("auto takes whole sequences: a step in") == 1, "in the best orders"
    assert "auto takes whole sequences, as no sequence has more than 1.5 slices" in said


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_resume_tells_that_auto_may_choose_other_slices(tmp_path: Path) -> None:
    """Another policy may choose otherwise; the same settings choose alike."""
    (tmp_path / "costs").write_text(json.dumps(COSTS))
    auto = "--dpp-slice-tokens auto --length-costs DIR/costs --train-iters 6"
    train(
        tmp_path, 2, "--no-save-optim --no-load-optim",
        {
            "first": f"{auto} --exit-interval 3 --save DIR/saved --save-interval 3",
            "same": f"{auto} --exit-interval 4 --load DIR/saved",
            "other": f"{auto} --exit-interval 4 --load DIR/saved --dpp-policy dynamic",
        },
    )  # fmt: skip
    said = (tmp_path / "output").read_text()
    assert said.count("was saved with --dpp-policy auto: --dpp-slice-tokens auto may choose") == 1
