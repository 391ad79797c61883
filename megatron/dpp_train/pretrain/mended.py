"""Private names of ``megatron.training`` that the training scripts step over, in one place.

:func:`mended` lets Megatron's own loop run from megatron-core's wheel, without a network and with
what users type; comments name the files of megatron-core 0.19.2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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


@contextlib.contextmanager
def local_vocabularies() -> Iterator[None]:
    """Tokenizers of ``--vocab-file`` and ``--merge-file`` that ask no hub for their class.

    core/tokenizers/text/libraries/megatron_hf_tokenizer.py asks Hugging Face's hub for ``gpt2`` or
    ``bert-large-uncased`` even where the files are given.
    """
    name = "megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer"
    models: dict[str, dict[str, Any]] = importlib.import_module(name).MEGATRON_CONFIG_MAP
    with contextlib.ExitStack() as undo:
        for kind, folder in _VOCABULARIES.items():
            path = str(Path(__file__).with_name("vocabularies") / folder)
            undo.enter_context(mock.patch.dict(models[kind], tokenizer_name=path))
        yield
