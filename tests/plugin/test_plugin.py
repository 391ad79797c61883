"""``install`` and what it passes through, without a process group."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pipeline_parallel = pytest.importorskip("megatron.core.pipeline_parallel")

from megatron.core.pipeline_parallel import schedules  # noqa: E402

from megatron.dpp import DppConfig, plugin  # noqa: E402
from megatron.dpp.errors import ConfigError, PeerDead  # noqa: E402
from megatron.dpp.runtime.dynamic import DppSchedule  # noqa: E402
from megatron.dpp.trace.host import HostTrace  # noqa: E402
from tests.runtime.test_step_call import FakeGroup  # noqa: E402

WITHOUT = "forward_backward_pipelining_without_interleaving"
ORIGINAL = schedules.get_forward_backward_func


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a host that has imported the function by name."""
    module = ModuleType("some_host.training")
    module.get_forward_backward_func = ORIGINAL  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def keywords(pipeline: int = 2, **changes: Any) -> dict[str, Any]:
    """A call of a schedule; ``config`` holds settings of its model."""
    sizes = {"pp": pipeline, "tp": 1, "cp": 1, "dp_cp": 1}
    config = {
        "virtual_pipeline_model_parallel_size": None, "sequence_parallel": False,
        "fp32_residual_connection": False, "pipeline_dtype": torch.float32, "hidden_size": 4,
        "enable_autocast": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "moe_input_jitter_eps": None, "moe_router_force_load_balancing": False,
        **changes.pop("config", {}),
    }  # fmt: skip
    chunk = torch.nn.Linear(4, 4)
    chunk.config = SimpleNamespace(**config)  # type: ignore[assignment]
    groups = SimpleNamespace(**{name: FakeGroup(size) for name, size in sizes.items()})
    return {
        "forward_step_func": None, "data_iterator": iter(()), "model": chunk,
        "num_microbatches": 3, "seq_length": 8, "micro_batch_size": 1, "pg_collection": groups,
        **changes,
    }  # fmt: skip


def with_arguments(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """Megatron-LM's arguments."""
    variables = ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = SimpleNamespace(**given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, variables.__name__, variables)


def test_every_importer_gets_one_schedule_until_uninstall(host: ModuleType) -> None:
    """Those of modules that are imported later, too."""
    plugin.install()
    later: dict[str, Any] = {}
    exec("from megatron.core.pipeline_parallel import get_forward_backward_func as get", later)
    for module in (host, schedules, pipeline_parallel):
        get = module.get_forward_backward_func
        assert get is not ORIGINAL
        assert get() is get(2, 3) is get(pp_size=2, vp_size=None, schedule_pg_collection=None)
        assert get() is schedules.get_forward_backward_func() is later["get"]()
    with pytest.raises(ConfigError, match=r"^the dynamic pipeline is installed already: call .*$"):
        plugin.install(DppConfig(slots=3))
    plugin.uninstall()
    for module in (host, schedules, pipeline_parallel):
        assert module.get_forward_backward_func is ORIGINAL
    plugin.uninstall()
    with pytest.raises(ConfigError, match="policy"):
        plugin.install(DppConfig(policy="no such policy"))
    plugin.install()


@pytest.mark.parametrize("explains", [True, False])
def test_what_ended_a_block_is_told_and_nothing_is_left(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch, explains: bool
) -> None:
    """Nor for the exit of the process, also where another error explains it."""
    told: list[Any] = []
    at_exit: list[Any] = []

    def unregister(function: Any) -> None:
        at_exit[:] = [each for each in at_exit if each != function]

    def leave(own: plugin.Plugin, error: BaseException | None) -> None:
        told.append(error)
        if explains and error is not None:
            raise PeerDead("rank 1 died") from error

    exits = SimpleNamespace(register=at_exit.append, unregister=unregister)
    monkeypatch.setattr(plugin, "atexit", exits)
    monkeypatch.setattr(plugin.Plugin, "leave", leave)
    with plugin.installed():
        assert len(at_exit) == 1 and host.get_forward_backward_func is not ORIGINAL
    error = RuntimeError("Connection reset by peer")
    with pytest.raises(PeerDead if explains else RuntimeError), plugin.installed():
        raise error
    assert told == [None, error] and not at_exit
    assert host.get_forward_backward_func is ORIGINAL


def test_a_pipeline_runs_dynamically(
    dynamic_calls: list[dict[str, Any]], static_calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    plugin.install(DppConfig(split_backward="off"))
    run = schedules.get_forward_backward_func()
    asked = keywords(forward_only=True, p2p_communicator=SimpleNamespace())
    assert run(**asked) == run(**asked) == ["dynamic"]
    assert dynamic_calls == [asked, asked] and not static_calls
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "p2p_communicator is not used" in lines[0]


def test_the_calls_of_nemo_and_verl_are_covered(dynamic_calls: list[dict[str, Any]]) -> None:
    """NeMo 2.4.0 imports at each step, verl 0.9.1 by name at the start; neither gives sizes."""
    verl = ModuleType("verl.workers.engine.megatron.transformer_impl")
    exec("from megatron.core.pipeline_parallel import get_forward_backward_func", verl.__dict__)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, verl.__name__, verl)
        plugin.install(DppConfig(split_backward="off", max_tokens=64), strict=True)
    namespace: dict[str, Any] = {}
    exec(
        "from megatron.core.pipeline_parallel.schedules import get_forward_backward_func", namespace
    )
    nemo = keywords(decoder_seq_length=None, adjust_tensor_shapes_fn=None, forward_only=False)
    for get, asked in (
        (namespace["get_forward_backward_func"], nemo),
        (verl.get_forward_backward_func, keywords(seq_length=1, forward_only=True)),
    ):
        assert get()(**asked) == ["dynamic"] and dynamic_calls[-1] == asked


@pytest.mark.parametrize(
    ("task_rng", "line"), [(True, "A run repeats itself"), (False, "No run can be repeated")]
)
def test_dropout_is_named_once(
    dynamic_calls: list[Any], caplog: pytest.LogCaptureFixture, task_rng: bool, line: str
) -> None:
    plugin.install(DppConfig(split_backward="off", task_rng=task_rng))
    run = schedules.get_forward_backward_func()
    run(**keywords())
    assert not caplog.records
    asked = keywords(config={"hidden_dropout": 0.1})
    assert run(**asked) == run(**asked) == ["dynamic"]
    (record,) = caplog.records
    assert line in record.getMessage()


@pytest.mark.parametrize(
    ("config", "arguments", "max_tokens", "runs"),
    [
        ({}, {}, 0, False),
        ({}, {}, 4096, True),  # verl, which gives no pipeline sizes
        ({"seq_length": 64}, {}, 0, True),  # the field of Megatron-Bridge's model
        ({}, {"seq_length": 64}, 0, True),  # Megatron-LM's argument
    ],
)
def test_a_nominal_length_needs_the_most_tokens_or_a_length_of_the_host(
    dynamic_calls: list[Any], static_calls: list[Any], monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any], arguments: dict[str, Any], max_tokens: int, runs: bool,
) -> None:  # fmt: skip
    with_arguments(monkeypatch, **arguments)
    plugin.install(DppConfig(split_backward="off", max_tokens=max_tokens))
    asked = keywords(config={"variable_seq_lengths": True, **config}, seq_length=1)
    assert schedules.get_forward_backward_func()(**asked) == ["dynamic" if runs else "static"]


