"""One of two processes that exchange GPU tensors; started by test_cuda.py. Prints ``ok`` last.

Run as ``python cuda_worker.py KIND RANK PORT DEVICE SCENARIO...``; all use one transport.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch

from megatron.dpp.errors import PeerDead
from megatron.dpp.transport import (
    ChannelSpec,
    Direction,
    TransportOptions,
    messages,
    open_transport,
)
from megatron.dpp.transport.kinds import cuda_ipc

SLOT = 1 << 22
CHUNKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
BUSY_CYCLES = 20_000_000  # about 10 ms of a GPU


class End:
    """This rank's transport: it sends and receives on one channel for each of CHUNKS chunks."""

    def __init__(self, kind, rank, port, device, options):
        self.rank = rank
        self.device = torch.device(device)
        torch.cuda.set_device(self.device)
        self.store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
        specs = [
            ChannelSpec(source, 1 - source, chunk, Direction(source), SLOT)
            for source in (0, 1)
            for chunk in range(CHUNKS)
        ]
        self.transport = open_transport(
            specs, rank=rank, store=self.store, device=self.device, kind=kind, options=options
        )
        self.taken = [0] * CHUNKS
        self.meetings = 0

    def put(self, channel, tensor, microbatch=0):
        self.transport.put(channel, tensor, iteration=1, microbatch=microbatch)

    def take(self, channel):
        deadline = time.monotonic() + 60
        while self.transport.poll()[channel] <= self.taken[channel]:
            assert time.monotonic() < deadline, f"nothing arrives on channel {channel}"
            self.transport.wait(1.0)
        self.taken[channel] += 1
        return self.transport.take(channel)

    def meet(self):
        """Both processes are here."""
        self.meetings += 1
        key = f"meeting/{self.meetings}"
        self.store.add(key, 1)
        deadline = time.monotonic() + 60
        while self.store.add(key, 0) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def part(self):
        """Both have met for the last time: rank 0, whose store it is, leaves after the other."""
        key = f"meeting/{self.meetings}/left"
        if self.rank:
            self.store.add(key, 1)
        else:
            self.store.wait([key], timedelta(seconds=60))


