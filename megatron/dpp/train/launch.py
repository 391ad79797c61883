"""torchrun for a job over several nodes, with one line in place of a traceback when a node does not
come.

``python -m megatron.dpp.train.launch`` takes torchrun's arguments; ``examples/launch.sh`` starts it
where NUM_NODES is above 1.
"""

from __future__ import annotations

import sys

from torch.distributed import DistStoreError
from torch.distributed.run import main

_NOT_ALL_CAME = 1


def run() -> int:
    """Run torchrun; 1 when the nodes do not meet in time."""
    try:
        main()
    except DistStoreError as error:
        print(
            f"error: not all nodes came ({str(error).rstrip('.')}): start run_worker_*.sh with the "
            "same NUM_NODES and MASTER_PORT on every other node within WAIT_SECONDS, and check "
            "that MASTER_ADDR and the port can be reached from there",
            file=sys.stderr,
        )
        return _NOT_ALL_CAME
    return 0


if __name__ == "__main__":
    sys.exit(run())
