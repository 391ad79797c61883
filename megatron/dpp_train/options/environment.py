"""The environment variables that MegatronDPP reads or sets, in one table."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """An environment variable. ``reader``: who reads it, or sets it."""

    name: str
    default: str
    meaning: str
    reader: str


_BY_RECIPE = "by recipe"
_FOUND = "found"
_UNSET = "unset"
_LAUNCH = (
    ("NUM_NODES", "1", "nodes of the run; 2 in `run_master_*.sh` and `run_worker_*.sh`"),
    ("NODE_RANK", "0", "number of this node, from 0; 1 in `run_worker_*.sh`"),
    ("MASTER_ADDR", "localhost", "host of node 0; a worker needs it. Not read on one node"),
    ("MASTER_PORT", "6000", "port of node 0; a single node without it takes a free port"),
    ("WAIT_SECONDS", "300", "seconds that nodes wait for each other"),
    ("NODE_IPS", "", "IP addresses between nodes, one per node or one per rank"),
    ("RUN_DIR", "", "directory of the run; empty: a new one below `runs`"),
    ("DRY_RUN", "0", "1: print the commands, start nothing"),
)
_SETTINGS = (
    ("GPUS_PER_NODE", _FOUND, "processes of a node"),
    ("PIPELINE_PARALLEL", "2", "pipeline parallel size"),
    ("TENSOR_PARALLEL", "2", "tensor parallel size"),
    ("MODEL_CHUNKS", "4", "model chunks (virtual stages) of a pipeline rank"),
    ("NUM_LAYERS", _BY_RECIPE, "depth of the model"),
    ("HIDDEN_SIZE", _BY_RECIPE, "width of the model"),
    ("NUM_ATTENTION_HEADS", _BY_RECIPE, "attention heads of a layer"),
    ("SEQ_LENGTH", _BY_RECIPE, "tokens of a sample"),
    ("MICRO_BATCH_SIZE", _BY_RECIPE, "samples of a microbatch"),
    ("GLOBAL_BATCH_SIZE", _BY_RECIPE, "samples of an iteration"),
    ("LR", _BY_RECIPE, "highest learning rate"),
    ("MIN_LR", _BY_RECIPE, "lowest learning rate"),
    ("INIT_METHOD_STD", _BY_RECIPE, "standard deviation of GPT's initial weights"),
    ("TRAIN_ITERS", "50", "iterations"),
    ("LR_WARMUP_FRACTION", "0.05", "share of the iterations in which the learning rate rises"),
    ("PRECISION", "fp16", "fp32, bf16 or fp16"),
    ("RECOMPUTE", "1", "1: recompute attention in the backward"),
    (
        "TRANSFORMER_IMPL",
        "auto",
        "implementation of the layers: local, transformer_engine, or auto",
    ),
    ("USE_DPP", "1", "1: dynamic pipeline; 0: megatron-core's static schedule"),
    ("WORKLOAD", "", "elements per chunk of a tensor that is staged through host memory"),
    ("TRACE", "0", "1: record what every rank does"),
    ("SEED", "1234", "seed of all random numbers"),
    ("LOG_INTERVAL", "1", "iterations between log lines"),
    ("EVAL_INTERVAL", "1000", "iterations between evaluations"),
    ("EVAL_ITERS", "10", "iterations of an evaluation"),
    ("SAVE_INTERVAL", "10000", "iterations between checkpoints"),
    ("CHECKPOINT_PATH", "", "directory to save to and load from"),
    ("TENSORBOARD_PATH", "", "directory of TensorBoard files"),
    ("DATA_PATH", "", "prefix of token files, or weights and prefixes; empty: the sample corpus"),
    ("VOCAB_FILE", _BY_RECIPE, "vocabulary; that of the sample corpus"),
    ("MERGE_FILE", _BY_RECIPE, "merges of GPT's vocabulary; those of the sample corpus"),
)
_SLURM = (
    ("SLURM_NNODES", "NUM_NODES where that is unset"),
    ("SLURM_JOB_NUM_NODES", "NUM_NODES where that and SLURM_NNODES are unset"),
    ("SLURM_NODEID", "NODE_RANK where that is unset"),
    ("SLURM_NTASKS", "tasks of the job; must be one per node"),
    ("SLURM_STEP_NUM_TASKS", "tasks that srun starts; must be 1 on one node"),
    ("SLURM_JOB_NODELIST", "MASTER_ADDR where that is unset: its first host"),
    ("SLURM_JOB_ID", "noted in the progress file; makes a port in `train_gpt.sbatch`"),
    ("SLURM_SUBMIT_DIR", "directory of the clone in `train_gpt.sbatch`"),
    ("SLURM_GPUS_ON_NODE", "GPUS_PER_NODE in `train_gpt.sbatch`"),
    ("SLURM_CPUS_PER_TASK", "cores that `train_gpt.sbatch` hands to srun"),
)
_RANKS = (
    ("RANK", "0", "number of this process", "training"),
    ("WORLD_SIZE", "1", "processes of the run", "training"),
    ("LOCAL_RANK", "0", "number of this process on its node: its GPU", "training"),
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "processes of this node", "training"),
    ("TORCHELASTIC_RUN_ID", _UNSET, "tells runs apart in a trace", "trace"),
    ("TORCHELASTIC_ERROR_FILE", _UNSET, "file in which torchrun reads a rank's error", "training"),
    ("TORCHELASTIC_RESTART_COUNT", _UNSET, "tells restarts apart in a trace", "trace"),
    ("TORCHELASTIC_USE_AGENT_STORE", _UNSET, "True: torchrun has the ranks' store", "training"),
)
_BUILD = (
    ("TORCH_INDEX_URL", _UNSET, "index to install PyTorch from", "tools/setup.sh"),
    ("CC", "cc", "C compiler; set-up builds the extension again for another one", "tools/setup.sh"),
    ("CXX", "g++", "C++ compiler of the extension", "tools/setup.sh, setup.py, doctor"),
    ("CFLAGS", "", "flags of the C compiler", "tools/setup.sh"),
    ("CXXFLAGS", "", "flags of the C++ compiler", "tools/setup.sh"),
    ("LDFLAGS", "", "flags of the linker", "tools/setup.sh"),
)  # fmt: skip
_OTHERS = (
    ("DPP_TOKEN_FILE", "", "file of mode 0600 with the job's secret; --dpp-token-file wins",
     "links"),
    (
        "PYTHON",
        _FOUND,
        "Python to start from; tools/setup.sh keeps it for later commands",
        "launch scripts, tools",
    ),
    ("PYTHONPATH", "", "the launcher puts the repository in front", "set by the launcher"),
    ("PYTHONSAFEPATH", "1", "modules of the working directory hide no package (Python 3.11)",
     "set by the launcher"),
    ("CUDA_VISIBLE_DEVICES", _UNSET, "GPUs to use; empty or -1: none", "launcher, CUDA"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "8 or 1",
     "hardware queues of a GPU; 1 with tensor or context parallelism, which rely on it",
     "set by the launcher, CUDA"),
    ("OMP_NUM_THREADS", "1", "threads of a process on the CPU", "set by the launcher, PyTorch"),
    ("PYTHONUTF8", _UNSET, "1 where the locale has another encoding", "set by every program"),
    ("PYTHONIOENCODING", _UNSET, "removed where it is not UTF-8", "every program"),
    ("PYTHONWARNINGS", "filters", "hides warnings about optional packages", "set by the launcher"),
    ("TOKENIZERS_PARALLELISM", "false", "threads of tokenizers", "set by launcher and tokenizers"),
    ("GLOO_SOCKET_IFNAME", _FOUND, "network interface of gloo", "set between nodes, gloo"),
    ("NCCL_SOCKET_IFNAME", _FOUND, "network interface of NCCL", "set with NODE_IPS, NCCL"),
    ("NCCL_HOSTID", _FOUND, "tells groups of ranks on one GPU apart", "profiling/shared_gpus"),
    ("NCCL_GRAPH_REGISTER", _UNSET, "0 where training sets PYTORCH_ALLOC_CONF",
     "set by training, NCCL"),
    ("NUM_GPUS", _UNSET, "GPUS_PER_NODE where that is unset; GPUs that several ranks share",
     "launch scripts, profiling"),
    ("DPP_PROGRAM", _UNSET, "name of the program that errors begin with", "set by training"),
    ("DPP_GO_ON", _UNSET, "command that goes on, for torchrun's last line", "set by training"),
    ("DPP_SAVE", _UNSET, "directory of the run's checkpoints, likewise", "set by training"),
    ("DPP_STOPPED_SECONDS", "630",
     "time after which torchrun ends a stopped process of a job of several ranks; by the launcher "
     "--distributed-timeout-minutes and 30 s", "launcher, torchrun"),
    ("TP_SIZE", "1", "tensor parallel size", "scripts/"),
    ("PP_SIZE", "1", "pipeline parallel size", "scripts/"),
    ("ZERO_STAGE", "1", "ZeRO stage", "scripts/run_deepspeed.sh"),
    ("PET_LOG_DIR", "temporary", "directory of torchrun's logs", "set by training, torchrun"),
    ("TORCHDYNAMO_DISABLE", _UNSET, "1 without a GPU or jit fusion", "set by training, PyTorch"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "workspaces of cuBLAS with --deterministic-mode",
     "set by training, cuBLAS"),
    ("PYTORCH_ALLOC_CONF", _UNSET,
     "PyTorch's allocator; expandable_segments:True with sequences of unlike length",
     "set by training, PyTorch"),
    ("UCX_MODULES", "^efa", "modules of UCX under --dpp-transport nixl", "set by training, UCX"),
    ("UCX_TLS", _FOUND, "transports of UCX under --dpp-transport nixl", "UCX"),
    ("DS_ACCELERATOR", _FOUND, "device of DeepSpeed's engine", "set by training, DeepSpeed"),
    ("WANDB_MODE", _UNSET, "offline: Weights & Biases writes to disk only", "Weights & Biases"),
    ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2", "retries of a request to MLflow",
     "set by training, MLflow"),
    ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20", "seconds of a request to MLflow",
     "set by training, MLflow"),
)  # fmt: skip

GROUPS: dict[str, tuple[Variable, ...]] = {
    "Launcher: `train` and the launch scripts": tuple(
        Variable(*row, "launcher") for row in _LAUNCH
    ),
    "Settings of the launch scripts": tuple(Variable(*row, "launch scripts") for row in _SETTINGS),
    "SLURM": tuple(
        Variable(name, _UNSET, meaning, "launcher, SLURM script") for name, meaning in _SLURM
    ),
    "Set by torchrun": tuple(Variable(*row) for row in _RANKS),
    "Build": tuple(Variable(*row) for row in _BUILD),
    "Others, read or set": tuple(Variable(*row) for row in _OTHERS),
}
VARIABLES = {each.name: each for rows in GROUPS.values() for each in rows}
DEFAULTS = {
    name: default
    for name, default, _ in (*_LAUNCH, *_SETTINGS)
    if default not in (_BY_RECIPE, _FOUND)
}
"""Defaults of the launcher's variables that depend on neither recipe nor machine."""


