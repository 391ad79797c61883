"""The masking of BERT's samples: Megatron-LM's by default, or as the flags say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.dpp_train.model import tasks
from megatron.dpp_train.options.arguments import parse_args

DEFAULTS = {"max_ngram": 3, "do_full_word": True, "do_permutation": False,
            "use_longer_ngrams": False, "use_geometric_distribution": False}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("", {}),
        ("--masking-max-ngram 5 --masking-use-longer-ngrams",
         {"max_ngram": 5, "use_longer_ngrams": True}),
        ("--no-masking-do-full-word --masking-do-permutation",
         {"do_full_word": False, "do_permutation": True}),
        ("--masking-use-geometric-distribution", {"use_geometric_distribution": True}),
    ],
)  # fmt: skip
def test_flags_reach_the_data_set(
    monkeypatch: pytest.MonkeyPatch, flags: str, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(tasks, "dataset_values", lambda args, tokenizer: {})
    monkeypatch.setattr(tasks, "BERTMaskedWordPieceDatasetConfig", lambda **given: given)
    run: Any = SimpleNamespace(args=parse_args(flags.split()), tokenizer=None)
    _, config = tasks.bert_datasets(run)
    masking = {n[8:]: v for n, v in config.items() if n.startswith("masking_")}  # type: ignore[attr-defined]
    assert masking == {"probability": 0.15, **DEFAULTS, **changed}
