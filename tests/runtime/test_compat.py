"""The table of megatron-core's private names, against the installed version and other sources."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import os
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron.dpp.core import compat, cpu
from megatron.dpp.core.compat import TABLE, PrivateName, check_version, form_of
from megatron.dpp.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "megatron" / "dpp" / "core"
SOURCES = Path(os.environ.get("DPP_MEGATRON_SOURCES", ROOT.parent / "shared" / "megatron-lm"))
"""Archives ``NAME.tar.xz`` of Megatron-LM, each with a folder ``NAME/megatron/core``."""

Read = Callable[[str], str | None]
"""Text of a file under ``megatron/core``; None if there is none."""


def keys_of(version: str) -> list[str]:
    """The keys of the names that a version has."""
    return sorted({entry.key for entry in TABLE if entry.is_of(version)})


def test_the_installed_version_has_every_name_as_the_table_says() -> None:
    assert megatron.core.__version__ == compat.VERSION
    engine = ("transformer_engine", "transformer_engine.pytorch")
    has_engine = all(importlib.util.find_spec(name) for name in engine)
    folder = Path(megatron.core.__path__[0])

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    of_core = [key for key in keys_of(compat.VERSION) if key not in compat.TRAINING]
    forms = [form_of(key) for key in of_core]  # tests/metrics runs the others
    for form in forms:
        of_engine = form.module.startswith("transformer_engine")
        if ("." not in form.name or form.parameters is not None) and (has_engine or not of_engine):
            compat.resolve(form.key)
    assert [text for form in forms if (text := fault(read, form))] == []


def test_a_parameter_that_only_the_development_branch_has_may_be_missing() -> None:
    """``_set_all_rng_states`` of Megatron-LM's dev has one more, under a version of main's."""
    entry = form_of("tensor_parallel.random:_set_all_rng_states")
    states = "cpu_rng_state cuda_rng_state cuda_rng_state_tracker"
    assert entry.takes(states) and entry.takes(f"{states} kind")
    assert not entry.takes(f"{states} other") and not entry.takes("kind")


@pytest.mark.parametrize("archive", sorted(SOURCES.glob("*.tar.xz")) or [None])
def test_other_versions_have_every_name_as_the_table_says(archive: Path | None) -> None:
    if archive is None:
        pytest.skip(f"no *.tar.xz of Megatron-LM in {SOURCES} (DPP_MEGATRON_SOURCES)")
    texts = dict(core_files(archive))
    numbers = dict(
        line.split(" = ") for line in texts["package_info.py"].splitlines() if " = " in line
    )
    version = ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))
    forms = [form_of(key, version) for key in keys_of(version)]
    assert [text for form in forms if (text := fault(texts.get, form))] == []


def core_files(archive: Path) -> Iterator[tuple[str, str]]:
    """The sources in an archive by their paths under ``megatron/core``."""
    wanted = {path for entry in TABLE for path in paths_of(entry.module)} | {"package_info.py"}
    wanted |= {"utils.py", "optimizer/clip_grads.py", "transformer/moe/moe_utils.py"}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = "/".join(PurePosixPath(member.name).parts[3:])
            if path in wanted and PurePosixPath(member.name).parts[1:3] == ("megatron", "core"):
                file = tar.extractfile(member)
                assert file is not None
                yield path, file.read().decode()


def paths_of(module: str) -> tuple[str, str]:
    path = module.removeprefix("megatron.core").lstrip(".").replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def fault(read: Read, entry: PrivateName) -> str | None:
    """The difference between an entry and the sources, without running them."""
    if not entry.module.startswith("megatron.core"):
        return None
    what = f"{entry.module}.{entry.name}"
    found = definition(read, entry.module, entry.name)
    if found is None:
        return f"{what} is missing"
    if entry.parameters is None:
        return None
    if not isinstance(found, ast.FunctionDef):
        return f"{what} is no function"
    own = found.args
    names = [arg.arg for arg in own.posonlyargs + own.args]
    names += [f"*{own.vararg.arg}"] if own.vararg else []
    names += [arg.arg for arg in own.kwonlyargs]
    names += [f"**{own.kwarg.arg}"] if own.kwarg else []
    return (
        None if entry.takes(" ".join(names)) else f"{what} has the parameters ({' '.join(names)})"
    )


@functools.lru_cache(maxsize=32)
def parsed(text: str) -> ast.Module:
    """A source, which many entries ask for one after the other."""
    return ast.parse(text)


def definition(read: Read, module: str, name: str) -> ast.AST | None:
    """The definition of a module's name; follows imports within megatron-core."""
    text = next((text for path in paths_of(module) if (text := read(path)) is not None), None)
    if text is None:
        return None
    body = list(statements(parsed(text).body))
    *classes, last = name.split(".")
    for each in classes:
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == each]
        if not found:
            return None
        body = list(statements(found[0].body))
        body += [node for method in body for node in ast.walk(method) if node is not method]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {ast.unparse(each) for target in targets for each in ast.walk(target)}
            if {last, f"self.{last}"} & names:
                return node
        if isinstance(node, ast.Import | ast.ImportFrom) and not classes:
            for alias in node.names:
                if (alias.asname or alias.name) == last:
                    return imported(read, module, node, alias.name) or node
    return None


