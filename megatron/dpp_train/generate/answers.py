"""Answers to prompts, in batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron.dpp.errors import DataError
from megatron.dpp_train.generate.engine import Engine, Tokens
from megatron.dpp_train.generate.sampling import Chooser, Sampling


@dataclass
class Answer:
    """The tokens of one answer, without the one that ends it.

    Attributes:
        finish: ``stop`` at a token that ends texts, ``length`` where there was no more room.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str = "length"


def check_lengths(prompts: Sequence[Tokens], positions: int) -> None:
    """Refuse prompts without a token, and such that leave no room for an answer (DataError)."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise DataError(f"prompt {number}: empty; the model needs at least one token")
        if len(prompt) >= positions:
            raise DataError(
                f"prompt {number}: {len(prompt)} tokens, and the model has {positions} positions, "
                "of which the answer needs one; shorten it"
            )


def generate(
    engine: Engine,
    prompts: Sequence[Tokens],
    *,
    most: int,
    ends: frozenset[int],
    sampling: Sampling,
    batch_size: int,
) -> Iterator[Answer]:
    """The answers to ``prompts``, in their order.

    Args:
        most: tokens of an answer, at least 1; fewer where the model's positions end.
        ends: tokens that end an answer.
        batch_size: prompts that are answered together, at least 1.

    Raises:
        ConfigError: the device has no memory for a batch.
        DataError: a prompt is too long or empty.
    """
    check_lengths(prompts, engine.positions)
    numbered = iter(enumerate(prompts))
    while batch := dict(itertools.islice(numbered, batch_size)):
        yield from _answers(engine, batch, most, ends, sampling)


def _answers(
    engine: Engine, batch: dict[int, Tokens], most: int, ends: frozenset[int], sampling: Sampling
) -> list[Answer]:
    """The answers to some prompts by number; a sequence leaves the batch when its answer ends."""
    answers = {number: Answer() for number in batch}
    room = {number: min(most, engine.positions - len(each)) for number, each in batch.items()}
    chooser = Chooser(sampling, list(batch))
    longest = max(len(each) + room[number] for number, each in batch.items())
    logits = engine.begin(list(batch.values()), longest)
    live = list(batch)
    while True:
        tokens = dict(zip(live, chooser.choose(logits, live), strict=True))
        for number, token in tokens.items():
            if token in ends:
                answers[number].finish = "stop"
            else:
                answers[number].tokens.append(token)
        stay = [
            number
            for number in live
            if answers[number].finish != "stop" and len(answers[number].tokens) < room[number]
        ]
        if not stay:
            return list(answers.values())
        if len(stay) < len(live):
            engine.keep([live.index(number) for number in stay])
            live = stay
        logits = engine.extend([tokens[number] for number in live])
