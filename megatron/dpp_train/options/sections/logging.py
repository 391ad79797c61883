"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp_train.options.section import Section


class Logging(Section):
    """Log lines, TensorBoard, Weights & Biases, profiles, traces, metrics."""

    log_interval: int = 100
    log_throughput: bool = False
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    log_progress: bool = False
    timing_log_level: int = 0
    timing_log_option: str = "minmax"
    barrier_with_L1_time: bool = True
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_validation_ppl_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    log_memory_interval: int | None = None
    wandb_project: str | None = None
    wandb_exp_name: str = ""
    wandb_save_dir: str = ""
    wandb_entity: str | None = None
    mlflow_experiment: str | None = None
    mlflow_run_name: str | None = None
    mlflow_tracking_uri: str | None = None
    trackio_project: str | None = None
    trackio_run_name: str | None = None
    logging_level: int | None = None
    profile: bool = False
    use_pytorch_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: Sequence[int] = (0,)
    metrics_file: str | None = None
    estimate: bool = False
    trace: bool = False
    trace_dir: str = "benchmark"
    trace_interval: int = 1
    trace_iterations: str | None = None
    trace_granularity: str = "full"
    continuous_trace_iterations: int = 1
