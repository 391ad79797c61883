"""Cases of ``equality_worker.py``: layouts and settings that must train alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runtime.launcher import run_ranks

WORKER = Path(__file__).with_name("equality_worker.py")
LATE = "delay:4ms,message-delay:6ms"
FUSED_GRAPHS = {"split_backward": "off", "cuda_graphs": "on"}
LATE_GRAPHS = {"inject": LATE, "cuda_graphs": "on"}
EXPERTS = {
    "num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip

ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
TENSOR = {"tp": 2, "sp": True}
OPTIMIZED = {"distributed_optimizer": True, "overlap": True}
GLOBAL = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.01]}
SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}
UNLIKE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
PADDED = EXPERTS | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def check(
    num_ranks: int, *cases: dict[str, Any], worker: Path = WORKER, timeout: float = 300, **more: Any
) -> None:
    """Run cases, by default of ``equality_worker.py``, in one start of their ranks; ``more`` as of
    :func:`run_ranks`.
    """
    output = run_ranks(worker, num_ranks, [json.dumps(cases)], timeout=timeout, **more)
    for case in cases:
        assert f"CASE {case['name']} ok" in output, output
    print("\n".join(each for each in output.splitlines() if each.startswith(("CASE", "LAYERS"))))


def case(name: str, p: int, m: int, *runs: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """A layout and its runs. Their backwards are split also where ``auto`` would fuse them."""
    if layout.get("recompute") == "full" and "names" not in layout:
        runs = tuple({"split_backward": "on"} | run for run in runs)
    return {"name": name, "p": p, "m": m, "runs": runs, **layout}
