"""The private and patched names of megatron-core and Transformer Engine that this project uses.

``TABLE`` holds each name once: where it is, its parameters, and the versions of megatron-core that
have it in this form. Code reads such a name by :func:`lookup` and replaces it by :func:`patched`;
both check it first. ``tests/runtime/test_compat.py`` checks the table against the installed
megatron-core and against the sources of other versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import megatron.core
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from packaging.version import Version
from torch.distributed import ProcessGroup

from megatron.dpp.errors import ConfigError

OLDEST, NEWEST = "0.16.0", "0.20"
"""The versions of megatron-core that ``TABLE`` was checked against."""


class PrivateName(NamedTuple):
    """One name.

    Args:
        key: ``module:name`` under ``megatron.core``, or in full for Transformer Engine and for
            ``megatron.training``.
        parameters: of a function, separated by spaces; None for a class or a value. One that ends
            in ``?`` is missing in some sources of a version.
        since, until: the first version with this form, and the first without it.
        optional: missing where a package that megatron-core imports is not installed.
    """

    key: str
    parameters: str | None = None
    since: str = OLDEST
    until: str = ""
    optional: bool = False

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        module = self.key.partition(":")[0]
        in_full = module.startswith(("transformer_engine", "megatron.training"))
        return module if in_full else f"megatron.core.{module}"

    @property
    def name(self) -> str:
        """Name within the module; a class's attribute has the class before a dot."""
        return self.key.partition(":")[2]

    def takes(self, parameters: str) -> bool:
        """True if a function with these parameters has this form."""
        expected = (self.parameters or "").split()
        fewest = [name for name in expected if not name.endswith("?")]
        return parameters.split() in (fewest, [name.rstrip("?") for name in expected])

    def is_of(self, version: str) -> bool:
        """True if a version of megatron-core has this form."""
        numbers = numbers_of(version)
        ended = self.until and numbers >= numbers_of(self.until)
        return not ended and numbers >= numbers_of(self.since)


_BUCKETS = "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_DDP = "distributed.distributed_data_parallel:DistributedDataParallel"

GET_SCHEDULE = "pipeline_parallel.schedules:get_forward_backward_func"
"""The function by which every host fetches its schedule."""

DIRECT_SCHEDULES = (
    "pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
)
"""Schedules that some hosts call without fetching them."""

OFFLOAD_RESET = (
    "pipeline_parallel.fine_grained_activation_offload:"
    "FineGrainedActivationOffloadingInterface.reset"
)
TE_LAYERS = "megatron.core.extensions.transformer_engine"
"""The module of megatron-core's subclasses of Transformer Engine's layers."""
_TE_DEBUGS = "transformer_engine.debug.pytorch.debug_state:TEDebugState.debug_enabled"
TRAINING = tuple(
    f"megatron.training.training:{name}"
    for name in ("train_step", "training_log", "evaluate", "evaluate_and_print_results")
)
"""Functions of Megatron's training loop, which megatron-core's wheels have from 0.17 on."""
_GROUPS = (
    *("tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp"),
    *("tp_dp_cp", "gtp_remat", "expt_gtp_remat", "dp_cp_gtp_remat"),  # some versions
)
"""Process groups that a schedule and the finalisation of gradients ask for."""
_VALUES = {
    "tensor_parallel.random:": "_lazy_call _lazy_init",
    "tensor_parallel.random:CudaRNGStatesTracker.": "states_ use_cudagraphable_rng",
    "tensor_parallel.layers:": "_grad_accum_fusion_available",
    f"{_DDP}.": "bucket_groups expert_parallel_bucket_groups param_to_bucket_group "
    "force_all_reduce",
    f"{_BUCKETS}.": "is_last_microbatch is_first_batch grad_reduce_handle params",
    "distributed.torch_fully_sharded_data_parallel:": "DeviceMesh",
    "optimizer:": "Adam SGD USING_PYTORCH_OPTIMIZER",
    "optimizer.optimizer:": "multi_tensor_scale_impl",
    "optimizer.clip_grads:": "l2_norm_impl multi_tensor_scale_impl",
    "optimizer.distrib_optimizer:": "Adam HAVE_APEX_OR_TE",
    "transformer.transformer_block:": "LayerNormImpl",
    "transformer.module:": "_FLOAT_TYPES _HALF_TYPES _BF16_TYPES",
    "transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.": "cuda_dtoh_stream",
    "models.backends:": "LNImpl",
    "models.gpt.gpt_layer_specs:": "LNImpl",
    "jit:": "jit_fuser",
}
"""Names in all versions whose parameters do not matter, by what they begin with."""