def imported(
    read: Read, module: str, node: ast.Import | ast.ImportFrom, name: str
) -> ast.AST | None:
    if not isinstance(node, ast.ImportFrom):
        return None
    above = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
    origin = f"{above}{node.module}"
    return definition(read, origin, name) if origin.startswith("megatron.core") else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, those inside of ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements(node.body + node.orelse)
        if isinstance(node, ast.Try):
            handlers = [inner for handler in node.handlers for inner in handler.body]
            yield from statements(node.body + handlers + node.orelse)


def test_every_entry_is_needed() -> None:
    """Code names it, or a constant beside the table does."""
    found = [path for room in ("megatron", "profiling") for path in (ROOT / room).rglob("*.py")]
    files = {*found} - {CORE / "compat.py"}
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    constants = {each for each in vars(compat).values() if isinstance(each, str)}
    known = {*constants, *compat.DIRECT_SCHEDULES, *compat.TRAINING}
    for entry in TABLE:
        last = entry.key.rpartition(":")[2].rpartition(".")[2]
        assert last in text or entry.key in known, entry.key


def test_forms_of_one_name_follow_each_other() -> None:
    """One ends with the first release that has the next. Some came with newer versions."""
    for key in {entry.key for entry in TABLE}:
        forms = [entry for entry in TABLE if entry.key == key]
        assert compat.has(key, forms[0].since) and not forms[-1].until
        for one, other in itertools.pairwise(forms):
            assert one.until == other.since
            assert form_of(key, one.until) is not one and form_of(key, one.since) is one
    later = {entry.key for entry in TABLE} - set(keys_of(compat.OLDEST))
    assert later == {"optimizer.clip_grads:multi_tensor_scale_tensor_impl"}
    assert all(compat.has(key, "0.17.0") and not compat.has(key, "0.16.1") for key in later)
    with pytest.raises(KeyError, match="not in the table"):
        compat.lookup("pipeline_parallel.schedules:_nonsense")


@pytest.mark.parametrize("version", ["0.15.3", "0.9.0rc1"])
def test_an_old_version_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(ConfigError, match=f"^megatron-core {version} is too old: .*0.16.0.*$"):
        check_version(version)


def test_a_newer_version_is_accepted_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(RuntimeWarning, match=r"0\.21\.0 is newer than 0\.20"):
        check_version("0.21.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("0.16.0rc0", "0.16.1", "0.17.0rc0", "0.20.5+local"):
            check_version(version)


def test_a_changed_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    key = "pipeline_parallel.schedules:forward_step"
    monkeypatch.setattr(schedules, "forward_step", lambda step, data: None)
    compat.resolve.cache_clear()
    with pytest.raises(ConfigError, match=r"schedules\.forward_step has the parameters \(step d"):
        compat.lookup(key)
    monkeypatch.delattr(schedules, "forward_step")
    with pytest.raises(ConfigError, match=r"has no megatron\.core\..*schedules\.forward_step"):
        compat.lookup(key)


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("takes_group", [True, False])
def test_offloaded_activations_are_reset_as_the_version_does(
    takes_group: bool, forward_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(compat, "lookup", lambda key: lambda **given: told.append(given))
    form = SimpleNamespace(parameters="process_group" if takes_group else "")
    monkeypatch.setattr(compat, "form_of", lambda key: form)
    compat.reset_offload(SimpleNamespace(tp_dp_cp="group"), forward_only=forward_only)
    usual: list[dict[str, Any]] = [] if forward_only else [{}]
    assert told == ([{"process_group": "group"}] if takes_group else usual)


def test_a_hosts_own_numbers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed host goes on with its iteration, whatever was counted here."""
    name = "megatron.training.global_vars"
    monkeypatch.delitem(sys.modules, name, raising=False)
    model: Any = SimpleNamespace(seq_length=6)
    assert compat.host_iteration(3) == 3
    assert compat.longest_length(model) == 6 and compat.longest_length(SimpleNamespace()) == 0
    args = SimpleNamespace(curr_iteration=70, seq_length=40)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_GLOBAL_ARGS=args))
    assert compat.host_iteration(3) == 70
    assert compat.longest_length(model) == 40
    args.seq_length, args.curr_iteration = 4, None
    assert compat.longest_length(model) == 6 and compat.host_iteration(3) == 3


def test_the_pipeline_of_a_call_chooses_its_static_schedule() -> None:
    """By the call's own groups, not by those of the process."""
    asked: list[tuple[Any, ...]] = []
    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(virtual_pipeline_model_parallel_size=3)
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4))
    compat.static_schedule(
        lambda *given: asked.append(given) or print, {"model": [chunk], "pg_collection": groups}
    )
    assert asked == [(4, 3)]


def test_what_experts_make_once_per_process_on_the_cpu_is_gone_after_it() -> None:
    """A model on a GPU after it takes a stream of its own."""
    dispatcher: Any = MoEAlltoAllTokenDispatcher
    before = dispatcher.cuda_dtoh_stream
    with contextlib.closing(cpu.install()):
        assert dispatcher.cuda_dtoh_stream is None
        dispatcher.cuda_dtoh_stream = torch.cuda.Stream()
    assert dispatcher.cuda_dtoh_stream is before


def test_kernels_of_transformer_engine_and_apex_are_not_used_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core binds them where they are installed; they want a GPU."""
    names = cpu.without_kernels()
    for name in names:
        monkeypatch.setattr(*compat.resolve(name), "a kernel", raising=False)
    with contextlib.closing(cpu.install()):
        assert {name: compat.lookup(name) for name in names} == names
    assert {compat.lookup(name) for name in names} == {"a kernel"}
