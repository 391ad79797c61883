"""Sentence splitting: where the rules cut, and that nothing is lost."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.data.sentences import make_splitter

CASES = {
    "One. Two.": ["One.", "Two."],
    "Is it? It is! Good.": ["Is it?", "It is!", "Good."],
    "Dr. Ada met Mr. Bela. They talked.": ["Dr. Ada met Mr. Bela.", "They talked."],
    "J. R. Smith came. He left.": ["J. R. Smith came.", "He left."],
    "It costs 3.14 at 7:45 p.m. or so. Buy it.": ["It costs 3.14 at 7:45 p.m. or so.", "Buy it."],
    '"Come in." She came.': ['"Come in."', "She came."],
    '"Sit!" said she. He sat.': ['"Sit!" said she.', "He sat."],
    "Wait... What? No.": ["Wait...", "What?", "No."],
    "一。二！三": ["一。", "二！", "三"],
    "no end": ["no end"],
    "Heading of St.\n\nA new paragraph.": ["Heading of St.", "A new paragraph."],
    "": [],
    " \n ": [],
}


@pytest.mark.parametrize("text", CASES)
def test_rules_cut_where_a_reader_would(text: str) -> None:
    assert make_splitter("rules")(text) == CASES[text]


@given(st.text(alphabet='aB. !?"\n。3'))
def test_rules_lose_nothing_but_white_space(text: str) -> None:
    joined = "".join(make_splitter("rules")(text))
    assert "".join(joined.split()) == "".join(text.split())


@pytest.mark.parametrize("text", ["." * 100_000, ".)" * 50_000, "." + ")" * 100_000])
def test_runs_of_marks_take_no_minutes(text: str) -> None:
    """Each part of a run was tried: 40,000 dots took a minute."""
    begin = time.process_time()
    assert make_splitter("rules")(f"One. {text}") == ["One.", text]
    assert time.process_time() - begin < 30


@given(st.text(alphabet='aB. !?"\n。3'))
def test_kept_newlines_are_all_there(text: str) -> None:
    assert "".join(make_splitter("rules", keep_newlines=True)(text)).strip() == text.strip()


def test_rules_know_english() -> None:
    with pytest.raises(ConfigError, match="--lang german"):
        make_splitter("rules", "german")


def test_without_nltk_both_ways_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk", None)
    monkeypatch.setitem(sys.modules, "nltk.tokenize", None)
    with pytest.raises(DataError, match=r"pip install nltk \(or .*\), or choose --sentence-split"):
        make_splitter("nltk")


def test_missing_punkt_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pytest.importorskip("nltk").data
    monkeypatch.setattr(data, "path", [str(tmp_path / "nowhere")])
    with pytest.raises(DataError) as said:
        make_splitter("nltk")
    for part in ("Punkt data", str(tmp_path / "nowhere"), "nltk.downloader punkt_tab", "rules"):
        assert part in str(said.value)
