"""``install`` and what it passes through, without a process group."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    plugin.uninstall()


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


def test_every_importer_gets_one_schedule_until_uninstall(host: ModuleType) -> None:
    plugin.install()
    for module in (host, schedules, pipeline_parallel):
        get = module.get_forward_backward_func
        assert get is not ORIGINAL
        assert get() is get(2, 3) is get(pp_size=2, vp_size=None, schedule_pg_collection=None)
        assert get() is schedules.get_forward_backward_func()
    plugin.uninstall()
    for module in (host, schedules, pipeline_parallel):
        assert module.get_forward_backward_func is ORIGINAL
    plugin.uninstall()


def test_what_ended_a_block_is_told_and_nothing_is_left_for_the_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    at_exit: list[Any] = []

    def unregister(function: Any) -> None:
        at_exit[:] = [each for each in at_exit if each != function]

    exits = SimpleNamespace(register=at_exit.append, unregister=unregister)
    monkeypatch.setattr(plugin, "atexit", exits)
    monkeypatch.setattr(plugin.Plugin, "leave", lambda self, error: told.append(error))
    with plugin.installed():
        assert len(at_exit) == 1
    assert not at_exit
    error = KeyError("a key of the host")
    with pytest.raises(KeyError), plugin.installed():
        raise error
    assert told == [None, error]


def test_modules_that_are_imported_later_are_covered(host: ModuleType) -> None:
    plugin.install()
    namespace: dict[str, Any] = {}
    exec("from megatron.core.pipeline_parallel import get_forward_backward_func as get", namespace)
    assert namespace["get"]() is host.get_forward_backward_func()


def test_a_second_installation_is_refused() -> None:
    plugin.install()
    with pytest.raises(ConfigError, match=r"^the dynamic pipeline is installed already: call .*$"):
        plugin.install(DppConfig(slots=3))


def test_the_context_manager_uninstalls_after_an_error(host: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError), plugin.installed():
        assert host.get_forward_backward_func is not ORIGINAL
        1 / 0  # noqa: B018
    assert host.get_forward_backward_func is ORIGINAL
    with plugin.installed():
        pass


def test_what_explains_an_error_leaves_nothing_installed(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explains(own: plugin.Plugin, error: BaseException) -> None:
        raise PeerDead("rank 1 died") from error

    monkeypatch.setattr(plugin.Plugin, "leave", explains)
    with pytest.raises(PeerDead, match="rank 1 died"), plugin.installed():
        raise RuntimeError("Connection reset by peer")
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


def test_steps_of_a_host_without_a_count_are_numbered_by_training_steps(
    monkeypatch: pytest.MonkeyPatch, dynamic_calls: list[Any]
) -> None:
    numbers: list[int] = []

    def step(_: Any, number: int, *__: Any) -> contextlib.AbstractContextManager[None]:
        numbers.append(number)
        return contextlib.nullcontext()

    monkeypatch.setattr(plugin.StepTrace, "step", step)
    plugin.install(DppConfig(split_backward="off"))
    for forward_only in (False, True, True, False, False):
        schedules.get_forward_backward_func()(**keywords(forward_only=forward_only))
    assert numbers == [0, 1, 1, 1, 2]


def test_a_nominal_length_needs_the_most_tokens(
    dynamic_calls: list[Any], static_calls: list[Any]
) -> None:
    """verl passes ``seq_length`` 1 and ``micro_batch_size`` 1, and no pipeline sizes."""
    asked = keywords(config={"variable_seq_lengths": True}, seq_length=1)
    plugin.install(DppConfig(split_backward="off", max_tokens=4096))
    assert schedules.get_forward_backward_func()(**asked) == ["dynamic"]


def test_a_length_of_the_host_is_enough(
    dynamic_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM's argument, or the field of Megatron-Bridge's model."""
    plugin.install(DppConfig(split_backward="off"), strict=True)
    run = schedules.get_forward_backward_func()
    config = {"variable_seq_lengths": True}
    run(**keywords(config={**config, "seq_length": 64}, seq_length=1))
    variables = ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = SimpleNamespace(seq_length=64)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    run(**keywords(config=config, seq_length=1))
    assert len(dynamic_calls) == 2


