"""How long a recorded order of tasks takes with given costs: no decisions, only waiting.

Each rank runs its tasks in its recorded order, each as soon as its input is there. Where a
simulation decides anew, a microsecond more or less may lead another way; this does not, so it says
what the costs explain of the run as it was. ``whatif.py`` is the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.dpp.direction import Direction
from megatron.dpp.schedule import DIRECTION_OF, Action, Kind
from megatron.dpp.sim.clock import interleaved_placement
from megatron.dpp.sim.costs import Costs


def replay(orders: Sequence[Sequence[Action]], costs: Costs, num_chunks: int) -> float:
    """Makespan, in the unit of the costs.

    Args:
        orders: each rank's tasks, ``W`` piece by piece; a piece takes an equal share of its task.
        costs: of tasks and hops; messages of one channel arrive in order.
        num_chunks: chunks per rank, laid out as Megatron does.

    Raises:
        ValueError: an order waits for a task that comes later in another.
    """
    return _Replay(orders, costs, num_chunks).run()


class _Replay:
    def __init__(self, orders: Sequence[Sequence[Action]], costs: Costs, num_chunks: int) -> None:
        self._orders, self._costs = orders, costs
        self._stages = interleaved_placement(len(orders), num_chunks).stages
        self._free, self._end = [0.0] * len(orders), 0.0
        self._position = [0] * len(orders)
        self._pieces = [
            [
                max((a.piece + 1 for a in order if a.chunk == c), default=1)
                for c in range(num_chunks)
            ]
            for order in orders
        ]
        first = dict.fromkeys(range(costs.num_microbatches), 0.0)
        self._arrived: dict[tuple[int, int], dict[int, float]] = {(int(Kind.F), 0): first}
        self._arrived[int(Kind.B), costs.num_stages - 1] = first

    def run(self) -> float:
        ranks, moved = range(len(self._orders)), True
        while moved:
            moved = sum(self._advance(rank) for rank in ranks) > 0
        left = [
            order[at]
            for order, at in zip(self._orders, self._position, strict=True)
            if at < len(order)
        ]
        if left:
            raise ValueError(f"the recorded orders wait for each other at {left}")
        return self._end

    def _advance(self, rank: int) -> bool:
        """Run a rank's tasks until one waits for a message nobody has sent yet."""
        order, begin = self._orders[rank], self._position[rank]
        while self._position[rank] < len(order):
            action = order[self._position[rank]]
            stage = self._stages[rank][action.chunk]
            start = self._free[rank]
            if action.kind != Kind.W:
                channel = (DIRECTION_OF[action.kind], stage)
                arrived = self._arrived.get(channel, {}).get(action.microbatch)
                if arrived is None:
                    break
                start = max(start, arrived)
            took = self._costs.durations[action.kind][stage][action.microbatch]
            if action.kind == Kind.W:
                took /= self._pieces[rank][action.chunk]
            self._end = max(self._end, start + took)
            self._free[rank] = start + took + self._costs.overhead.get(rank, 0.0)
            self._position[rank] += 1
            if action.kind != Kind.W:
                self._send(action, stage, start + took)
        return self._position[rank] > begin

    def _send(self, action: Action, stage: int, sent: float) -> None:
        way = DIRECTION_OF[action.kind]
        target = stage + 1 if way == Direction.FORWARD else stage - 1
        if not 0 <= target < self._costs.num_stages:
            return
        hop = self._costs.hops[min(stage, target)]
        scale = hop.scale[way][action.microbatch] if hop.scale else 1.0
        channel = self._arrived.setdefault((way, target), {})
        before = channel.get(action.microbatch - 1, 0.0)
        channel[action.microbatch] = max(before, sent + (hop.latency + hop.occupancy) * scale)
