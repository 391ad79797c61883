"""Injected variability: a pure function of seed and task, equal in amount for every schedule."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.dpp.core.rng import derive
from megatron.dpp.errors import ConfigError
from megatron.dpp.inject import Injector, Task
from megatron.dpp.runtime.delayed import delayed
from megatron.dpp.transport.base import ChannelSpec, Direction
from tests.fake_network import FakeNetwork


def share_of_slow_work(pieces: int, ranks: int = 8) -> float:
    """Mean extra work of 40 iterations whose 96 units are cut into this many pieces each."""
    total = 0.0
    for rank in range(ranks):
        injector = Injector("transient:2x:20%", rank, ranks, seed=3)
        for iteration in range(5):
            for unit in range(96 * pieces):
                task = Task(iteration, "F", 0, 0, unit / pieces, 1 / pieces)
                total += (injector.factor(task) - 1.0) / pieces
    return total / (ranks * 5 * 96)


def test_transients_cover_the_same_work_however_it_is_cut() -> None:
    whole, halves = share_of_slow_work(1), share_of_slow_work(2)
    assert whole == pytest.approx(halves, rel=1e-9)
    assert whole == pytest.approx(0.2, abs=0.03)


def test_answers_depend_on_the_task_and_on_nothing_else() -> None:
    task = Task(3, "B", 1, 7, 12.0, 0.5)
    first = Injector("jitter:0.3,lengths:0.5", 1, 4, seed=5)
    again = Injector("jitter:0.3,lengths:0.5", 1, 4, seed=5)
    first.factor(Task(0, "F", 0, 0))
    assert first.factor(task) == again.factor(task)
    assert first.factor(task) != Injector("jitter:0.3", 2, 4, seed=5).factor(task)


def test_slow_rank_and_slow_link_hit_only_theirs() -> None:
    text = "slow-rank:1:1.5,slow-link:0-1:5ms"
    assert Injector(text, 1, 4).factor(Task(0, "F", 0, 0)) == 1.5
    assert Injector(text, 2, 4).factor(Task(0, "F", 0, 0)) == 1.0
    assert Injector(text, 0, 4).message_seconds(1, 0, 9) == pytest.approx(5e-3)
    assert Injector(text, 0, 4).message_seconds(1, 2, 9) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "jiter:0.3", "jitter:x", "transient:2x", "slow-link:0-1:5", "transient:2x:0%", "",
        "jitter:nan", "jitter:-1", "slow-rank:1:0.5", "head:0.5x", "slow-link:0-2:5ms",
        "slow-link:1-1:5ms", "jitter:0.3,",
    ],
)  # fmt: skip
def test_a_form_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"DppConfig\(inject="):
        Injector(text, 0, 4)


def test_the_first_and_the_last_rank_share_a_link_with_several_chunks_only() -> None:
    assert Injector("slow-link:0-3:5ms", 0, 4, num_chunks=2).message_seconds(3, 0, 0) > 0.0
    with pytest.raises(ConfigError, match=r"slow-link:0-3:5ms'\): pipeline ranks 0 and 3 share no"):
        Injector("slow-link:0-3:5ms", 0, 4)
    with pytest.raises(ConfigError, match="outside the pipeline of 4 ranks"):
        Injector("slow-rank:4:2", 0, 4)


def test_a_seed_may_be_any_64_bits() -> None:
    """PyTorch's initial seed may exceed a signed 64-bit number."""
    task = Task(3, "B", 1, 7, 12.0, 0.5)
    assert Injector("jitter:0.3", 1, 4, seed=(1 << 64) - 7).factor(task) >= 1.0
    one = Task(3, "B", 1, 1, 12.0, 0.5)
    assert Injector("jitter:0.3", 1, 4, seed=5).factor(one) == pytest.approx(2.16510899143066)
    assert derive(5, 1) == 3085186920139808632 != derive((1 << 64) - 7, 1)


def test_a_late_message_has_arrived_when_its_delay_is_over_since_it_was_sent() -> None:
    """However long its receiver is busy; a trace shows an injected slow link."""
    spec = ChannelSpec(0, 1, 0, Direction.FORWARD, 64)
    network = FakeNetwork([spec])
    sender, inner = network.transport(0), network.transport(1)
    receiver = delayed(inner, Injector("slow-link:0-1:20ms", 1, 2), (0, 1))
    begin = time.monotonic_ns()
    for microbatch in range(2):
        sender.put(0, torch.arange(4.0), iteration=0, microbatch=microbatch)
        with pytest.raises(IndexError, match="nothing has arrived"):
            receiver.take(0)
        if microbatch:
            time.sleep(0.03)  # the receiver is busy with a task
        while receiver.poll()[0] <= microbatch:
            assert not microbatch
            receiver.wait(0.01)
        message = receiver.take(0)
        assert torch.equal(message.tensor, torch.arange(4.0))
        assert message.arrived_ns >= begin + 20_000_000


def test_a_heavy_head_is_on_the_last_chunk_of_the_last_rank() -> None:
    """The other chunks of that rank keep their speed."""
    last = Injector("head:3x", 3, 4, num_chunks=2)
    assert [last.factor(Task(0, "F", chunk, 0)) for chunk in range(2)] == [1.0, 3.0]
    assert Injector("head:3x", 2, 4, num_chunks=2).factor(Task(0, "F", 1, 0)) == 1.0
