"""Entry point of ``pretrain_gpt.py`` and ``pretrain_bert.py``: from command line to exit code.

A launcher that has checked a run hands its settings over in a file (``--run-config``). A
``torchrun`` of one's own gives flags, which each rank checks.

Settings that cannot work are printed once, as one line, and end every rank with exit code 2 before
a process group exists; most are found before PyTorch is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from megatron.dpp.errors import (
    BAD_USAGE,
    INTERRUPTED,
    ConfigError,
    DataError,
    DppError,
    error_line,
    print_error,
    tell_torchrun,
    use_names,
)
from megatron.dpp.locks import lock_directory
from megatron.dpp.naming import in_flags
from megatron.dpp.processes import end_stopped_children, end_with_parent, sigint_held_back
from megatron.dpp_train.options import arguments, run_file
from megatron.dpp_train.options.run_config import RunConfig
from megatron.dpp_train.preflight import check as preflight
from megatron.dpp_train.preflight.files import warnings_of_data, written_directories
from megatron.dpp_train.tokenizers import Tokenizer, tokenizer_for


@use_names(in_flags)
def main(task_name: str, argv: Sequence[str] | None = None) -> int:
    """Trains; returns the process's exit code, also after Ctrl-C at any time.

    Args:
        task_name: ``gpt`` or ``bert``.
        argv: the command line; ``sys.argv`` when None.
    """
    try:
        return _run(task_name, argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        end_stopped_children()


def _run(task_name: str, argv: Sequence[str] | None) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks would outlive a kill -9 of it
        end_with_parent()
    rank, held = 0, contextlib.ExitStack()
    try:
        rank, world_size = arguments.rank_and_world()
        args, tokenizer = _settings(task_name, argv, world_size)
        arguments.check_launcher(world_size)
        if rank == 0:  # at once: the lock is taken only when PyTorch is there
            preflight.check_not_taken(args)
        args = _settled(args)
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        args.dpp.node_ip(rank, world_size, ranks_per_node)
        if rank == 0:
            for flag, folder in written_directories(args):
                lock = held.enter_context(lock_directory(folder, flag))
                if lock.warning:
                    print(f"warning: {lock.warning}", file=sys.stderr, flush=True)
    except (ConfigError, DataError, OSError) as error:
        tell_torchrun(error_line(error), printed=rank == 0)
        if rank == 0:
            print_error(error)
        held.close()
        return BAD_USAGE
    with held:
        return _train(args, task_name, rank, tokenizer)


def _settings(
    task_name: str, argv: Sequence[str] | None, world_size: int
) -> tuple[RunConfig, Tokenizer]:
    """The checked settings, and the tokenizer."""
    words = list(sys.argv[1:] if argv is None else argv)
    if run_file.FLAG not in words:
        return preflight.check(task_name, words, world_size)
    if len(words) != 2 or words[0] != run_file.FLAG:
        raise ConfigError(f"{run_file.FLAG} FILE holds all settings: no other flag goes with it")
    args = run_file.read(words[1], task_name, world_size)
    return args, tokenizer_for(args)


def _train(args: RunConfig, task_name: str, rank: int, tokenizer: Tokenizer) -> int:
    if rank == 0:
        beyond = preflight.tokens_beyond(args, tokenizer)
        lines = [*arguments.warnings_of(args), *warnings_of_data(args, task_name)]
        for line in [*lines, *([beyond] if beyond else [])]:
            print(f"warning: {line}", file=sys.stderr, flush=True)
    try:
        with sigint_held_back():
            from megatron.dpp_train.loop.job import run_job

        run_job(args, task_name, rank, tokenizer)
    except DppError as error:
        return _failed(rank, str(error))
    except (RuntimeError, MemoryError, OSError) as error:
        from megatron.dpp_train import culprits

        said = culprits.find(error)
        if not said:
            raise
        return _failed(rank, said)
    return 0


def _failed(rank: int, said: str) -> int:
    tell_torchrun(error_line(f"rank {rank}: {said}"), printed=True)
    return print_error(f"rank {rank}: {said}")


def _import_without_compiler() -> None:
    """Import megatron-core for a run that compiles nothing. Its decorators would import PyTorch's
    compiler, which takes a second of each rank."""
    import torch

    compiled = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiled


def _settled(args: RunConfig) -> RunConfig:
    """Settles the values that need PyTorch, and lets megatron-core check them."""
    if args.disable_jit_fuser:  # read when PyTorch is imported
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with sigint_held_back():
        if args.disable_jit_fuser or args.device == "cpu":
            _import_without_compiler()
        from megatron.dpp_train.model.configs import check_with_core, settled

    args = settled(args)
    check_with_core(args)
    return args
