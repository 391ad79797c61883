"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from typing import Any

from megatron.dpp_train.options.section import UNSET, Section


class Checkpoint(Section):
    """Checkpoints: places, intervals, format."""

    save: str | None = None
    save_interval: int = UNSET
    save_retain_interval: int | None = None
    load: str | None = None
    pretrained_checkpoint: str | None = None
    load_hf: str | None = None
    save_hf: str | None = None
    ckpt_step: int | None = None
    ckpt_format: str = "torch_dist"
    auto_detect_ckpt_format: bool = False
    no_save_optim: bool | None = None
    no_save_rng: bool | None = None
    no_load_optim: bool | None = None
    no_load_rng: bool | None = None
    finetune: bool = False
    exit_on_missing_checkpoint: bool = False
    use_checkpoint_args: bool = False
    async_save: bool = False
    use_persistent_ckpt_worker: bool = False
    ckpt_fully_parallel_save: bool = True
    ckpt_fully_parallel_load: bool = False
    ckpt_assume_constant_structure: bool = False
    dist_ckpt_strictness: str = "assume_ok_unexpected"
    dist_ckpt_optim_fully_reshardable: bool = False
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    start: Any = None
