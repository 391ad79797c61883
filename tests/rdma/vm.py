"""Runs a command in a virtual machine that has soft-RoCE devices, on any machine that has none.

    python tests/rdma/vm.py [--timeout SECONDS] [--memory 4G] -- COMMAND...

The guest is Debian's own kernel in qemu, emulated, so it needs neither /dev/kvm nor any module of
the host. Its root is the host's, read only, below a layer in memory: the host's programs and
libraries run unchanged, and what COMMAND writes is forgotten. COMMAND runs as root in the current
folder; its output comes back as it is written, and its exit status is this program's (124 when time
ran out, 125 when the guest failed). ``network.sh`` says which devices and addresses there are.

Debian packages that are missing are installed; the kernel is unpacked, not installed, into
``DPP_RDMA_VM`` (~/.cache/dpp-rdma-vm, 70 MB). Nothing is left running, whatever becomes of this
process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import gzip
import hashlib
import lzma
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HERE = Path(__file__).resolve().parent
PACKAGES = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/bin/busybox": "busybox-static",
    "/usr/sbin/modprobe": "kmod",
    "/usr/bin/zstd": "zstd",
    "/usr/bin/rdma": "iproute2",
    "/usr/bin/ibv_rc_pingpong": "ibverbs-utils",
    "/usr/bin/rping": "rdmacm-utils",
    "/usr/bin/ib_write_bw": "perftest",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}
MODULES = (
    "virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "veth",
    "crc32_generic",  # soft-RoCE asks for it by name, and the guest cannot load by name
    "ib_uverbs", "rdma_ucm", "rdma_rxe",
)  # fmt: skip
# What names the host's CPU to libraries, where the guest has another one.
NOT_FOR_THE_GUEST = (
    "OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA",
    "NPY_ENABLE_CPU_FEATURES", "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip
FOLDERS = ("bin", "modules", "proc", "sys", "dev", "host", "layer", "root")
OUT_OF_TIME, GUEST_FAILED = 124, 125
PR_SET_PDEATHSIG = 1


class CannotRun(Exception):
    """This machine cannot run the guest; says why."""


def install_packages() -> None:
    """Debian packages that are missing.

    Raises:
        CannotRun: this is no Debian, or not root's.
    """
    missing = sorted({package for path, package in PACKAGES.items() if not Path(path).exists()})
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise CannotRun(f"missing packages, and no root to install them: {' '.join(missing)}")
    _apt("update")
    _apt("install", "-y", "--no-install-recommends", *missing)


def _apt(*words: str, folder: Path | None = None) -> None:
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Sandbox::User=root"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise CannotRun(f"apt-get {' '.join(words)}: {done.stderr.strip()[-400:]}")


def prepare_kernel(parent: Path) -> Path:
    """A folder with vmlinux and initrd, made once; several may ask at the same time."""
    contents = (HERE / "init.sh").read_bytes() + " ".join(MODULES).encode()
    cache = parent / hashlib.sha256(contents).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / "initrd").exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _unpack_kernel(Path(folder), cache)
    return cache


def _unpack_kernel(folder: Path, cache: Path) -> None:
    _apt("download", _kernel_package(), folder=folder)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    (image,) = (folder / "boot").glob("vmlinuz-*")
    version = image.name.removeprefix("vmlinuz-")
    subprocess.run(["depmod", "-b", folder, version], check=True)
    (cache / "vmlinux").write_bytes(_elf_of(image.read_bytes()))
    (cache / "version").write_text(version + "\n")
    tree = folder / "initramfs"
    for name in FOLDERS:
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin/busybox")
    shutil.copy(HERE / "init.sh", tree / "init")
    (tree / "init").chmod(0o755)
    for number, module in enumerate(_with_dependencies(folder, version)):
        data = module.read_bytes()
        if module.suffix == ".xz":
            data = lzma.decompress(data)
        (tree / "modules" / f"{number:03}-{module.stem}").write_bytes(data)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    archive = subprocess.run(
        ["/bin/busybox", "cpio", "-o", "-H", "newc"],
        input=names.encode(), cwd=tree, check=True, capture_output=True,
    ).stdout  # fmt: skip
    whole = cache / "initrd.partial"
    whole.write_bytes(gzip.compress(archive, compresslevel=1))
    whole.rename(cache / "initrd")


def _kernel_package() -> str:
    """Name of Debian's current kernel package; its cloud kernels lack soft-RoCE."""
    for attempt in (0, 1):
        if attempt:
            _apt("update")
        listed = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True
        )
        for line in listed.stdout.splitlines():
            kind, _, name = line.strip().partition(": ")
            if kind == "Depends" and name.startswith("linux-image-"):
                return name
    raise CannotRun("apt-cache knows no linux-image-amd64: not a Debian for x86")


