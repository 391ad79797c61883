"""The GPU kinds over the driver of csrc/tests/fake_cuda.cc, two ranks as threads of one process.

Run by test_cuda_fake.py with that driver in LD_LIBRARY_PATH. Each line of standard input is JSON,
``[cases, environment variables, number]``, for which a process is forked: importing PyTorch takes
longer than a case. Its output is between lines ``begin NUMBER`` and ``exit STATUS of NUMBER``.

A case is one string, ``KIND [checksum] [gpudirect=ONE,OTHER] [direct=ABILITY+...]
[FAULT[=NUMBER] ...]``; abilities are the fake GPU's, faults the fake network card's. A word of
``SCENARIOS`` stands for what is done instead of a random exchange. Prints for each case its name,
the links' reasons or the errors, and "ok" or "refused". CPU tensors play CUDA tensors: the fake
driver's device memory is host memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import sys
import threading
import time

import torch
from torch.distributed import HashStore

from megatron.dpp.errors import DppError
from megatron.dpp.transport import ChannelSpec, Direction, TransportOptions, open_transport
from tests.transport.kinds import cpu_as_gpu

SLOT = 1 << 19  # large enough for a take without the interpreter's lock
CHUNKS = 3
DEADLINE = 200  # seconds of a list of cases
MANY = 8  # channels, each of which could wait for itself


def open_both(kind: str, gpudirect: tuple[str, str], chunks: int, **settings):
    store = HashStore()
    specs = [
        ChannelSpec(source, 1 - source, chunk, Direction(source), SLOT)
        for source in (0, 1)
        for chunk in range(chunks)
    ]
    ends, errors = {}, []

    def open_end(rank: int) -> None:
        options = TransportOptions(timeout=20, workload=5000, gpudirect=gpudirect[rank], **settings)
        try:
            ends[rank] = open_transport(specs, rank=rank, store=store, kind=kind, options=options)
        except DppError as error:
            errors.append(error)

    threads = [threading.Thread(target=open_end, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        print(type(error).__name__, error)
    return None if errors else (ends[0], ends[1])


def take(end, channel, taken):
    deadline = time.monotonic() + 20
    while end.poll()[channel] <= taken[channel]:
        assert time.monotonic() < deadline, f"nothing arrives on channel {channel}"
        end.wait(0.5)
    taken[channel] += 1
    return end.take(channel)


def exchange(a, b) -> None:
    """Random channels, sizes and dtypes; puts run ahead of takes; every payload is compared."""
    choice = random.Random(1)
    sent = {channel: [] for channel in range(CHUNKS)}
    taken = [0] * CHUNKS
    for i in range(200):
        channel = choice.randrange(CHUNKS)
        if choice.random() < 0.5 or len(sent[channel]) == 0:
            dtype = choice.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8))
            size = choice.choice((0, 1, 1000, 5000, 5001, 12345, SLOT // 8))
            tensor = (torch.arange(size) % 97 + i).to(dtype)
            a.put(channel, tensor.clone(), iteration=2, microbatch=i)
            sent[channel].append((i, tensor))
        else:
            number, expected = sent[channel].pop(0)
            message = take(b, channel, taken)
            assert message.microbatch == number and message.iteration == 2
            assert message.tensor.dtype == expected.dtype
            assert torch.equal(message.tensor, expected), f"message {number} on channel {channel}"
    for channel, messages in sent.items():
        for _, expected in messages:
            assert torch.equal(take(b, channel, taken).tensor, expected)
    a.flush(20)
    assert a.pending() == 0
    assert ctypes.CDLL("libcuda.so.1").fake_cuda_contexts() == 0, "PyTorch's context is current"


def one_by_one(a, b) -> None:
    """Each message is taken before the next one is put, whose arrival would show this one's."""
    taken = [0] * CHUNKS
    for i, size in enumerate((1, 0, 2, 1, 3)):
        tensor = torch.full((size,), 100 + i, dtype=torch.uint8)
        a.put(1, tensor.clone(), iteration=2, microbatch=i)
        assert torch.equal(take(b, 1, taken).tensor, tensor), f"message {i}"
    a.flush(20)


def take_ahead(a, b) -> None:
    """Messages may be taken before they are known to have arrived, in order and with credit."""
    ahead = 0
    for i in range(8):
        a.put(1, torch.full((1000,), i), iteration=2, microbatch=i)
        while b.coming()[1] == i:  # the slot of the message before last may not be free yet
            a.wait(0.01)
        message = b.take(1)
        assert message.microbatch == i
        ahead += message.arrived_ns == 0
        assert torch.equal(message.tensor, torch.full((1000,), i))
        assert b.poll()[1] == b.coming()[1] == i + 1
    assert ahead > 0, "events are slow"
    a.flush(20)
    a.put(1, torch.ones(3), iteration=2, microbatch=8)
    a.flush(20)
    assert b.poll()[1] == 9 and b.take(1).arrived_ns > 0


def not_ahead(a, b) -> None:
    """Only arrived messages may be taken if the driver cannot write values."""
    for i in range(4):
        a.put(1, torch.full((1000,), i), iteration=2, microbatch=i)
        assert b.coming()[1] <= b.poll()[1]
        assert torch.equal(take(b, 1, [0, i, 0]).tensor, torch.full((1000,), i))
    a.flush(20)


