"""Packages that the settings of a run need beside megatron-core, and the GPU of Transformer
Engine."""

from __future__ import annotations

import importlib.util
from typing import Any

from megatron.dpp.errors import require


def check_packages(args: Any, *, elsewhere: bool = False) -> None:
    """Refuse settings whose package is not installed.

    Args:
        elsewhere: the run is planned for another machine, whose packages nobody knows.

    Raises:
        ConfigError: names the setting, and the package or what does without it.
    """
    check_engine(args, elsewhere=elsewhere)
    if elsewhere:
        return
    stage, instances = args.deepspeed_zero_stage, args.num_distributed_optimizer_instances
    for needed, package, error in (
        (
            stage,
            "deepspeed",
            f"--deepspeed-zero-stage {stage}: DeepSpeed is not installed; DS_BUILD_OPS=0 pip "
            "install deepspeed, or use --use-distributed-optimizer (stage 1) or "
            "--use-torch-fsdp2 (2 and 3)",
        ),
        (
            instances > 1,
            "einops",
            f"--num-distributed-optimizer-instances {instances}: megatron-core needs einops for "
            "it; pip install einops",
        ),
        (
            args.num_experts and args.moe_token_dispatcher_type == "flex",
            "deep_ep",
            "--moe-token-dispatcher-type flex needs DeepEP, which is not installed; use alltoall "
            "or allgather",
        ),
        *(
            (value, package, f"{flag} {value}: {package} is not installed; pip install {package}")
            for flag, value, package in (
                ("--wandb-project", args.wandb_project, "wandb"),
                ("--mlflow-experiment", args.mlflow_experiment, "mlflow"),
                ("--trackio-project", args.trackio_project, "trackio"),
            )
        ),
    ):
        require(not needed or importlib.util.find_spec(package) is not None, error)


def check_engine(args: Any, *, elsewhere: bool = False) -> None:
    """Settings that need Transformer Engine, its package and a GPU.

    Args:
        args: parsed or checked arguments; ``device`` may be ``auto``.
        elsewhere: as of :func:`check_packages`.
    """
    kernels = {
        f"--transformer-impl {args.transformer_impl}": args.transformer_impl != "local",
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--cross-entropy-fusion-impl te": args.cross_entropy_loss_fusion
        and args.cross_entropy_fusion_impl == "te",
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        "--cuda-graph-impl local": args.cuda_graph_impl == "local" or args.enable_cuda_graph,
    }
    for module in ("layernorm", "moe_act", "mla_up_proj"):
        kernels[f"--recompute-modules {module}"] = (
            args.recompute_granularity == "selective" and module in (args.recompute_modules or ())
        )
    asked = next((flag for flag, given in kernels.items() if given), None)
    if asked is None:
        return
    by_layers = asked.startswith("--transformer-impl")
    instead = "use --transformer-impl local" if by_layers else f"leave {asked} out"
    require(
        args.device != "cpu",
        f"{asked} needs Transformer Engine, whose kernels run on GPUs alone, and this run is on "
        f"the CPU; {instead}",
    )
    require(
        elsewhere or importlib.util.find_spec("transformer_engine") is not None,
        f"{asked} needs Transformer Engine, which is not installed; "
        f"pip install transformer_engine[pytorch], or {instead}",
    )
