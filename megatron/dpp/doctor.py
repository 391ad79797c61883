"""``megatron-dpp doctor``: prints what this machine offers the transport, and what to do; switches
the plugin of this environment on and off.

Each probe is one function that changes nothing. The exit status is 1 when PyTorch, the C++
extension or shared memory is missing, which every machine needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron.dpp.command_line import command, in_flags, new_parser
from megatron.dpp.errors import DataError, Text, TransportError, exit_with, said, setting
from megatron.dpp.files.safe_files import replacing
from megatron.dpp.processes import begin_program


class Finding(NamedTuple):
    """The result of a probe; ``state`` is ok, note or missing, ``advice`` a remedy or empty."""

    name: str
    state: str
    text: str
    advice: str = ""


def _noted(name: str, good: bool, text: str, advice: str) -> Finding:
    """A finding that is as it should be, or that advice comes with."""
    return Finding(name, "ok" if good else "note", text, "" if good else advice)


def probe_packages() -> Finding:
    """PyTorch, which the probes of the extension and of GPUs need."""
    if importlib.util.find_spec("torch") is not None:
        return Finding("Python", "ok", f"{sys.executable}, with PyTorch")
    advice = "bash tools/setup.sh prints the Python that has it, and installs what is missing"
    return Finding("Python", "missing", f"{sys.executable} has no PyTorch", advice)


def probe_memory() -> Finding:
    """Anonymous shared memory, which does not depend on the size of /dev/shm."""
    try:
        os.close(os.memfd_create("dpp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        advice = "allow memfd_create in the container's seccomp profile"
        return Finding("shared memory", "missing", f"memfd_create: {error.strerror}", advice)
    lines = map(str.split, Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available = next((int(line[1]) for line in lines if line[0] == "MemAvailable:"), 0)
    return Finding("shared memory", "ok", f"memfd works, {available >> 20} GiB available")


def probe_limits() -> Iterator[Finding]:
    """Locked memory, which RDMA and pinned memory need; descriptors, about four for each peer;
    namespaces, which ranks of a host need in common; cores."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = soft == resource.RLIM_INFINITY
    text = "unlimited" if free else f"limited to {soft >> 10} KiB"
    advice = "for RDMA: ulimit -l unlimited (docker: --ulimit memlock=-1)"
    yield _noted("locked memory", free, text, advice)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _noted("descriptors", soft >= 1024, f"{soft} (at most {hard})", "ulimit -n 4096")
    names = ", ".join(f"{kind} {os.readlink(f'/proc/self/ns/{kind}')}" for kind in ("pid", "net"))
    contained = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    advice = "start all ranks of a host in one container, or with --pid=host --net=host"
    yield _noted("namespaces", not contained, names, advice)
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", "ok", f"{cores} for this process; ranks spin while there are no more")


def probe_extension() -> Finding:
    """The C++ side of the transport."""
    from megatron.dpp.transport.native import load_native

    try:
        native = load_native()
    except TransportError as error:
        return Finding("C++ extension", "missing", Text(error, error))
    return Finding("C++ extension", "ok", f"transport version {native.abi_version}")