class MultiModuleProcessGroupCollection(SimpleNamespace):
    """Named as megatron-core's."""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline": 1}, "there is one pipeline rank"),
        ({"config": {"overlap_moe_expert_parallel_comm": True}}, "overlap_moe_expert_par"),
        ({"config": {"cuda_graph_impl": "local"}}, "cuda_graph_impl needs meg"),
        ({"config": {"cuda_graph_impl": "full_iteration"}}, "cuda_graph_impl needs meg"),
        ({"config": {"variable_seq_lengths": True}, "seq_length": 1}, "variable_seq_lengths with"),
        ({"config": {"moe_paged_stash": True}}, "moe_paged_stash needs"),
        ({"config": {"gtp_weight_remat_size": 2}}, "gtp_weight_remat_size is 2"),
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


def test_groups_of_several_modules_pass_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups, name = (
        MultiModuleProcessGroupCollection(),
        "forward_backward_pipelining_without_interleaving",
    )
    monkeypatch.setattr(schedules, name, lambda **given: given["pg_collection"])
    plugin.install()
    assert schedules.get_forward_backward_func()(**keywords(pg_collection=groups)) is groups
    assert "those of several modules" in caplog.text


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


def test_several_modules_of_a_host_that_calls_the_schedule_by_its_name_are_seen(
    direct: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Megatron-Bridge's training and evaluation of several modules."""
    groups = MultiModuleProcessGroupCollection()
    plugin.install()
    for _ in range(2):
        assert getattr(direct, WITHOUT)(**keywords(pg_collection=groups)) == ["static"]
    assert caplog.text.count("own schedule runs: its process groups are those of several") == 1
    plugin.uninstall()
    plugin.install(strict=True)
    with pytest.raises(ConfigError, match=r"install.strict=True.: .* those of several modules"):
        getattr(direct, WITHOUT)(**keywords(pg_collection=groups))


@pytest.mark.parametrize("only", [True, False])
def test_one_pipeline_rank_passes_through_once(
    direct: ModuleType, only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's own function runs, and not the one that stands for it."""
    monkeypatch.setattr(plugin.StepTrace, "static_step", lambda *_: contextlib.nullcontext())
    plugin.install(trace=HostTrace(only=True) if only else None)
    assert getattr(direct, WITHOUT)(**keywords(pipeline=1)) == ["static"]


def test_a_host_of_several_modules_gets_the_schedule_of_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        schedules, "get_forward_backward_func", lambda *sizes, **more: (sizes, more)
    )
    monkeypatch.setattr(plugin.compat, "importers", lambda *_: [])
    made = plugin.Plugin(DppConfig(), strict=False, trace=None)
    groups = MultiModuleProcessGroupCollection()
    found = made.get(2, vp_size=3, schedule_pg_collection=groups)
    assert found == ((2,), {"vp_size": 3, "schedule_pg_collection": groups})


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


def test_a_resumed_host_goes_on_with_its_own_step_numbers(
    dynamic_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(DppSchedule, "check", lambda self, **given: None)
    monkeypatch.setattr(DppSchedule, "__call__", lambda self, **_: numbers.append(self.iteration))
    variables = ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = SimpleNamespace(curr_iteration=40)  # type: ignore[attr-defined]
    plugin.install()
    run = schedules.get_forward_backward_func()
    run(**keywords())
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    run(**keywords())
    run(**keywords(forward_only=True))
    assert numbers == [0, 40, 40]


def test_no_two_calls_of_a_host_without_a_count_have_one_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random states and messages of an evaluation are not those of a training step."""
    numbers: list[int] = []

    def call(self: DppSchedule, **_: Any) -> None:
        numbers.append(self.iteration)
        self.iteration += 1

    monkeypatch.setattr(DppSchedule, "check", lambda self, **given: None)
    monkeypatch.setattr(DppSchedule, "__call__", call)
    plugin.install()
    run = schedules.get_forward_backward_func()
    for evaluates in (False, True, False):
        run(**keywords(forward_only=evaluates))
    assert numbers == [0, 1, 2]


def test_an_unknown_policy_is_refused_when_it_is_installed() -> None:
    with pytest.raises(ConfigError, match="policy"):
        plugin.install(DppConfig(policy="no such policy"))
    plugin.install()


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


def test_a_host_that_is_only_traced_gets_its_schedule_for_its_own_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        plugin.compat, "lookup", lambda name: lambda **given: asked.append(given) or "own"
    )
    monkeypatch.setattr(plugin.compat, "importers", lambda *_: [])
    monkeypatch.setattr(plugin.compat, "is_multimodule", lambda groups: False)
    made = plugin.Plugin(DppConfig(), strict=False, trace=SimpleNamespace(only=True))  # type: ignore[arg-type]
    made.get(pp_size=2, schedule_pg_collection="groups")
    made.get(pp_size=2)
    assert asked == [{"pp_size": 2, "schedule_pg_collection": "groups"}, {"pp_size": 2}]
