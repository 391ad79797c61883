"""Private names of ``megatron.training`` that the training scripts step over, in one place.

:func:`mended` lets Megatron's own loop run from megatron-core's wheel, without a network and with
what users type; comments name the files of megatron-core 0.19.2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from megatron.dpp.errors import DataError, one_line

_VOCABULARIES = {
    "GPT2BPETokenizer": "gpt2",
    "BertWordPieceLowerCase": "bert-uncased",
    "BertWordPieceCase": "bert-cased",
}
"""``--tokenizer-type`` -> folder of ``vocabularies/`` that names its class."""


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Step over what keeps Megatron's loop from running out of a wheel, until the block ends."""
    with contextlib.ExitStack() as undo:
        helpers = importlib.import_module("megatron.core.datasets.utils")
        if not Path(helpers.__file__ or "").with_name("Makefile").exists():
            # initialize.py compiles with a Makefile that wheels lack; their helpers are compiled
            undo.enter_context(mock.patch.object(helpers, "compile_helpers", lambda: None))
        undo.enter_context(local_vocabularies())
        undo.enter_context(_given_rates())
        undo.enter_context(no_empty_split())
        loading = "megatron.training.checkpointing.sys"
        undo.enter_context(mock.patch(loading, SimpleNamespace(exit=_not_loaded)))
        if any(word.startswith("--tensorboard-dir") for word in sys.argv):
            undo.enter_context(lossy_curves())
        undo.enter_context(mock.patch.object(argparse.HelpFormatter, "_expand_help", _help_of))
        yield


_expanded = argparse.HelpFormatter._expand_help


def _help_of(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """A flag's help, as it is where argparse cannot fill it in: core/transformer/
    transformer_config.py has a text with a percent sign of its own."""
    try:
        return _expanded(formatter, action)
    except ValueError:
        return action.help or ""


def _not_loaded() -> NoReturn:
    """Fail where training/checkpointing.py ends a run with status 0, for want of a checkpoint."""
    error = sys.exc_info()[1]
    why = one_line(error, 300) if error else "the log says why"
    raise DataError(f"the checkpoint of --load cannot be loaded: {why}") from error


@contextlib.contextmanager
def local_vocabularies() -> Iterator[None]:
    """Tokenizers of ``--vocab-file`` and ``--merge-file`` that ask no hub for their class.

    core/tokenizers/text/libraries/megatron_hf_tokenizer.py asks Hugging Face's hub for ``gpt2`` or
    ``bert-large-uncased`` even where the files are given.
    """
    name = "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer"
    models: dict[str, dict[str, Any]] = importlib.import_module(name).MEGATRON_CONFIG_MAP
    folder = Path(__file__).with_name("vocabularies")
    own = {kind: {"tokenizer_name": str(folder / each)} for kind, each in _VOCABULARIES.items()}
    with mock.patch.dict(models, {kind: models[kind] | own[kind] for kind in own}):
        yield


@contextlib.contextmanager
def lossy_curves() -> Iterator[None]:
    """A directory of TensorBoard that cannot be written any more costs its curves and a warning;
    its writer ends the training."""
    if importlib.util.find_spec("tensorboard") is None:
        yield
        return
    kind = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter

    def lossy(original: Any) -> Any:
        def call(self: Any, *given: Any) -> None:
            try:
                original(self, *given)
            except OSError as error:
                warnings.warn(f"TensorBoard's curves are not written ({error})", stacklevel=2)

        return call

    names = ("write", "flush", "close")
    with mock.patch.multiple(kind, **{name: lossy(getattr(kind, name)) for name in names}):
        yield


@contextlib.contextmanager
def no_empty_split() -> Iterator[None]:
    """A split without documents is a DataError; core/datasets/gpt_dataset.py counts the epochs of
    nothing for ever."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    name = "_get_num_epochs"
    own = getattr(GPTDataset, name)

    def counted(self: Any, tokens: int) -> int:
        if not tokens:
            raise DataError(
                f"--split {self.config.split}: leaves no document for {self.index_split.name}; "
                "add documents, or give that set none (--split 95,5,0)"
            )
        return int(own(self, tokens))

    with mock.patch.object(GPTDataset, name, counted):
        yield


@contextlib.contextmanager
def _given_rates() -> Iterator[None]:
    """With ``--override-opt-param-scheduler``, groups of a checkpoint take this run's ``--lr``.

    core/optimizer/optimizer.py and distrib_optimizer.py find a saved group by its rates, too, and
    fail where a run has others.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer
    from megatron.training import get_args

    rates = {"max_lr", "min_lr"}
    rest = sorted({*optimizer.param_group_identifier_keys} - rates)

    def loads(original: Any) -> Any:
        def load_state_dict(self: Any, state: dict[str, Any]) -> Any:
            saved = state.get("optimizer", state)
            if get_args().override_opt_param_scheduler and "param_groups" in saved:
                now = self.optimizer.param_groups
                for group in saved["param_groups"]:
                    alike = [g for g in now if all(g.get(n) == group.get(n) for n in rest)]
                    if len(alike) == 1:  # several are told apart by their rates alone
                        group.update({n: alike[0][n] for n in rates & alike[0].keys()})
            return original(self, state)

        return load_state_dict

    kinds = (
        optimizer.FP32Optimizer,
        optimizer.Float16OptimizerWithFloat16Params,
        distrib_optimizer.DistributedOptimizer,
    )
    with contextlib.ExitStack() as undo:
        for kind in kinds:
            wrapped = loads(kind.load_state_dict)
            undo.enter_context(mock.patch.object(kind, "load_state_dict", wrapped))
        yield
