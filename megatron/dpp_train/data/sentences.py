"""Splits a text into sentences for BERT: NLTK's Punkt model as in Megatron-LM, or a few rules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from megatron.dpp.errors import ConfigError, DataError

Splitter = Callable[[str], list[str]]

SPLITTERS = ("nltk", "rules")
"""Names that ``--sentence-splitter`` accepts."""

# Punkt's running time grows faster than the text; Megatron-LM cuts there, so equal output needs it.
_MAX_CHARACTERS = 1_000_000

_ABBREVIATION_LIST = """
    adj adm adv al approx apr aug ave bros capt cf co col corp dec dept dr e.g ed eds esp est etc
    feb fig figs gen gov hon i.e inc jan jr jul jun lt ltd maj mar messrs mr mrs ms mt no nos nov
    oct op p pp prof rep rev sen sep sept sgt sr st u.k u.s vol vols vs
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_LIST.split())

# A run of terminators, what may close a sentence behind them, and the white space before the next
# one. CJK full stops need no white space. Where a run ends no sentence, no part of it does: without
# the look back each part would be tried, and 40,000 dots would take a minute.
_SENTENCE_END = re.compile(
    r"""(?<![.!?…])(?P<mark>[.!?…]+)[)\]}"'»”’]*(?P<gap>\s+)(?=[("'«“‘\[]*(?P<next>\S))"""
    r"""|(?P<cjk>[。！？]+[」』”’）]*)(?P<cjk_gap>\s*)(?=\S)""",
    re.VERBOSE,
)


def make_splitter(name: str, language: str = "english", *, keep_newlines: bool = False) -> Splitter:
    """Returns a function from a text to its sentences.

    Args:
        name: one of ``SPLITTERS``.
        language: a language of NLTK's Punkt data; the rules know English only.
        keep_newlines: leave the white space behind a sentence in place.

    Raises:
        ConfigError: rules for a language other than English.
        DataError: NLTK or its data is not installed.
    """
    if name == "nltk":
        whole = _nltk_splitter(language, keep_newlines)
    elif language == "english":
        whole = _rules_splitter(keep_newlines)
    else:
        raise ConfigError(
            f"--lang {language}: --sentence-splitter rules knows english only; use nltk"
        )

    def split(text: str) -> list[str]:
        parts = range(0, len(text), _MAX_CHARACTERS)
        return [s for start in parts for s in whole(text[start : start + _MAX_CHARACTERS])]

    return split


def _nltk_splitter(language: str, keep_newlines: bool) -> Splitter:
    remedy = "or choose --sentence-splitter rules, which needs no data"
    try:
        from nltk.tokenize import punkt
    except ImportError as error:
        raise DataError(
            f"--split-sentences needs NLTK, which cannot be imported ({error}): "
            f"pip install nltk (or megatron-dpp[bert]), {remedy}"
        ) from error
    try:
        tokenizer = punkt.PunktTokenizer(language)
    except (LookupError, OSError) as error:
        from nltk import data

        raise DataError(
            f"--split-sentences needs NLTK's Punkt data for {language}, which is in none of "
            f"{', '.join(data.path)}: run 'python -m nltk.downloader punkt_tab' (where there is no "
            "network, copy the folder tokenizers/punkt_tab from a machine that has it, and point "
            f"NLTK_DATA at the folder above tokenizers), {remedy}"
        ) from error

    def split(text: str) -> list[str]:
        if not keep_newlines:
            return list(tokenizer.tokenize(text))
        starts = [start for start, _ in tokenizer.span_tokenize(text)]
        return [text[a:b] for a, b in itertools.pairwise([*starts, len(text)])]

    return split


def _rules_splitter(keep_newlines: bool) -> Splitter:
    def split(text: str) -> list[str]:
        sentences, start = [], 0
        for match in _SENTENCE_END.finditer(text):
            if _ends_sentence(text, match):
                sentences.append(text[start : match.end()])
                start = match.end()
        sentences.append(text[start:])
        if not keep_newlines:
            sentences = [sentence.strip() for sentence in sentences]
        return [sentence for sentence in sentences if sentence.strip()]

    return split


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match["cjk"] or "\n\n" in match["gap"]:
        return True
    if match["next"].islower() or match["mark"] != ".":
        return not match["next"].islower()
    word = re.search(r"\S*$", text[max(0, match.start() - 40) : match.start()])
    last = word[0].lstrip("(\"'«“‘[").lower() if word else ""
    is_initial = len(last) == 1 and last.isalpha()
    return not is_initial and last not in _ABBREVIATIONS
