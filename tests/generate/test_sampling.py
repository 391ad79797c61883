"""The choice of the next token, and the windows of long documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.dpp.errors import ConfigError, DataError
from megatron.dpp_train.generate import sampling
from megatron.dpp_train.generate.answers import check_lengths, generate
from megatron.dpp_train.generate.losses import Document, check_windows, total_loss, windows
from megatron.dpp_train.generate.sampling import Chooser, Sampling

LOGITS = torch.tensor([[0.5, 0.1, 0.25, 0.15]]).log()


def drawn(count: int = 1000, **rule: Any) -> Counter[int]:
    rule.setdefault("temperature", 1.0)
    chooser = Chooser(Sampling(**rule), [0])
    return Counter(chooser.choose(LOGITS, [0])[0] for _ in range(count))


def test_draws_follow_the_probabilities() -> None:
    found = drawn()
    for token, share in enumerate((0.5, 0.1, 0.25, 0.15)):
        assert found[token] / 1000 == pytest.approx(share, abs=0.05)
    assert drawn(temperature=1e-30) == {0: 1000}
    assert drawn(temperature=1e30)[1] / 1000 == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 2}),
        ({"top_p": 0.8}, {0, 2, 3}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 2}),  # of the three that are left
    ],
)
def test_only_the_likeliest_are_drawn(rule: dict[str, Any], kept: set[int]) -> None:
    assert set(drawn(**rule)) == kept


def test_what_is_left_keeps_its_proportions() -> None:
    found = drawn(top_p=0.8)
    for token, share in ((0, 0.5), (2, 0.25), (3, 0.15)):
        assert found[token] / 1000 == pytest.approx(share / 0.9, abs=0.04)


class Scripted:
    """Says the tokens of a script for each prompt, which begins with the script's number."""

    positions, name = 9, "scripted"

    def __init__(self, *scripts: list[int]) -> None:
        self.scripts, self.live, self.said, self.rooms = scripts, [0], 0, [0]

    def _logits(self) -> torch.Tensor:
        found = torch.zeros(len(self.live), 10)
        for row, number in enumerate(self.live):
            found[row, self.scripts[number][self.said]] = 1.0
        self.said += 1
        return found

    def begin(self, prompts: Sequence[Sequence[int]], room: int) -> torch.Tensor:
        self.live, self.said = [prompt[0] for prompt in prompts], 0
        self.rooms.append(room)
        return self._logits()

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        assert len(tokens) == len(self.live)
        return self._logits()

    def keep(self, rows: Sequence[int]) -> None:
        self.live = [self.live[row] for row in rows]


def test_answers_end_at_a_token_at_a_length_and_where_positions_do() -> None:
    engine: Any = Scripted([7, 7, 7, 7], [9, 7], [7, 8, 9, 7], [5, 4, 3, 2])
    prompts = [[0], [1, 1], [2], [3] * 7]
    for batch_size in (1, 3, 4):
        found = generate(
            engine, prompts, most=3, ends=frozenset([9]), sampling=Sampling(), batch_size=batch_size
        )
        assert [(each.tokens, each.finish) for each in found] == [
            ([7, 7, 7], "length"), ([], "stop"), ([7, 8], "stop"), ([5, 4], "length"),
        ]  # fmt: skip
    assert max(engine.rooms) == 9


def test_a_prompt_leaves_room_for_a_token() -> None:
    check_lengths([[1], [1, 2, 3]], 4)
    with pytest.raises(DataError, match="prompt 2: 4 tokens, and the model has 4 positions"):
        check_lengths([[1], [1, 2, 3, 4]], 4)
    with pytest.raises(DataError, match="prompt 1: empty"):
        check_lengths([[]], 4)


def test_windows_are_read_together_while_there_is_room() -> None:
    batches: list[list[int]] = []

    class Engine:
        def losses(self, pieces: Sequence[Sequence[int]]) -> list[torch.Tensor]:
            batches.append([len(each) for each in pieces])
            return [torch.zeros(len(each) - 1) for each in pieces]

    engine: Any = Engine()
    documents = [Document(range(size)) for size in (2,) * 7 + (3,)]
    total_loss(engine, documents, window=4, stride=1, batch_size=1)
    assert batches == [[2, 2], [2, 2], [2, 2], [2], [3]]


def test_draws_depend_on_seed_and_number_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    together = Chooser(Sampling(temperature=1.0, seed=5), [0, 1, 2])
    rows = [together.choose(logits, [0, 1, 2]) for _ in range(10)]
    for number in range(3):
        alone = Chooser(Sampling(temperature=1.0, seed=5), [number])
        assert [alone.choose(logits[number : number + 1], [number])[0] for _ in range(10)] == [
            row[number] for row in rows
        ]
    other = Chooser(Sampling(temperature=1.0, seed=6), [0, 1, 2])
    assert rows != [other.choose(logits, [0, 1, 2]) for _ in range(10)]


def test_equal_rows_have_draws_of_their_own() -> None:
    chooser = Chooser(Sampling(temperature=1.0), [0, 1])
    rows = [chooser.choose(LOGITS.expand(2, -1), [0, 1]) for _ in range(20)]
    assert any(first != second for first, second in rows)


def test_a_token_without_a_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    chooser = Chooser(Sampling(temperature=1.0), [0])
    assert {chooser.choose(logits, [0])[0] for _ in range(100)} == {0}
    monkeypatch.setattr(sampling.random, "Random", lambda seed: SimpleNamespace(random=lambda: 1.0))
    rounded_up = Chooser(Sampling(temperature=1.0), [0])
    assert rounded_up.choose(logits, [0]) == [0]
    with pytest.raises(DataError, match="NaN"):
        chooser.choose(torch.tensor([[0.0, torch.nan]]), [0])


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"temperature": -1.0}, "--temperature -1: must be finite"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": 1.0, "top_k": -1}, "--top-k -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p 0: must be above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "--top-p 1.5"),
        ({"top_p": 0.5}, "need a --temperature"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sampling(**rule)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 6, 7, 20, 21])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (6, 3), (6, 5), (7, 2), (50, 25)])
def test_each_token_counts_once_behind_enough_others(length: int, window: int, stride: int) -> None:
    counted: list[int] = []
    for piece in windows(Document(range(length)), window, stride):
        assert len(piece.ids) <= window
        assert len(piece.marks) == len(piece.ids) - 1
        for place in range(piece.first, len(piece.marks)):
            token = piece.ids[place + 1]
            assert place + 1 >= min(token, window - stride)  # tokens before it
            counted.append(token)
    assert counted == list(range(1, length))


def test_windows_without_a_counted_token_are_left_out() -> None:
    marks = [0] * 10 + [1, 1] + [0] * 8
    found = list(windows(Document(range(20), marks), 6, 3))
    counted = [
        piece.ids[place + 1]
        for piece in found
        for place in range(piece.first, len(piece.marks))
        if piece.marks[place]
    ]
    assert counted == [10, 11]
    assert len(found) == 1


@pytest.mark.parametrize(
    ("window", "stride", "said"),
    [(1, 1, "--window 1"), (65, 1, "at most 64"), (8, 8, "--stride 8"), (8, 0, "--stride 0")],
)
def test_windows_that_cannot_be_are_refused(window: int, stride: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_windows(window, stride, 64)
