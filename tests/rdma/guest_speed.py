"""Times kinds of the transport side by side over soft-RoCE, as profiling/bench_transport.py does.

    python tests/rdma/vm.py -- python -m tests.rdma.guest_speed [--kinds tcp rdma nixl:rc_v]

Runs in the guest of ``vm.py``. ``nixl:rc_v`` is NIXL over UCX's reliable verbs (a value of
``UCX_TLS``). The emulated machine has no card: ratios within a size are all that its figures say.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.rdma import guest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))

import bench_transport
import harness

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20]


class Hosts(guest.GuestHosts):
    """UCX has no flag for its devices, and looks for a route where soft-RoCE does not."""

    def enter(self, rank: int) -> None:
        super().enter(rank)
        os.environ["UCX_NET_DEVICES"] = f"rdma{rank}:1,{self.devices[rank]}"
        os.environ["UCX_IB_ROCE_REACHABILITY_MODE"] = "all"


def lend_verbs_to_nixl() -> None:
    """Put the system's libibverbs in the place of that in NIXL's wheel (1.5.1), in the guest alone.

    The wheel's own knows the driver of one vendor's cards, and none of the system's.
    """
    found = importlib.util.find_spec("nixl_cu12")
    if found is None or found.origin is None:
        return
    libraries = Path(found.origin).parents[1] / "nixl_cu12.libs"
    (system,) = Path("/usr/lib").glob("*/libibverbs.so.1")
    for bundled in libraries.glob("libibverbs-*.so.*"):
        subprocess.run(["mount", "--bind", system, bundled], check=True)


def main() -> None:
    parser = harness.new_parser(__doc__, rounds=(2, "turns of each row at each size"))
    parser.add_argument("--sizes", nargs="+", type=bench_transport._parse_size, default=SIZES)
    parser.add_argument("--kinds", nargs="+", default=["tcp", "rdma", "nixl:rc_v"])
    arguments = parser.parse_args()
    guest.control()
    lend_verbs_to_nixl()
    hosts = Hosts(guest.HOSTS.names, guest.HOSTS.devices, guest.HOSTS.addresses)
    bench_transport.PATIENCE = guest.PATIENCE
    for size in arguments.sizes:
        found = bench_transport.measure_all([size], arguments.kinds, arguments.rounds, hosts)
        bench_transport.print_table("soft-RoCE", found)


if __name__ == "__main__":
    main()