def payload(seed, device):
    """A tensor that both processes can make: any dtype, any shape up to a slot."""
    choice = random.Random(seed)
    dtype = choice.choice(DTYPES)
    size = choice.choice((0, 1, 7, 4096, 65537, SLOT // dtype.itemsize))
    raw = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    tensor = (raw * choice.randrange(1, 100)).to(dtype)
    shape = choice.choice([(size,), (1, size), (size, 1, 1)])
    return tensor.reshape(shape).to(device)


def equal(message, seed):
    expected = payload(seed, "cpu")
    tensor = message.tensor
    assert tensor.is_cuda and tensor.dtype == expected.dtype and tensor.shape == expected.shape
    assert torch.equal(tensor.cpu(), expected), f"payload {seed} arrived wrong"


def any_payload(end):
    """Every dtype, shape and size, on all channels in random order, both directions at once."""
    order = random.Random(3)
    plan = [order.randrange(CHUNKS) for _ in range(150)]
    for i, channel in enumerate(plan):
        end.put(channel, payload(i, end.device), microbatch=i)
        if i % 5 == 4:
            for j in range(i - 4, i + 1):
                message = end.take(plan[j])
                assert message.microbatch == j and message.iteration == 1
                equal(message, j)
    end.transport.flush(30)


def late_producer(end):
    """The kernel that makes the payload runs long after put() returned."""
    if end.rank == 0:
        for i in range(8):
            torch.cuda._sleep(BUSY_CYCLES)
            tensor = torch.full((1 << 18,), float(i), device=end.device) * 2
            end.put(0, tensor, i)
            # As Megatron does after a send. Would be the same memory if the transport let it go.
            tensor.data = torch.empty((1,), device=end.device)
            torch.full((1 << 18,), -1.0, device=end.device)
        end.transport.flush(30)
    else:
        for i in range(8):
            assert torch.equal(end.take(0).tensor.cpu(), torch.full((1 << 18,), 2.0 * i))


def late_consumer(end):
    """The slot's copy is queued behind long kernels while the sender has much more to send."""
    if end.rank == 0:
        for i in range(24):
            end.put(1, torch.full((SLOT // 4,), float(i), device=end.device), i)
        end.transport.flush(60)
    else:
        kept = []
        for _ in range(24):
            torch.cuda._sleep(BUSY_CYCLES)
            kept.append(end.take(1).tensor)
        for i, tensor in enumerate(kept):
            assert torch.equal(tensor.cpu(), torch.full((SLOT // 4,), float(i))), i


def other_streams(end):
    """put and take follow the current stream, whichever it is."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            if end.rank == 0:
                torch.cuda._sleep(BUSY_CYCLES // 20)
                end.put(0, torch.full((5000,), float(i), device=end.device) + 1, i)
            else:
                tensor = end.take(0).tensor
                torch.cuda._sleep(BUSY_CYCLES // 20)
                assert (tensor + 1).sum().item() == 5000 * (i + 2)
    end.transport.flush(30)


def taken_ahead(end):
    """A tensor may be taken before its kernel has ended: the stream waits, and the host does not.

    Other streams go on, and the next messages find their slots.
    """
    num_early = 0
    for i in range(12):
        if end.rank == 0:
            torch.cuda._sleep(10 * BUSY_CYCLES)
            end.put(0, torch.full((SLOT // 4,), float(i), device=end.device) + 1, i)
            end.meet()
        else:
            end.meet()
            begin = time.monotonic()
            coming = end.transport.coming()  # empty where the kind cannot tell
            if coming and coming[0] > end.taken[0]:
                end.taken[0] += 1
                message = end.transport.take(0)
            else:
                message = end.take(0)
            early = message.arrived_ns == 0
            assert time.monotonic() - begin < 0.05 or not early, "take waited"
            beside = torch.cuda.Stream()
            with torch.cuda.stream(beside):
                total = torch.ones(1000, device=end.device).sum()
            beside.synchronize()
            assert total.item() == 1000
            assert message.tensor.sum().item() == (i + 1) * (SLOT // 4), i
            num_early += early
    if end.rank == 1 and end.transport.links()[0].kind == "cuda_ipc":
        assert num_early > 6  # the first ones wait for kernels to be loaded
    end.transport.flush(30)


def sender_dies(end):
    """The stream of the rank that lives waits for a message of which its sender dies."""
    if end.rank == 0:
        tensor = torch.ones(1000, device=end.device)  # now: loading a kernel waits for the device
        for _ in range(300):
            torch.cuda._sleep(10 * BUSY_CYCLES)
        end.put(0, tensor, 0)
        end.meet()
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    end.meet()
    assert (end.transport.poll()[0], end.transport.coming()[0]) == (0, 1)
    end.transport.take(0)
    begin = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 5.0
    try:
        end.transport.poll()
    except PeerDead as error:
        print(error)
    else:
        raise AssertionError("the death went unnoticed")
    end.transport.close()
    print("ok", flush=True)
    sys.exit()


def refuse_first_offers():
    """As if the driver did not open IPC handles: slots are then exported as descriptors."""
    open_offer = cuda_ipc._open
    refused = set()

    def refuse_once(cuda, link):
        if link.peer in refused:
            return open_offer(cuda, link)
        refused.add(link.peer)
        for fd in messages.receive_message(link.sock, 2)[1]:
            os.close(fd)
        return "refused by the test"

    cuda_ipc._open = refuse_once


SCENARIOS = {
    function.__name__: function
    for function in (
        any_payload,
        late_producer,
        late_consumer,
        other_streams,
        taken_ahead,
        sender_dies,
    )
}


def main() -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    kind, rank, port, device, *names = sys.argv[1:]
    options = TransportOptions(timeout=30, checksum="checksum" in names, workload=1 << 18)
    if "refuse" in names:
        refuse_first_offers()
    end = End(kind, int(rank), int(port), device, options)
    links = end.transport.links()
    assert [link.kind for link in links] == [kind], links
    for name in names:
        if name in SCENARIOS:
            SCENARIOS[name](end)
            end.meet()
            print(name, flush=True)
    end.part()
    end.transport.close()
    end.transport.close()
    print("ok", flush=True)


if __name__ == "__main__":
    main()
