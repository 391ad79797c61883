"""The layers of a run that names none: Transformer Engine's where they can run it, else the local
ones.

``train`` and the launch scripts ask :func:`choose_layers` before they start a run.
``--transformer-impl``, its key in a file and ``TRANSFORMER_IMPL`` win.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from megatron.dpp.config import ENGINE_ROWS
from megatron.dpp_train.options.engine import has_engine
from megatron.dpp_train.options.run_config import Settings
from megatron.dpp_train.options.validate_forms import forms_asked

AUTO, LOCAL, ENGINE = "auto", "local", "transformer_engine"

NEEDS_ENGINE = {
    "multi_latent_attention": "--multi-latent-attention",
    "fp8": "--fp8-format",
    "moe_permute_fusion": "--moe-permute-fusion",
    "moe_router_fusion": "--moe-router-fusion",
    "moe_latent_size": "--moe-latent-size",
}
"""Setting -> flag of what the local layers have no substitute for."""
_REPEATS = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


class Layers(NamedTuple):
    """A value of ``--transformer-impl``, and why it was chosen."""

    name: str
    why: str

    def line(self) -> str:
        """For the reader of a run's output."""
        other = LOCAL if self.name == ENGINE else ENGINE
        return f"layers: {self.name} ({self.why}); --transformer-impl {other} overrides that"


def choose_layers(
    args: Settings,
    arch: str,
    *,
    on_gpu: bool,
    is_ampere: bool,
    saved: str | None = None,
    python: str = sys.executable,
    elsewhere: bool = False,
) -> Layers:
    """Transformer Engine's layers where they are installed, the GPU runs them and nothing that the
    run asks for is known to need the local ones.

    Args:
        args: parsed flags of the run, its layout among them.
        arch: ``gpt`` or ``bert``.
        is_ampere: the GPUs are of that architecture or a newer one.
        saved: the layers of the checkpoint that the run starts from; None without one.
        python: the Python that will train.
        elsewhere: the run is planned for another machine, where the package is taken to be
            installed.
    """
    if not on_gpu:
        return Layers(LOCAL, "Transformer Engine's kernels run on GPUs alone")
    if not is_ampere:
        return Layers(LOCAL, "Transformer Engine needs a GPU from Ampere on")
    installed = has_engine(python)
    if not installed and not elsewhere:
        return Layers(LOCAL, "Transformer Engine is not installed")
    needed = next((flag for name, flag in NEEDS_ENGINE.items() if getattr(args, name)), None)
    if needed is not None:
        return Layers(ENGINE, f"{needed} needs them")
    if saved == LOCAL:
        return Layers(LOCAL, "those of the checkpoint that the run starts from")
    reason = next((text for text, given in _of_local(args, arch).items() if given), None)
    if reason is not None:
        return Layers(LOCAL, reason)
    there = "installed" if installed else "taken to be installed on the machine of the plan"
    return Layers(ENGINE, f"Transformer Engine is {there}")


def _of_local(args: Settings, arch: str) -> dict[str, bool]:
    """Reason for the local layers -> whether it holds for this run."""
    sharded = args.use_torch_fsdp2 or bool(args.deepspeed_zero_stage)
    exact = args.deterministic_mode and os.environ.get(_REPEATS) != "0"
    reasons = {f"{flag} is theirs alone": given for flag, given in forms_asked(args).items()}
    reasons |= {
        f"--family {args.family} has layers of its own": args.family is not None,
        "Transformer Engine's causal attention takes no masks of documents, as "
        "--reset-attention-mask": args.reset_attention_mask,
        "--apply-query-key-layer-scaling has not been run with Transformer Engine": (
            args.apply_query_key_layer_scaling
        ),
        "Transformer Engine's attention has kernels for fp16 and bf16 alone": (
            not args.fp16 and not args.bf16
        ),
        f"--deterministic-mode with Transformer Engine needs {_REPEATS}=0": exact,
        "packed rows of context-parallel ranks are cut by the local layers alone": (
            args.packing != "none" and args.context_parallel_size > 1
        ),
    }
    if args.dpp_cuda_graphs == "on":
        tensor, length = args.tensor_model_parallel_size, args.seq_length or 0
        reasons |= {
            f"CUDA graphs of Transformer Engine's layers need sequences of a multiple of "
            f"{ENGINE_ROWS}, and no tensor parallelism": tensor > 1 or bool(length % ENGINE_ROWS),
            "CUDA graphs have not captured Transformer Engine's experts": bool(args.num_experts),
        }
    not_run = {
        "BERT": arch == "bert",
        f"--softmax-type {args.softmax_type}": args.softmax_type != "vanilla",
        "--mtp-num-layers": bool(args.mtp_num_layers),
        f"--dpp-slice-tokens {args.dpp_slice_tokens}": args.dpp_slice_tokens != "off",
        "parameters that are sharded by FSDP2 or DeepSpeed": sharded,
        "weights of Hugging Face": bool(args.load_hf or args.save_hf),
    }
    reasons |= {f"{what}: not run here with Transformer Engine": g for what, g in not_run.items()}
    return reasons
