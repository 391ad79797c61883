"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp_train.options.section import UNSET, Section


class Batch(Section):
    """Batch sizes, length of training, precision checks, seed."""

    micro_batch_size: int = UNSET
    global_batch_size: int = UNSET
    rampup_batch_size: Sequence[int] | None = None
    decrease_batch_size_if_needed: bool = False
    train_iters: int = UNSET
    train_samples: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: int | None = None
    exit_signal_handler: bool = False
    empty_unused_memory_level: int = 0
    check_weight_hash_across_dp_replicas_interval: int | None = None
    train_sync_interval: int | None = None
    iterations_to_skip: Sequence[int] | None = None
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = True
    check_for_nan_in_loss_and_grad: bool = True
    check_for_large_grads: bool = False
    check_for_spiky_loss: bool = False
    seed: int = 1234
    data_parallel_random_init: bool = False
    te_rng_tracker: bool = False
    calc_ft_timeouts: bool = False
    yaml_cfg: str | None = None
