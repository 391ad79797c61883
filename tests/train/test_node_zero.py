"""The loss is printed on node 0 too, where its ranks and the last one are on different nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

_RANK = """
import argparse, os, sys
import torch
import torch.distributed as dist
from megatron.dpp.train.initialize import Run
rank = int(sys.argv[1])
os.environ["LOCAL_WORLD_SIZE"] = sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
args = argparse.Namespace(world_size=2)
run = Run(args=args, rank=rank, device=torch.device("cpu"), timers=None)
run.say_ends("lm loss: 4.2" if rank else "of rank 0, which has no loss")
dist.destroy_process_group()
"""


def printed(folder: Path, per_node: int) -> list[str]:
    store = str(folder / f"store{per_node}")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), store, str(per_node)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        results = [rank.communicate(timeout=120) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], results
        return [out for out, _ in results]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_rank_0_prints_the_last_ranks_line_where_it_is_on_another_node(tmp_path: Path) -> None:
    assert printed(tmp_path, 1) == ["lm loss: 4.2\n", "lm loss: 4.2\n"]
    assert printed(tmp_path, 2) == ["", "lm loss: 4.2\n"]
