"""``megatron-dpp doctor``: what this machine offers the transport, and what to do.

Every probe is one function that returns a finding; none changes anything. The exit status is 1 when
something that every machine needs (PyTorch, the C++ extension, shared memory) is missing. With
``--rdma`` only RDMA devices are looked at, closely (``doctor_rdma.py``).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.dpp.commands import doctor_rdma
from megatron.dpp.errors import TransportError, exit_with


@dataclass(frozen=True)
class Finding:
    """``state`` is ok, note or missing; ``advice`` says what to do, if anything."""

    name: str
    state: str
    text: str
    advice: str = ""


def probe_extension() -> Finding:
    """The C++ side of the transport."""
    from megatron.dpp.transport.native import load_native

    try:
        native = load_native()
    except TransportError as error:
        return Finding("C++ extension", "missing", str(error))
    return Finding("C++ extension", "ok", f"transport version {native.abi_version}")


def probe_packages() -> Finding:
    """PyTorch; the extension and the GPUs cannot be looked at without."""
    if importlib.util.find_spec("torch") is not None:
        return Finding("Python", "ok", f"{sys.executable}, with PyTorch")
    advice = "bash tools/setup.sh prints the Python that has it, and installs what is missing"
    return Finding("Python", "missing", f"{sys.executable} has no PyTorch", advice)


def probe_memory() -> Finding:
    """Anonymous shared memory; the size of /dev/shm does not matter to it."""
    try:
        fd = os.memfd_create("dpp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        advice = "allow memfd_create in the container's seccomp profile"
        return Finding("shared memory", "missing", f"memfd_create: {error.strerror}", advice)
    os.close(fd)
    available = _meminfo().get("MemAvailable", 0)
    return Finding("shared memory", "ok", f"memfd works, {available >> 20} GiB available")


def probe_locked_memory() -> Finding:
    """RDMA and pinned memory need it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    advice = "for RDMA: ulimit -l unlimited (docker: --ulimit memlock=-1)"
    return Finding("locked memory", "note", f"limited to {soft >> 10} KiB", advice)


def probe_descriptors() -> Finding:
    """Each peer needs about four descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if soft >= 1024 else "ulimit -n 4096"
    return Finding("descriptors", "note" if advice else "ok", f"{soft} (at most {hard})", advice)


def probe_namespaces() -> Finding:
    """Ranks in different containers: pidfds need a common PID, shm a common network namespace."""
    names = ", ".join(f"{kind} {os.readlink(f'/proc/self/ns/{kind}')}" for kind in ("pid", "net"))
    contained = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    advice = "start all ranks of a host in one container, or with --pid=host --net=host"
    return Finding("namespaces", "note" if contained else "ok", names, advice if contained else "")


def probe_cores() -> Finding:
    """Ranks spin before they sleep only when every rank of the host has a core."""
    cores = len(os.sched_getaffinity(0))
    return Finding("cores", "ok", f"{cores} for this process; ranks spin while there are no more")


def probe_gpus() -> Finding:
    """CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return Finding("GPUs", "note", "torch finds no CUDA device; tensors stay on the CPU")
    count = torch.cuda.device_count()
    reachable = sum(
        torch.cuda.can_device_access_peer(one, other)
        for one in range(count)
        for other in range(count)
        if one != other
    )
    text = f"{count} devices, {reachable} of {count * (count - 1)} directions with peer access"
    advice = "" if reachable == count * (count - 1) else "links without it are staged"
    return Finding("GPUs", "note" if advice else "ok", text, advice)


def probe_rdma() -> Finding:
    """InfiniBand or RoCE devices."""
    root = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not devices:
        return Finding("RDMA", "note", "no device; links between hosts use TCP (--node-ips)")
    if not Path("/dev/infiniband").is_dir():
        advice = "docker: --device=/dev/infiniband --cap-add=IPC_LOCK"
        return Finding("RDMA", "note", f"{', '.join(devices)}, but no /dev/infiniband", advice)
    ports = [
        f"{device} port {port.name}: {(port / 'state').read_text().strip()}"
        for device in devices
        for port in sorted((root / device / "ports").iterdir())
    ]
    return Finding("RDMA", "ok", "; ".join(ports), "doctor --rdma tries each of them")


def probe_gpu_direct() -> Finding:
    """Whether the network cards reach GPU memory."""
    return Finding(*doctor_rdma.gpu_direct())


def probe_compiler() -> Finding:
    """Needed to build the extension, not to run it."""
    path = shutil.which((os.environ.get("CXX", "").split() or ["g++"])[0])
    advice = "" if path else "apt-get install g++"
    return Finding("C++ compiler", "ok" if path else "note", path or "none", advice)


PROBES: tuple[Callable[[], Finding], ...] = (
    probe_extension,
    probe_memory,
    probe_locked_memory,
    probe_descriptors,
    probe_namespaces,
    probe_cores,
    probe_gpus,
    probe_rdma,
    probe_gpu_direct,
    probe_compiler,
)
_NEED_TORCH = (probe_extension, probe_gpus)


def _meminfo() -> dict[str, int]:
    """KiB by name."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}


def main(words: Sequence[str] = ()) -> int:
    """Print all findings; 1 when something necessary is missing."""
    parser = argparse.ArgumentParser(
        prog="megatron-dpp doctor",
        description="What this machine offers the transport, and what to do about the rest.",
    )
    parser.add_argument("--rdma", action="store_true", help="RDMA alone, but every port of it")
    if parser.parse_args(words).rdma:
        findings = [probe_locked_memory(), probe_rdma()]
        findings += [Finding(*line) for line in doctor_rdma.findings()]
    else:
        packages = probe_packages()
        probes = [probe for probe in PROBES if packages.state == "ok" or probe not in _NEED_TORCH]
        findings = [packages, *(probe() for probe in probes)]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:{width}}  {finding.state:7}  {finding.text}")
        if finding.advice:
            print(f"{'':{width}}           -> {finding.advice}")
    return 1 if any(finding.state == "missing" for finding in findings) else 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