def probe_gpus() -> Finding:
    """CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return Finding("GPUs", "note", "torch finds no CUDA device; tensors stay on the CPU")
    ways = list(itertools.permutations(range(torch.cuda.device_count()), 2))
    reachable = sum(torch.cuda.can_device_access_peer(*way) for way in ways)
    text = f"{torch.cuda.device_count()} devices, "
    text += f"{reachable} of {len(ways)} directions with peer access"
    return _noted("GPUs", reachable == len(ways), text, "links without it are staged")


def probe_rdma() -> Finding:
    """InfiniBand or RoCE devices."""
    root = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not devices:
        ips = setting("node_ips")
        text = Text(f"no device; links between hosts use TCP ({ips})", ips)
        return Finding("RDMA", "note", text)
    if not Path("/dev/infiniband").is_dir():
        advice = "docker: --device=/dev/infiniband --cap-add=IPC_LOCK"
        return Finding("RDMA", "note", f"{', '.join(devices)}, but no /dev/infiniband", advice)
    ports = [
        f"{device} port {port.name}: {(port / 'state').read_text('utf-8').strip()}"
        for device in devices
        for port in sorted((root / device / "ports").iterdir())
    ]
    return Finding("RDMA", "ok", "; ".join(ports))


def probe_gpu_direct() -> Finding:
    """Probe the access of RDMA devices to GPU memory: each registers some of the first GPU."""
    name = "GPUDirect"
    try:
        from megatron.dpp.transport.native import load_native

        library = load_native()
        library.CudaDevice(0)
        ports, refused = library.rdma_ports()
    except ImportError as error:
        return Finding(name, "note", f"not tried: {error}")
    except TransportError as error:
        return Finding(name, "note", Text(error, error))
    devices = sorted({port["device"] for port in ports})
    if not devices:
        return Finding(name, "note", "; ".join(refused) or "no RDMA device")
    found = {device: library.probe_gpu_direct(device, 0) for device in devices}
    text = "; ".join([*(f"{device}: {how}" for device, (_, how) in found.items()), *refused])
    good = all(possible for possible, _ in found.values()) and not refused
    advice = "without it GPU tensors between hosts pass through the host's memory"
    return _noted(name, good, text, advice)


def probe_compiler() -> Finding:
    """The compiler that builds the extension; running needs none."""
    path = shutil.which((os.environ.get("CXX", "").split() or ["g++"])[0])
    return _noted("C++ compiler", path is not None, path or "none", "apt-get install g++")


def probe_variables() -> Finding:
    """The variables of ours that are set."""
    ours = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("DPP_", "USE_DPP"))]
    return Finding("variables", "ok", " ".join(ours) or "none set (docs/environment.md has all)")


def probe_plugin() -> Finding:
    """Finds out if each Python process of this environment looks for USE_DPP."""
    path = pth_file()
    if path.is_file():
        return Finding("plugin", "ok", f"on: processes with USE_DPP=1 load it ({path})")
    return Finding("plugin", "ok", f"off: no {path} (--enable-plugin writes it)")


def findings() -> Iterator[Finding]:
    """Run the probes."""
    packages = probe_packages()
    yield packages
    if packages.state == "ok":
        yield from (probe_extension(), probe_gpus())
    yield from (probe_plugin(), probe_variables(), probe_memory(), *probe_limits())
    yield from (probe_rdma(), probe_gpu_direct(), probe_compiler())


PTH_LINE = (
    'import os; any(map(os.environ.get, ("USE_DPP", "DPP_TRACE_ONLY"))) '
    'and __import__("megatron.dpp.autoload")\n'
)
"""What Python runs at each start with the plugin on: nothing is imported where neither variable is
set."""


def pth_file() -> Path:
    """The file of this environment's site-packages that Python reads at each start."""
    return Path(sysconfig.get_path("purelib")) / "megatron_dpp_autoload.pth"


def _switch_plugin(flag: str) -> None:
    """Write the file of the plugin, or remove it."""
    path = pth_file()
    try:
        if flag == "--enable-plugin":
            with replacing(str(path)) as file:
                file.write(PTH_LINE.encode())
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{flag}: {path} cannot be changed ({error.strerror}); where {sys.prefix} is not "
            "yours, take an environment of your own (python -m venv DIR)"
        ) from error


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = new_parser(
        prog,
        "Print what this machine offers the transport, what is set, and what to do. The plugin: "
        "every Python process of this environment loads the dynamic pipeline where USE_DPP=1 is "
        "set, for hosts whose workers have no setting that imports a module.",
    )
    which = parser.add_mutually_exclusive_group()
    for flag, does in (("--enable-plugin", "write"), ("--disable-plugin", "remove")):
        text = f"{does} megatron_dpp_autoload.pth in site-packages"
        which.add_argument(flag, dest="flag", action="store_const", const=flag, help=text)
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.flag:
        _switch_plugin(args.flag)
    results = list(findings()) if args.flag is None else [probe_plugin()]
    width = max(len(finding.name) for finding in results)
    for finding in results:
        print(f"{finding.name:{width}}  {finding.state:7}  {said(finding.text, in_flags)}")
        if finding.advice:
            print(f"{'':{width}}           -> {finding.advice}")
    return 1 if any(finding.state == "missing" for finding in results) else 0


main = command("megatron-dpp doctor", _parser, _run)


if __name__ == "__main__":
    begin_program()
    exit_with(lambda: main(sys.argv[1:]))