def _elf_of(image: bytes) -> bytes:
    """The kernel inside a bzImage, which starts faster by itself: unpacking it takes the emulated
    guest three seconds. Offsets are those of Linux's Documentation/arch/x86/boot.rst.
    """
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(payload)
    unpacked = subprocess.run(["zstd", "-dcq"], input=payload, capture_output=True)
    return unpacked.stdout  # what follows the frame makes zstd complain


def _with_dependencies(folder: Path, version: str) -> list[Path]:
    """Files of ``MODULES`` and what they need, in the order of loading."""
    found: dict[Path, None] = {}
    for module in MODULES:
        shown = subprocess.run(
            ["modprobe", "-d", folder, "-S", version, "--show-depends", module],
            capture_output=True, text=True,
        )  # fmt: skip
        for line in shown.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "insmod":
                found[Path(rest.split()[0])] = None
    return list(found)


def _write_job(folder: Path, command: list[str]) -> None:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in os.environ.items()
             if name.isidentifier() and name not in NOT_FOR_THE_GUEST]  # fmt: skip
    lines += [
        f"bash {shlex.quote(str(folder / 'network.sh'))} || exit {GUEST_FAILED}",
        "ulimit -l unlimited",
        f"cd {shlex.quote(os.getcwd())} || exit {GUEST_FAILED}",
        f"exec {shlex.join(command)}",
    ]
    (folder / "job.sh").write_text("\n".join(lines) + "\n")
    shutil.copy(HERE / "network.sh", folder)


def _qemu(cache: Path, folder: Path, memory: str, ports: list[int]) -> list[str]:
    words = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-smp", "2",
        "-m", memory, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-kernel", str(cache / "vmlinux"), "-initrd", str(cache / "initrd"),
        "-serial", f"file:{folder}.console",
        "-append", f"console=ttyS0 quiet panic=-1 mitigations=off no_timer_check job={folder}",
        "-device", "virtio-serial-pci",
    ]  # fmt: skip
    for tag, path in (("host", "/"), ("job", folder)):
        options = f"id={tag},path={path},security_model=none,readonly=on,multidevs=remap"
        words += ["-fsdev", f"local,{options}"]
        words += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    for number, port in enumerate(ports, 1):
        words += ["-add-fd", f"fd={port},set={number}"]
        words += ["-chardev", f"file,id=c{number},path=/dev/fdset/{number},append=on"]
        words += ["-device", f"virtserialport,chardev=c{number},nr={number}"]
    return words


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _pump(source: BinaryIO, target: BinaryIO) -> None:
    while piece := source.read1(65536):  # type: ignore[attr-defined]
        target.write(piece)
        target.flush()


@contextlib.contextmanager
def _guest(cache: Path, folder: Path, memory: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The running guest, and the descriptor from which its exit status can be read."""
    pipes = [os.pipe() for _ in range(3)]
    writers = [writer for _, writer in pipes]
    with open(f"{folder}.qemu", "wb") as log:
        guest = subprocess.Popen(
            _qemu(cache, folder, memory, writers), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, pass_fds=writers, preexec_fn=_die_with_parent,
        )  # fmt: skip
    for writer in writers:
        os.close(writer)
    targets = (sys.stdout.buffer, sys.stderr.buffer)
    pumps = [
        threading.Thread(target=_pump, args=(os.fdopen(reader, "rb"), target), daemon=True)
        for (reader, _), target in zip(pipes, targets, strict=False)
    ]
    for pump in pumps:
        pump.start()
    try:
        yield guest, pipes[2][0]
    finally:
        guest.kill()
        guest.wait()
        for pump in pumps:
            pump.join(5)


def run(command: list[str], timeout: float, memory: str) -> int:
    """The command's exit status."""
    install_packages()
    parent = Path(os.environ.get("DPP_RDMA_VM", Path.home() / ".cache/dpp-rdma-vm"))
    cache = prepare_kernel(parent)
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as scratch:
        folder = Path(scratch) / "job"
        folder.mkdir()
        _write_job(folder, command)
        deadline = time.monotonic() + timeout
        with _guest(cache, folder, memory) as (guest, status):
            while guest.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if guest.poll() is None:
                print(f"rdma vm: stopped after {timeout:g} s", file=sys.stderr)
                return OUT_OF_TIME
            with os.fdopen(status, "rb") as answer:
                text = answer.read().strip()
        if text.isdigit():
            return int(text)
        for log in ("console", "qemu"):
            print(Path(f"{folder}.{log}").read_text(errors="replace")[-2000:], file=sys.stderr)
        return GUEST_FAILED


def main() -> int:
    """See the module's docstring."""
    words = sys.argv[1:]
    if "--" not in words or words[-1] == "--":
        print(__doc__, file=sys.stderr)
        return 2
    cut = words.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--memory", default="4G")
    options = parser.parse_args(words[:cut])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(words[cut + 1 :], options.timeout, options.memory)
    except CannotRun as error:
        print(f"rdma vm: {error}", file=sys.stderr)
        return GUEST_FAILED


if __name__ == "__main__":
    sys.exit(main())
