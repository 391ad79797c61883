"""The loss is printed on node 0 too, where its ranks and the last one are on different nodes."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.launcher import start, wait

_RANK = """
import argparse, os, sys
import torch
import torch.distributed as dist
from megatron.dpp_train.state import Run
rank = int(os.environ["RANK"])
os.environ["LOCAL_WORLD_SIZE"] = sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
args = argparse.Namespace(world_size=2)
run = Run(args=args, rank=rank, device=torch.device("cpu"), timers=None)
run.say_ends("lm loss: 4.2" if rank else "lm loss of rank 0, which has none")
dist.barrier()  # a rank that ends first cuts the others' connections
dist.destroy_process_group()
"""


def printed(folder: Path, per_node: int) -> list[str]:
    """The lines with a loss of both ranks, where each node has ``per_node`` of them."""
    script = folder / "rank.py"
    script.write_text(_RANK)
    finished = wait(start(script, 2, [str(folder / f"store{per_node}"), str(per_node)]), 120)
    assert [rank.returncode for rank in finished] == [0, 0], finished
    said = [rank.output.splitlines(keepends=True) for rank in finished]
    return ["".join(line for line in lines if "lm loss" in line) for lines in said]


def test_rank_0_prints_the_last_ranks_line_where_it_is_on_another_node(tmp_path: Path) -> None:
    assert printed(tmp_path, 1) == ["lm loss: 4.2\n", "lm loss: 4.2\n"]
    assert printed(tmp_path, 2) == ["", "lm loss: 4.2\n"]
