"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from typing import Any

from megatron.dpp_train.options.section import UNSET, Section


class Optimizer(Section):
    """Optimizer, learning rate, loss scale, state of the optimizer."""

    optimizer: str = "adam"
    lr: float = UNSET
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    lr_wsd_decay_style: str = "exponential"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    start_weight_decay: float = UNSET
    end_weight_decay: float = UNSET
    weight_decay_incr_style: str = "constant"
    optimizer_offload_fraction: float = 1.0
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    main_grads_dtype: Any = "fp32"
    main_params_dtype: Any = "fp32"
    exp_avg_dtype: Any = "fp32"
    exp_avg_sq_dtype: Any = "fp32"
    grad_reduce_in_bf16: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    loss_scale: float | None = None
    initial_loss_scale: float = 4294967296
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-08
    decoupled_weight_decay: bool = True
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_use_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_fp32_matmul_prec: str = "medium"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_extra_scale_factor: float = 1.0
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    clip_grad: float = 1.0