def let_go(a, b) -> None:
    """A stream waits for what never comes, until its sender has given up."""
    a.put(0, torch.zeros(SLOT // 4), iteration=2, microbatch=0)
    waiting = threading.Thread(target=b.take, args=(0,))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    a.abort("asked to")
    waiting.join(15)  # less than the timeout of both ends
    assert not waiting.is_alive()
    try:
        b.poll()
    except DppError as error:
        print(type(error).__name__, error)


def open_slots(a, b) -> None:
    """Peers may write headers and payloads of slots, and no buffer that is sent from."""
    found = ctypes.CDLL("libibverbs.so.1").fake_verbs_seen(b"remote-regions")
    assert found == 4, f"{found} registrations for peers' writes"


def one_wait(a, b) -> None:
    """Our stream is told once per message to wait for its producer, also when all buffers of the
    link are in use and sending has to be tried again."""
    driver = ctypes.CDLL("libcuda.so.1")
    before, taken, number = driver.fake_cuda_waits(), [0] * CHUNKS, 0
    for _ in range(10):
        for channel in (*range(CHUNKS), *range(CHUNKS)):
            a.put(channel, torch.zeros(SLOT // 4), iteration=2, microbatch=number)
            number += 1
        for channel in (*range(CHUNKS), *range(CHUNKS)):
            take(b, channel, taken)
    a.flush(20)
    waits = driver.fake_cuda_waits() - before
    assert waits == number, f"{waits} waits for {number} messages"


def marks(a, b) -> None:
    """Slots that are free again before their sender has seen its copies into them happen."""
    for i in range(10):
        a.put(0, torch.full((1000,), i), iteration=2, microbatch=i)
        deadline = time.monotonic() + 20
        while b.coming()[0] == i:
            assert time.monotonic() < deadline
            b.poll()
        assert b.take(0).microbatch == i
    a.flush(20)
    unseen = ctypes.CDLL("libcuda.so.1").fake_cuda_unseen()
    assert unseen == 0, f"{unseen} marks were set again before they were looked at"


def close_busy(a, b) -> None:
    """Memory is not freed while one of our streams uses it."""
    a.put(0, torch.ones(1000), iteration=2, microbatch=0)
    time.sleep(0.1)  # the progress thread queues what put() has not
    a.abort("asked to")
    a.close()
    early = ctypes.CDLL("libcuda.so.1").fake_cuda_early()
    assert early == 0, f"{early} pieces of memory were given up while a stream used them"


def close_stuck(a, b) -> None:
    """The caller's stream never gets to what was taken, as in a collective with a dead rank."""
    for channel in range(MANY):
        a.put(channel, torch.ones(10), iteration=2, microbatch=0)
        b.take(channel)
    a.abort("asked to")
    begin = time.monotonic()
    b.close()
    assert time.monotonic() - begin < 10.0


SCENARIOS = {
    "ahead": take_ahead,
    "not-ahead": not_ahead,
    "let-go": let_go,
    "one-by-one": one_by_one,
    "one-wait": one_wait,
    "open-slots": open_slots,
    "marks": marks,
    "close-busy": close_busy,
    "close-stuck": close_stuck,
}


def run_case(case: str) -> None:
    kind, *words = case.split()
    gpudirect, faults = ("auto", "auto"), []
    for word in words:
        name, _, value = word.partition("=")
        if name == "gpudirect":
            gpudirect = tuple(value.split(","))
        elif name == "direct":
            os.environ["FAKE_CUDA_DIRECT"] = value
        elif word != "checksum" and word not in SCENARIOS:
            faults.append((name, int(value or 1)))
    card = ctypes.CDLL("libibverbs.so.1")
    for name, number in (("reset", 0), *faults):
        card.fake_verbs_set(name.encode(), ctypes.c_long(number))
    chunks = MANY if "close-stuck" in words else CHUNKS
    patience = 6.0 if "lose-writes" in dict(faults) else 20.0  # a quarter is that of a path's test
    both = open_both(kind, gpudirect, chunks, checksum="checksum" in words, setup_timeout=patience)
    if both is None:
        print("refused")
        return
    a, b = both
    assert [link.kind for link in a.links()] == [kind]
    for end in both:
        print(*(link.reason for link in end.links()))
    scenarios = [SCENARIOS[word] for word in words if word in SCENARIOS]
    for scenario in scenarios:
        scenario(a, b)
    driver = ctypes.CDLL("libcuda.so.1")
    pageable = driver.fake_cuda_pageable()  # the links' own tests
    if not scenarios:
        exchange(a, b)
        exchange_back = threading.Thread(target=exchange, args=(b, a))
        exchange_back.start()
        exchange_back.join()
    if "checksum" not in words:  # which waits for a copy
        assert driver.fake_cuda_pageable() == pageable, "copies from memory that is not pinned"
    for end in (a, b, a):
        end.close()
    if not scenarios:
        del a, b, end, both
        gc.collect()
        found = driver.fake_cuda_strays(), driver.fake_cuda_pieces()
        assert found == (0, 0), f"{found} GPU memory given back wrongly, and left"
    print("ok")


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        cases, environment, number = json.loads(line)
        print("begin", number, flush=True)
        pid = os.fork()
        if pid == 0:
            run_cases(cases, environment)
            gc.collect()
            sys.stdout.flush()
            os._exit(0)  # the system frees what it has inherited, which takes Python longer
        _, status = os.waitpid(pid, 0)
        print("exit", os.waitstatus_to_exitcode(status), "of", number, flush=True)


def run_cases(cases: list[str], environment: dict[str, str]) -> None:
    signal.alarm(DEADLINE)
    os.environ.update(environment)
    with cpu_as_gpu():
        for case in cases:
            print("case", case)
            run_case(case)


if __name__ == "__main__":
    main()