def value(name: str, env: Mapping[str, str]) -> str:
    """The variable's value in ``env``; its default where it is unset or empty."""
    return env.get(name) or VARIABLES[name].default


def count_gpus(env: Mapping[str, str]) -> int:
    """The number of GPUs that ``CUDA_VISIBLE_DEVICES`` or ``nvidia-smi`` names."""
    shown = env.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return sum(word.strip()[:1] not in ("", "-") for word in shown.split(","))
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return sum(line.startswith("GPU") for line in listed.splitlines())


def check_visible_gpus(env: Mapping[str, str]) -> None:
    """Refuse a ``CUDA_VISIBLE_DEVICES`` that names GPUs where the machine has none: a ConfigError
    with the way to a run on the CPU."""
    shown = env.get("CUDA_VISIBLE_DEVICES", "")
    devices = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]
    without = {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}
    if count_gpus(env) and not devices and not count_gpus(without):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={shown}: this machine has no GPU; set it to nothing "
            "(CUDA_VISIBLE_DEVICES=) for a run on the CPU"
        )


def markdown() -> str:
    """``docs/environment.md``."""
    lines = [
        "# Environment variables",
        "",
        "`megatron-dpp env` prints this table with the values that are set now, and",
        "`megatron-dpp env --markdown` writes this page. A variable that is empty counts as unset.",
        "Defaults of the launch scripts are those of `examples/`. `run_*.sh` make one pipeline of",
        "the GPUs at hand, with two chunks per rank, bf16 and a trace; without a GPU PP2 x TP2 in",
        "fp32.",
        "Defaults `by recipe` stand in `megatron/dpp_train/launch/scripts.py`.",
    ]
    for title, rows in GROUPS.items():
        lines += ["", f"## {title}", "", "| variable | default | meaning | read by |"]
        lines += ["|---|---|---|---|"]
        for row in rows:
            default = f"`{row.default}`" if row.default else "empty"
            lines.append(f"| `{row.name}` | {default} | {row.meaning} | {row.reader} |")
    return "\n".join(lines) + "\n"