TABLE = (
    *(PrivateName(f"{start}{name}") for start, names in _VALUES.items() for name in names.split()),
    *(PrivateName(key) for key in (*DIRECT_SCHEDULES, *TRAINING)),
    PrivateName(GET_SCHEDULE, "pp_size vp_size", until="0.19"),
    PrivateName(GET_SCHEDULE, "pp_size vp_size schedule_pg_collection", since="0.19"),
    PrivateName(
        "pipeline_parallel.schedules:forward_step",
        "forward_step_func data_iterator model num_microbatches input_tensor "
        "forward_data_store config cp_group_size collect_non_loss_data "
        "checkpoint_activations_microbatch is_first_microbatch current_microbatch vp_stage "
        "is_last_stage",
    ),
    PrivateName(
        "pipeline_parallel.schedules:backward_step",
        "input_tensor output_tensor output_tensor_grad model_type config",
        until="0.17",
    ),
    PrivateName(
        "pipeline_parallel.schedules:backward_step",
        "input_tensor output_tensor output_tensor_grad config",
        since="0.17",
    ),
    PrivateName(
        "pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        "self tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape wait_on_reqs",
    ),
    PrivateName(
        "pipeline_parallel.p2p_communication:_p2p_ops",
        "tensor_send_prev tensor_recv_prev tensor_send_next tensor_recv_next group "
        "prev_pipeline_rank next_pipeline_rank",
    ),
    PrivateName("tensor_parallel.random:_get_all_rng_states", ""),
    PrivateName(
        "tensor_parallel.random:_set_all_rng_states",
        "cpu_rng_state cuda_rng_state cuda_rng_state_tracker kind?",
    ),
    PrivateName("tensor_parallel.layers:fused_weight_gradient_mlp_cuda", optional=True),
    *(
        PrivateName(
            f"tensor_parallel.layers:{kind}ParallelLinear._forward_impl",
            "self input weight *args **kwargs",
        )
        for kind in ("Column", "Row")
    ),
    PrivateName(f"{_BUCKETS}.register_grad_ready", "self param force_all_reduce"),
    PrivateName(f"{_BUCKETS}.start_grad_sync", "self force_all_reduce"),
    PrivateName("optimizer.clip_grads:multi_tensor_scale_tensor_impl", since="0.17"),
    PrivateName(OFFLOAD_RESET, "", until="0.20"),
    PrivateName(OFFLOAD_RESET, "process_group", since="0.20"),
    PrivateName("transformer.moe.moe_utils:te_general_gemm", optional=True),
    PrivateName("jit:noop_decorator", "func"),
    PrivateName(
        "transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", "tensor as_numpy record_stream"
    ),
    PrivateName(
        "transformer_engine.pytorch.module._common:WeightGradStore.delay_wgrad_compute",
        "self",
        optional=True,
    ),
    PrivateName(
        "transformer_engine.pytorch.module._common:WeightGradStore.put",
        "self tensor_list func",
        optional=True,
    ),
    PrivateName(_TE_DEBUGS, optional=True),
)  # fmt: skip


