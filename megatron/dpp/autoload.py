"""Brings the dynamic pipeline into worker processes that a host starts.

The import of this module is enough where ``USE_DPP=1`` (or ``DPP_TRACE_ONLY=1``) is set: the first
schedule that a process asks megatron-core for installs :mod:`megatron.dpp.plugin`, with the
settings of ``DPP_*``. A process that asks for none loads neither PyTorch nor megatron-core for it.
``docs/plugin.md`` has the variable or line by which each host imports a module;
``megatron-dpp doctor --enable-plugin`` serves a host that has none.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from megatron.dpp import run
from megatron.dpp.errors import ConfigError, said

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_NAMES = (
    "get_forward_backward_func",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds megatron-core's schedules once, and defers them when they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _SCHEDULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def load(module: ModuleType) -> None:
                own(module)
                _Deferred(module)

            spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


class _Deferred:
    """Functions that stand for megatron-core's schedules until the first of them is called."""

    def __init__(self, module: ModuleType) -> None:
        self._own = {name: getattr(module, name) for name in _NAMES}
        self._stand_ins = {name: self._stand_in(name) for name in _NAMES}
        self._put(self._own, self._stand_ins)

    def _stand_in(self, name: str) -> Callable[..., Any]:
        @functools.wraps(self._own[name])
        def first(*args: Any, **keywords: Any) -> Any:
            self._put(self._stand_ins, self._own)
            install_by_variables()
            return getattr(sys.modules[_SCHEDULES], name)(*args, **keywords)

        return first

    @staticmethod
    def _put(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            for name in _NAMES:
                if names.get(name) is before[name]:
                    setattr(module, name, after[name])


def install_by_variables(max_tokens: int = 0) -> None:
    """Install the plugin with the settings of ``DPP_*``, and with this bound of a microbatch where
    they give none. An installation that exists stays.

    Raises:
        ConfigError: a setting that cannot be, by its variable.
    """
    from megatron.dpp import plugin
    from megatron.dpp.plugin_lengths import packed_lengths

    naming = run.naming_of((), os.environ)
    words = () if run.is_on("DPP_TRACE_ONLY", os.environ) else ("--use-dpp",)
    given, _ = run.take_flags(words, os.environ)
    given.dpp_max_tokens = given.dpp_max_tokens or max_tokens
    if plugin.is_installed():
        return
    lengths = packed_lengths if run.is_on("DPP_ANNOUNCE", os.environ) else None
    try:
        plugin.install(**run.plugin_arguments(given, naming), lengths=lengths)
    except ConfigError as error:
        raise ConfigError(said(error, naming)) from error


def megatron_init(args: Any) -> None:
    """Install the plugin in an actor of slime's or miles', which call this by
    ``--custom-megatron-init-path megatron.dpp.autoload.megatron_init``.

    Args:
        args: the host's. The bound of a microbatch is its ``max_tokens_per_gpu`` for each
            context-parallel rank, unless ``DPP_MAX_TOKENS`` gives one.
    """
    most = getattr(args, "max_tokens_per_gpu", None)
    if run.is_on("USE_DPP", os.environ, otherwise=True):
        install_by_variables(most * args.context_parallel_size if most else 0)


if any(run.is_on(name, os.environ) for name in ("USE_DPP", "DPP_TRACE_ONLY")):
    if _SCHEDULES in sys.modules:
        _Deferred(sys.modules[_SCHEDULES])
    else:
        sys.meta_path.insert(0, _Finder())