class MultiModuleProcessGroupCollection(SimpleNamespace):
    """Named as megatron-core's."""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline": 1}, "there is one pipeline rank"),
        ({"config": {"overlap_moe_expert_parallel_comm": True}}, "overlap_moe_expert_par"),
        ({"config": {"cuda_graph_impl": "local"}}, "cuda_graph_impl='local' needs meg"),
        ({"config": {"variable_seq_lengths": True}, "seq_length": 1}, "variable_seq_lengths with"),
        ({"config": {"moe_paged_stash": True}}, "moe_paged_stash=True needs"),
        ({"some_new_keyword": 1}, "some_new_keyword: megatron-core .* passes this"),
        ({"config": {"virtual_pipeline_model_parallel_size": 2}}, "model: 1 chunks were given"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_runs_statically_after_one_line(
    changes: dict[str, Any], reason: str,
    dynamic_calls: list[Any], static_calls: list[Any], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    asked = keywords(**{"forward_only": True, **changes})
    plugin.install()
    run = schedules.get_forward_backward_func()
    assert run(**asked) == run(**asked) == ["static"] and not dynamic_calls
    virtual = asked["model"].config.virtual_pipeline_model_parallel_size
    assert static_calls == 2 * [(asked["pg_collection"].pp.size(), virtual, asked)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.getMessage()
    assert record.getMessage().startswith(
        "dynamic pipeline: not used, megatron-core's own schedule runs: "
    )
    assert re.search(reason, record.getMessage())
    plugin.uninstall()
    plugin.install(strict=True)
    with pytest.raises(ConfigError, match=rf"^install.strict=True.: .*: {reason}"):
        schedules.get_forward_backward_func()(**asked)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a host that calls megatron-core's schedule by its name."""
    monkeypatch.setattr(schedules, WITHOUT, lambda **given: ["static"])
    module = ModuleType("some_host.evaluation")
    setattr(module, WITHOUT, getattr(schedules, WITHOUT))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_schedule_that_a_host_calls_by_its_name_is_run_dynamically(
    direct: ModuleType, dynamic_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DppSchedule, "check", lambda self, **given: None)
    own = getattr(schedules, WITHOUT)
    plugin.install(strict=True)
    for module in (direct, schedules):
        assert getattr(module, WITHOUT)(**keywords()) == ["dynamic"]
    assert len(dynamic_calls) == 2
    plugin.uninstall()
    assert getattr(direct, WITHOUT) is getattr(schedules, WITHOUT) is own


@pytest.mark.parametrize("by_name", [True, False])
def test_groups_of_several_modules_pass_through(
    direct: ModuleType, caplog: pytest.LogCaptureFixture, by_name: bool
) -> None:
    """As in Megatron-Bridge's training and evaluation, which call the schedule by its name."""
    asked = keywords(pg_collection=MultiModuleProcessGroupCollection())

    def run() -> Any:
        own = getattr(direct, WITHOUT) if by_name else schedules.get_forward_backward_func()
        return own(**asked)

    plugin.install()
    for _ in range(2):
        assert run() == ["static"]
    assert caplog.text.count("own schedule runs: its process groups are those of several") == 1
    plugin.uninstall()
    plugin.install(strict=True)
    with pytest.raises(ConfigError, match=r"install.strict=True.: .* those of several modules"):
        run()


@pytest.mark.parametrize("only", [True, False])
def test_one_pipeline_rank_passes_through_once(
    direct: ModuleType, only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own function runs, and not the one that stands for it."""
    monkeypatch.setattr(plugin.StepTrace, "static_step", lambda *_: contextlib.nullcontext())
    plugin.install(trace=HostTrace(only=True) if only else None)
    assert getattr(direct, WITHOUT)(**keywords(pipeline=1)) == ["static"]


def test_a_host_that_passes_through_gets_the_schedule_of_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of several modules, or one that is only traced."""
    asked: list[Any] = []
    monkeypatch.setattr(
        plugin.compat, "lookup", lambda name: lambda *sizes, **more: asked.append((sizes, more))
    )
    monkeypatch.setattr(plugin.compat, "importers", lambda *_: [])
    groups = MultiModuleProcessGroupCollection()
    plugin.Plugin(DppConfig(), strict=False, trace=None).get(
        2, vp_size=3, schedule_pg_collection=groups
    )
    traced = plugin.Plugin(DppConfig(), strict=False, trace=HostTrace(only=True))
    traced.get(pp_size=2, schedule_pg_collection="groups")
    traced.get(pp_size=2)
    assert asked == [
        ((2,), {"vp_size": 3, "schedule_pg_collection": groups}),
        ((), {"pp_size": 2, "schedule_pg_collection": "groups"}), ((), {"pp_size": 2}),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [None, KeyError("a key of the host")])
def test_the_trace_ends_with_the_installation(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Before the links close, whose failure may end the process."""
    ended: list[str] = []
    monkeypatch.setattr(plugin.StepTrace, "close", lambda self: ended.append("trace"))
    monkeypatch.setattr(DppSchedule, "__exit__", lambda self, kind, *_: ended.append(str(kind)))
    monkeypatch.setattr(DppSchedule, "check", lambda self, **given: None)
    monkeypatch.setattr(DppSchedule, "__call__", lambda self, **given: [])
    with contextlib.suppress(KeyError), plugin.installed():
        schedules.get_forward_backward_func()(**keywords())
        if error is not None:
            raise error
    assert ended == ["trace", str(type(error) if error else None)]


@pytest.mark.parametrize(
    ("host", "calls", "traced"),
    [
        (None, [0, 1, 2, 3, 4], [0, 1, 1, 1, 2]),
        (40, [40, 41, 42, 40, 40], [40] * 5),
    ],
)
def test_steps_have_the_hosts_numbers_or_are_counted(
    monkeypatch: pytest.MonkeyPatch, host: int | None, calls: list[int], traced: list[int]
) -> None:
    """A resumed host goes on with its own. Of a host without a count no two calls have one number,
    as random states and messages of an evaluation are not those of a training step; its trace
    counts training steps.
    """
    told: dict[str, list[int]] = {"calls": [], "traced": []}

    def call(self: DppSchedule, **_: Any) -> None:
        told["calls"].append(self.iteration)
        self.iteration += 1

    def step(_: Any, number: int, *__: Any) -> contextlib.AbstractContextManager[None]:
        told["traced"].append(number)
        return contextlib.nullcontext()

    monkeypatch.setattr(DppSchedule, "check", lambda self, **given: None)
    monkeypatch.setattr(DppSchedule, "__call__", call)
    monkeypatch.setattr(plugin.StepTrace, "step", step)
    with_arguments(monkeypatch, **({"curr_iteration": host} if host else {}))
    plugin.install()
    for forward_only in (False, True, True, False, False):
        schedules.get_forward_backward_func()(**keywords(forward_only=forward_only))
    assert told == {"calls": calls, "traced": traced}


@pytest.mark.parametrize(("rank", "told"), [("0", 1), ("3", 0)])
def test_one_rank_says_a_line_once(
    rank: str, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings of the schedule, too."""
    monkeypatch.setenv("RANK", rank)
    warned: list[Any] = []

    class Schedule:
        def __init__(self, config: Any, *, log: Any, warn: Any) -> None:
            warned.append(warn)

        def check(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(plugin, "DppSchedule", Schedule)
    made: Any = plugin.Plugin(DppConfig(), strict=False, trace=None)
    try:
        assert made._why_not(keywords()) is None
        for _ in range(2):
            warned[0]("slow links")
        assert [each.getMessage() for each in caplog.records] == ["slow links"] * told
    finally:
        made.remove()
