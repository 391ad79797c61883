"""Training over soft-RoCE: blackouts, and experts of two hosts.

Runs in the guest of ``vm.py``; ``test_soft_roce.py`` starts it, with DATA_PATH. All ranks are forks
of one process, because importing PyTorch takes a minute here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nodes import REPOSITORY, lines, numbers
from tests.rdma import guest
from tests.rdma.guest import HOSTS
from tests.runtime import launcher
from tests.runtime.cases import EXPERTS, LATE, WORKER, case
from tests.runtime.launcher import Place, Rank, run_ranks, start, wait

launcher.START_SECONDS = guest.PATIENCE

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(3 * guest.PATIENCE)]
BLACKOUTS = (2.0, 5.0, 20.0)
ITERATIONS = 2
SETTINGS = {
    "VOCAB_FILE": "datasets_gpt/vocab.json", "MERGE_FILE": "datasets_gpt/merges.txt",
    "TENSOR_PARALLEL": "1", "PIPELINE_PARALLEL": "2", "MODEL_CHUNKS": "2", "NUM_LAYERS": "4",
    "HIDDEN_SIZE": "32", "NUM_ATTENTION_HEADS": "2", "SEQ_LENGTH": "32", "MICRO_BATCH_SIZE": "1",
    "GLOBAL_BATCH_SIZE": "8", "TRAIN_ITERS": "100000", "EVAL_ITERS": "0", "TRACE": "0",
    "GPUS_PER_NODE": "2", "DRY_RUN": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


def on_hosts(hosts: list[int]) -> Place:
    """Places each rank on the host that stands at its number."""

    def place(rank: int) -> tuple[str, dict[str, str]]:
        host = hosts[rank]
        return HOSTS.names[host], {
            "MASTER_ADDR": HOSTS.addresses[0],
            "GLOO_SOCKET_IFNAME": HOSTS.devices[host],
            "LOCAL_WORLD_SIZE": str(len(hosts) // 2),
        }

    return place


def train(metrics: Path, place: Place | None, *more: str) -> list[Rank]:
    """The sample's training on two ranks, just started, with the flags that its script shows."""
    shown = subprocess.run(
        ["bash", "run_single_gpt.sh"], env={**os.environ, **SETTINGS, "PYTHON": sys.executable},
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=guest.PATIENCE,
    )  # fmt: skip
    _, _, flags = shown.stdout.splitlines()[-1].partition("pretrain_gpt.py ")
    arguments = [*flags.split(), "--metrics-file", str(metrics), *more]
    return start(REPOSITORY / "pretrain_gpt.py", 2, arguments, place, preload="training")


def test_blackouts_change_no_loss_and_a_killed_rank_is_named(tmp_path: Path) -> None:
    """Everything between the hosts is away: RDMA, the control connections, and gloo's."""
    metrics, expected = tmp_path / "hosts.jsonl", tmp_path / "single.jsonl"
    flags = ["--dpp-transport", "rdma", "--num-workers", "0"]
    ranks = train(metrics, on_hosts([0, 1]), *flags)

    def wait_for(count: int) -> None:
        guest.wait_until(
            lambda: len(lines(metrics)) >= count or any(r.poll() is not None for r in ranks)
        )
        if any(rank.poll() is not None for rank in ranks):
            pytest.fail("\n".join(each.output[-4000:] for each in wait(ranks, 10.0)))

    done = ITERATIONS
    try:
        wait_for(done)
        for seconds in BLACKOUTS:
            HOSTS.cut()
            time.sleep(seconds)
            before = len(lines(metrics))
            HOSTS.restore()
            restored = time.monotonic()
            wait_for(before + 1)
            late = time.monotonic() - restored
            print(f"an iteration ended {late:.1f} s after a blackout of {seconds:g} s")
            done = before + ITERATIONS
            wait_for(done)
        ranks[1].kill()
        killed = time.monotonic()
        (left, _) = wait(ranks, guest.PATIENCE)
        print(f"rank 0 ended {time.monotonic() - killed:.1f} s after rank 1 was killed")
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 0 -> 1: rdma" in left.output, left.output
    assert left.returncode != 0
    assert re.search(r"rank 1 \(pid \d+ on [\w-]+, rdma\)", left.output), left.output
    single = train(expected, None, "--num-workers", "0", "--exit-interval", str(done))
    assert [each.returncode for each in wait(single, guest.PATIENCE)] == [0, 0]
    assert numbers(metrics, done) == numbers(expected, done)
    print(f"{done} iterations with blackouts and without: equal, bit by bit")


def test_experts_of_two_hosts_train_as_with_the_static_schedule() -> None:
    """Each pipeline crosses the wire, and so does each group of experts."""
    over_rdma = {"transport": "rdma", "inject": LATE}
    cases = [
        case(
            "ep2 of two hosts", 2, 4, over_rdma, over_rdma | {"split_backward": "off"}, ep=2,
            layers=2, model=EXPERTS, deviates=1,
        )
    ]  # fmt: skip
    place = on_hosts([0, 1, 1, 0])
    output = run_ranks(WORKER, 4, [json.dumps(cases)], timeout=2 * guest.PATIENCE, place=place)
    assert f"CASE {cases[0]['name']} ok" in output
    print("\n".join(line for line in output.splitlines() if line.startswith("CASE")))
