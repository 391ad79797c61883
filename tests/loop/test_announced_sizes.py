"""Runs with ``--dpp-activation-cap static``, which counts the announced sizes of microbatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.dpp.sim.batches import BatchPlans, BatchSettings
from tests.data.test_sequences import write_chats
from tests.loop.several import FLAGS
from tests.parity.runs import Result, read
from tests.runtime.launcher import run_ranks

CHATS = (
    "--sft --seq-length 64 --max-position-embeddings 64 --train-iters 3 --num-layers 4 "
    "--global-batch-size 16 --overlong cut --hidden-dropout 0 --attention-dropout 0 "
    "--pipeline-model-parallel-size 2 --split 1,0,0"
)
PADDED = "--micro-batch-size 2"
PACKED = (
    "--packing even --packing-budget 70 --order ascending --num-virtual-stages-per-pipeline-rank 2"
)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (BatchSettings(micro_batch_size=2, length_multiple=4), [16, 8]),
        (BatchSettings(packing="in-order", budget=12, length_multiple=4), [12, 4]),
        (BatchSettings(length_multiple=2, buckets=(4, 6)), [4, 8, 4, 4]),
    ],
    ids=["padded", "packed", "buckets"],
)
def test_sizes_count_padding(settings: BatchSettings, sizes: list[int]) -> None:
    plans = BatchPlans(lambda _, __: [3, 7, 1, 2], 4, 0, settings)
    assert plans.own_sizes(0) == sizes


def run(folder: Path, **lines: str) -> tuple[dict[str, Result], list[dict[str, Any]]]:
    """The metrics of runs with these flags, and each rank's sizes."""
    data = write_chats(folder / "x")
    commands = [
        f"{FLAGS} {CHATS} {more} --data-path {data} --metrics-file {folder}/{name}.jsonl".split()
        for name, more in lines.items()
    ]
    (folder / "lines.json").write_text(json.dumps(commands))
    worker = Path(__file__).with_name("announce_worker.py")
    run_ranks(worker, 2, [str(folder / "lines.json"), str(folder / "found")], timeout=200)
    found = [json.loads((folder / f"found.rank{rank}").read_text()) for rank in range(2)]
    return {name: read(folder / f"{name}.jsonl") for name in lines}, found


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("shape", [PADDED, PACKED], ids=["padded", "packed"])
def test_the_static_cap_knows_the_sizes_and_changes_no_number(tmp_path: Path, shape: str) -> None:
    runs, found = run(
        tmp_path,
        dynamic=f"{shape} --use-dpp --dpp-activation-cap static",
        default=f"{shape} --use-dpp",
        static=shape,
    )
    announced = found[0]["announced"]
    assert len(announced) == 3, "the default cap needs no sizes"
    assert found[1]["announced"] == announced
    sizes = [size for step in announced for size in step]
    chunks = 2 if shape == PACKED else 1  # a rank reads the data for each of its chunks
    taken = found[0]["read"][: chunks * len(sizes)]
    assert sorted(taken) == sorted(chunks * sizes)
    assert chunks > 1 or taken == sizes
    for name in ("dynamic", "default"):
        assert runs[name].column("lm loss") == runs["static"].column("lm loss")
        assert runs[name].hashes == runs["static"].hashes
