"""Megatron-Bridge's ``train`` and ``evaluate`` up to their calls of the schedule, on a CPU.

Run by test_bridge.py with Megatron-Bridge on PYTHONPATH. Packages that it imports and that are not
installed are stubs, and so is what the two functions do beside the schedule. Prints what the
plugin's schedule is called with, one line of JSON per call.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn
from unittest.mock import MagicMock

import torch

from megatron.dpp.core import cpu

cpu.install()

from megatron.core.pipeline_parallel import schedules  # noqa: E402

from megatron.dpp import DppConfig, plugin  # noqa: E402
from megatron.dpp.runtime.dynamic import DppSchedule  # noqa: E402
from tests.runtime.test_step_call import FakeGroup  # noqa: E402

NEEDED = (
    "apex", "bitsandbytes", "boto3", "botocore", "causal_conv1d", "datasets", "fla", "flash_attn",
    "hydra", "mamba_ssm", "mlflow", "modelopt", "nvdlfw_inspect", "nvidia_resiliency_ext",
    "omegaconf", "peft", "pynvml", "rich", "safetensors", "toml", "transformer_engine",
    "transformer_engine_torch", "transformers", "wandb",
)  # fmt: skip
"""Packages that Megatron-Bridge imports and that may be missing."""


class Stub(types.ModuleType):
    """A module that has any name: a class where it begins with a capital letter."""

    __path__: ClassVar[list[str]] = []
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kind = {"__class_getitem__": classmethod(lambda own, _: own), "__module__": self.__name__}
        made = type(name, (), kind) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ``NEEDED`` that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        wanted = name.partition(".")[0] in NEEDED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Stubs())
from megatron.bridge.training import eval as evaluation  # type: ignore[import-not-found]  # noqa: E402
from megatron.bridge.training import train as training  # noqa: E402


class Reached(Exception):
    """The schedule was called."""


def called(schedule: DppSchedule, **keywords: Any) -> NoReturn:
    """Stands for the dynamic schedule's call."""
    plain = {name: value for name, value in keywords.items() if isinstance(value, int | None)}
    print(json.dumps({**plain, "others": sorted(keywords.keys() - plain.keys())}), flush=True)
    raise Reached


def state_of() -> Any:
    """A job of two microbatches, whose batches set the sequence length."""
    state = MagicMock()
    cfg = state.cfg
    cfg.train.micro_batch_size, cfg.train.global_batch_size, cfg.data_parallel_size = 1, 2, 1
    cfg.train.train_iters, cfg.train.eval_iters, state.train_state.step = 1, 1, 0
    cfg.train.manual_gc = cfg.profiling = cfg.straggler = (
        cfg.logger.log_throughput_to_tensorboard
    ) = None
    cfg.model.seq_length, cfg.model.virtual_pipeline_model_parallel_size = 64, None
    cfg.model.cuda_graph_impl, cfg.dataset.dataloader_type = "none", "batch"
    cfg.dist.use_decentralized_pg = True
    cfg.train.check_weight_hash_across_dp_replicas_interval = None
    state.energy_monitor = state.nvrx_straggler_manager = None
    return state


def quiet(module: Any, groups: Any) -> None:
    """Replace what the functions do beside the schedule."""
    module.get_rerun_state_machine = lambda: MagicMock(current_iteration=0)
    module.get_num_microbatches, module.update_num_microbatches = lambda: 2, MagicMock()
    module.P2PCommunicator = lambda **_: SimpleNamespace()
    module.get_pg_collection = lambda _: groups
    module.prepare_forward_step_func = lambda function, _: function
    module.should_fire = module._should_skip_and_handle_iteration = lambda *_: False
    module.should_disable_forward_pre_hook = lambda *_: False
    others = ("fault_tolerance", "handle_profiling_step", "maybe_finalize_async_save")
    for name in (*others, "_handle_mxfp8_param_buffer_copy"):
        setattr(module, name, MagicMock())


def main() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    DppSchedule.__call__ = called  # type: ignore[assignment,method-assign]
    chunk = torch.nn.Linear(4, 4)
    chunk.config = SimpleNamespace(  # type: ignore[assignment]
        virtual_pipeline_model_parallel_size=None, sequence_parallel=False, hidden_size=4,
        fp32_residual_connection=False, pipeline_dtype=torch.float32, seq_length=64,
        hidden_dropout=0.0, attention_dropout=0.0, moe_input_jitter_eps=None,
        moe_router_force_load_balancing=False, cuda_graph_impl="none", enable_autocast=False,
    )  # fmt: skip
    chunk.zero_grad_buffer = lambda: None  # type: ignore[assignment]
    sizes = {"pp": 2, "tp": 1, "cp": 1, "dp_cp": 1}
    groups = SimpleNamespace(**{name: FakeGroup(size) for name, size in sizes.items()})
    plugin.install(DppConfig(split_backward="off"), strict=True)
    assert training.get_forward_backward_func == evaluation.get_forward_backward_func
    assert training.get_forward_backward_func == schedules.get_forward_backward_func
    for module in (training, evaluation):
        quiet(module, groups)
    for length in (24, 40):
        batches = iter([{"tokens": torch.zeros(2, length, dtype=torch.long)}])
        rest = (MagicMock(), MagicMock(), batches, None, state_of(), {}, groups)
        with contextlib.suppress(Reached):
            training.train(MagicMock(), [chunk], *rest)
    batches = iter([{"tokens": torch.zeros(2, 32, dtype=torch.long)}])
    with contextlib.suppress(Reached):
        evaluation.evaluate(state_of(), MagicMock(), batches, [chunk], None, MagicMock())


if __name__ == "__main__":
    main()