def numbers_of(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a pre-release or a build."""
    return Version(version).release


def check_version(version: str) -> None:
    """Warn of a megatron-core that is newer than ``TABLE``.

    Raises:
        ConfigError: it is older.
    """
    if numbers_of(version) < numbers_of(OLDEST):
        raise ConfigError(
            f"megatron-core {version} is too old: MegatronDPP needs {OLDEST} or newer"
        )
    if numbers_of(version)[:2] > numbers_of(NEWEST) and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"megatron-core {version} is newer than {NEWEST}, the newest that MegatronDPP was "
            "checked against",
            RuntimeWarning,
            stacklevel=2,
        )


VERSION: str = megatron.core.__version__
"""The version of the megatron-core that is imported, whatever is installed beside it."""
check_version(VERSION)


def form_of(key: str, version: str = VERSION) -> PrivateName:
    """The form that a name of ``TABLE`` has in a version of megatron-core.

    Raises:
        KeyError: ``TABLE`` has none.
    """
    for entry in TABLE:
        if entry.key == key and entry.is_of(version):
            return entry
    raise KeyError(f"{key} of megatron-core {version} is not in the table of {__name__}")


def has(key: str, version: str = VERSION) -> bool:
    """True if a version of megatron-core has a name of ``TABLE``; some came after ``OLDEST``."""
    return any(entry.key == key and entry.is_of(version) for entry in TABLE)


@functools.cache
def resolve(key: str) -> tuple[Any, str]:
    """The module or class that holds a name of ``TABLE``, and the name there.

    Raises:
        ConfigError: this megatron-core does not have the name, or with other parameters.
    """
    entry = form_of(key)
    *classes, name = entry.name.split(".")
    expected = f"{entry.module}.{entry.name}"
    try:
        owner: Any = functools.reduce(getattr, classes, importlib.import_module(entry.module))
        value = getattr(owner, name, None) if entry.optional else getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"megatron-core {VERSION} has no {expected}: use a version from {OLDEST} to {NEWEST}"
        ) from error
    if entry.parameters is not None and value is not None:
        found = parameters_of(value)
        if not entry.takes(found):
            raise ConfigError(
                f"megatron-core {VERSION}: {expected} has the parameters ({found}) and not "
                f"({entry.parameters}): use a version from {OLDEST} to {NEWEST}"
            )
    return owner, name


def parameters_of(function: Callable[..., Any]) -> str:
    """A function's parameters as ``TABLE`` has them."""
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    parameters = inspect.signature(function).parameters.values()
    return " ".join(marks.get(parameter.kind, "") + parameter.name for parameter in parameters)


def lookup(key: str) -> Any:
    """The present value of a name of ``TABLE``; errors are those of :func:`resolve`."""
    return getattr(*resolve(key))


def assign(key: str, value: Any) -> None:
    """Give a name of ``TABLE`` another value for good."""
    setattr(*resolve(key), value)


def patched(key: str, wrapper: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let ``wrapper(original, ...)`` answer for a name of ``TABLE`` while the block runs."""
    return replaced(*resolve(key), wrapper)


@contextlib.contextmanager
def replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let ``wrapper(original, ...)`` answer for ``owner.name`` while the block runs; blocks may
    nest.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def te_debugs() -> bool:
    """True if Transformer Engine's debug tools are on, which compute weight gradients within B."""
    return _TE_DEBUGS.partition(":")[0] in sys.modules and bool(lookup(_TE_DEBUGS))


def reset_offload(groups: Any, *, forward_only: bool) -> None:
    """End a step of offloaded activations; 0.20 does so after evaluation, too."""
    reset, takes_group = lookup(OFFLOAD_RESET), form_of(OFFLOAD_RESET).parameters == "process_group"
    if takes_group:
        reset(process_group=groups.tp_dp_cp)
    elif not forward_only:
        reset()


def importers(function: Callable[..., Any], key: str = GET_SCHEDULE) -> list[Any]:
    """The modules that hold ``function`` under the name of ``key``: megatron-core's own, and every
    host's that has imported it by name.
    """
    name = key.partition(":")[2]
    modules = [(module, getattr(module, "__dict__", {})) for module in list(sys.modules.values())]
    return [module for module, names in modules if names.get(name) == function]


def is_multimodule(given: Any) -> bool:
    """True for process groups, or a communicator, of several modules (0.17 and newer)."""
    return given is not None and type(given).__name__.startswith("MultiModule")


def has_multimodule(keywords: dict[str, Any]) -> bool:
    """True if a call of a schedule is one of several modules."""
    return any(is_multimodule(keywords.get(name)) for name in ("pg_collection", "p2p_communicator"))


def default_groups() -> ProcessGroupCollection:
    """megatron-core's global groups, those of ``_GROUPS`` that this version has."""
    known = {field.name for field in dataclasses.fields(ProcessGroupCollection)}
    groups: ProcessGroupCollection = ProcessGroupCollection.use_mpu_process_groups(
        [name for name in _GROUPS if name in known]
    )
    return groups


def group_of(collection: Any, name: str) -> ProcessGroup:
    """A group of megatron-core's ``ProcessGroupCollection``, or the global one where that is None
    or lacks it."""
    group: ProcessGroup | None = getattr(collection, name, None)
    if group is None:
        group = getattr(ProcessGroupCollection.use_mpu_process_groups([name]), name)
    assert group is not None
    return group


def pipeline_size(groups: Any = None) -> int:
    """Ranks of the pipeline, by the given process groups or else megatron-core's own."""
    return group_of(groups, "pp").size()


def listed(given: Any) -> list[Any]:
    """A model chunk or an iterator, or several of them, as a list."""
    return given if isinstance(given, list) else [given]


def config_of(step: Mapping[str, Any]) -> Any:
    """The config of the model in the keywords of a schedule's call."""
    return get_model_config(listed(step["model"])[0])


ORIGINAL = "dpp_original"
"""Attribute of a function in the place of one of megatron-core's schedules: that schedule."""


def static_schedule(original: Callable[..., Any], keywords: dict[str, Any]) -> Callable[..., Any]:
    """megatron-core's own schedule for one call, by its ``get_forward_backward_func``."""
    from megatron.core.pipeline_parallel import schedules

    own: Callable[..., Any] = schedules.forward_backward_pipelining_without_interleaving
    if not has_multimodule(keywords):
        virtual = config_of(keywords).virtual_pipeline_model_parallel_size
        own = original(pipeline_size(keywords.get("pg_collection")), virtual)
    return getattr(own, ORIGINAL, own)


def host_argument(name: str) -> Any:
    """An argument of Megatron-LM's training code; None where the host is another or has none."""
    variables = sys.modules.get("megatron.training.global_vars")
    return getattr(getattr(variables, "_GLOBAL_ARGS", None), name, None)


def longest_length(config: Any) -> int:
    """The sequence length that the host was started with: Megatron-LM's ``seq_length``, or the
    ``seq_length`` of Megatron-Bridge's model; 0 where neither is known.
    """
    of_model = getattr(config, "seq_length", None)
    return max(int(host_argument("seq_length") or 0), of_model if isinstance(of_model, int) else 0)


def host_iteration(otherwise: int) -> int:
    """The number of the host's training step, which a resumed run continues; ``otherwise`` where
    the host is not Megatron-LM's training loop.
    """
    return int(host_argument("curr_iteration") or otherwise)
