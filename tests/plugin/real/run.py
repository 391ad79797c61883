"""Run another project's training code on two ranks, under its own schedule and the dynamic one.

    python -m tests.plugin.real.run verl --sources DIR [--device cpu] [--chunks 2] [--slices 16]
    python -m tests.plugin.real.run verl --sources DIR --device cpu --planned
    python -m tests.plugin.real.run verl --sources DIR --time --layers 8 --hidden 2048

``DIR/HOST`` holds a folder per package of the host: an unpacked wheel or a checkout. Python must
have the packages that the host imports; ``docs/plugin-tests.md`` has the list. Prints what was
compared and what was stubbed, and fails at the first line that differs. Ranks share a GPU where
there is one only. With ``--slices`` the first of the two is Megatron's order of slices.

With ``--planned`` the dynamic schedule runs training steps in planned orders. The host's schedule
that it is compared with has the host's order, and then that of the plans.

``--time`` then times the host's updates of a larger model in turns, without deterministic kernels:
each turn starts both, passes over the rollouts untimed in which the dynamic schedule measures, and
times the later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.dpp.doctor import PTH_LINE
from megatron.dpp.report.reader import open_run, read_events
from tests.plugin.real.kit import Size
from tests.runtime.launcher import REPOSITORY, free_port, has_gpu, shared_gpus

RANKS, TIMEOUT, UNTIMED = 2, 900.0, 4
ARMS = ("own", "dynamic")
ON_CPU = Size()
ON_GPU = Size(hidden=256, vocabulary=512, median=64, longest=256, most=384)
TIMED = Size(8, 2048, 32768, samples=128, median=2048, longest=16384, most=16384, rollouts=8)
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}  # fmt: skip
DELAYS = "jitter:0.5,delay:3ms,message-delay:3ms"


class Host(NamedTuple):
    """A project whose training code calls megatron-core's schedules.

    Args:
        package: a module that its sources have.
        worker: the module beside this one that runs it.
        enters: how the plugin enters its workers, as variables; ``{most}`` stands for the most
            tokens of a microbatch.
        packs: it packs before a step, so that an adapter announces the lengths.
        alike: it pads all rows of a step to one length.
    """

    package: str
    worker: str
    enters: Mapping[str, str]
    packs: bool = False
    alike: bool = False


_INIT = "--custom-megatron-init-path megatron.dpp.autoload.megatron_init"
HOSTS = {
    "megatron-bridge": Host("megatron/bridge", "bridge_worker", {"PTH": "1"}),
    "miles": Host("miles", "miles_worker", {"FLAGS": _INIT, "USE_DPP": ""}, packs=True),
    "nemo-rl": Host(
        "nemo_rl",
        "nemo_rl_worker",
        {"PTH": "1", "DPP_MAX_TOKENS": "{most}", "DPP_ACTIVATION_CAP": "static"},
        packs=True,
        alike=True,
    ),
    "slime": Host("slime", "slime_worker", {"FLAGS": _INIT, "USE_DPP": ""}, packs=True),
    "verl": Host(
        "verl",
        "verl_worker",
        {"VERL_USE_EXTERNAL_MODULES": "megatron.dpp.autoload", "DPP_MAX_TOKENS": "{most}"},
        packs=True,
    ),
}


def packages(host: str, sources: Path) -> list[Path]:
    """The folders that a host's packages are imported from; none where they are absent."""
    folders = [folder for folder in sorted((sources / host).glob("*")) if folder.is_dir()]
    roots = [folder / "src" if (folder / "src").is_dir() else folder for folder in folders]
    found = any((root / HOSTS[host].package).is_dir() for root in roots)
    return roots if found else []


class Setting(NamedTuple):
    """Settings that both runs of a comparison share.

    Args:
        device: ``cuda`` or ``cpu``.
        chunks: virtual stages per rank.
        slices: tokens of a slice, or nothing.
        timed: steps are timed: nothing delays them, and nothing is compared.
    """

    host: str
    sources: Path
    device: str
    size: Size
    chunks: int = 1
    slices: str = ""
    timed: bool = False


def run(setting: Setting, record: Path, *, dynamic: bool, **more: str) -> None:
    """Run a host on all ranks; ``record`` and a rank's number name the files of its numbers.
    ``more`` are further variables.

    Raises:
        AssertionError: a rank failed, with its output.
    """
    host, slices = setting.host, setting.slices
    path = [*map(str, packages(host, setting.sources)), str(REPOSITORY)]
    if (dynamic or slices) and "PTH" in HOSTS[host].enters:
        path.insert(0, str(_site(record.parent)))
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1", **os.environ,
        "PYTHONPATH": os.pathsep.join(path), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1", "RECORD": str(record), "MODEL": str(record.parent / "model"),
        "CHUNKS": str(setting.chunks), "HOST": host, "DEVICE": setting.device,
        "SIZE": setting.size.text(), "TIMED": str(int(setting.timed)),
        "MAKEFLAGS": f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    } | ({} if setting.timed else DETERMINISTIC)  # fmt: skip
    enters = {
        name: value.format(most=setting.size.most) for name, value in HOSTS[host].enters.items()
    }
    if dynamic:
        environment |= {"USE_DPP": "1", "DPP_STRICT": "1", "DPP_ANNOUNCE": "1", **enters}
    if dynamic and not setting.timed:
        traces = str(record.parent / "traces")
        environment |= {"DPP_INJECT": DELAYS, "DPP_TRACE": "1", "DPP_TRACE_DIR": traces}
    if slices:
        order = {} if dynamic else {"USE_DPP": "1", "DPP_STRICT": "1", "DPP_POLICY": "megatron"}
        environment |= {**enters, **order, "DPP_SLICE_TOKENS": slices}
    environment |= more
    worker = f"tests.plugin.real.{HOSTS[host].worker}"
    processes = []
    for rank in range(RANKS):
        place = {"LOCAL_RANK": str(rank)} if setting.device == "cpu" else shared_gpus(rank)[1]
        with Path(f"{record}.{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", worker],
                    env=environment | {"RANK": str(rank), **place},
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
    failed = _wait(processes)
    logs = [Path(f"{record}.{rank}.log").read_text(errors="replace")[-6000:] for rank in failed]
    assert not failed, "\n".join(logs)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """The ranks that failed; when one has, the others have a few seconds to say why, too."""
    deadline = time.monotonic() + TIMEOUT
    try:
        while any(one.poll() is None for one in processes) and time.monotonic() < deadline:
            if any(one.poll() for one in processes):
                deadline = min(deadline, time.monotonic() + 5.0)
            time.sleep(0.1)
        for one in processes:
            if one.poll() is None:
                one.send_signal(signal.SIGABRT)  # faulthandler prints all threads
                one.wait(20.0)
    finally:
        for one in processes:
            one.kill()
    return [rank for rank, one in enumerate(processes) if one.returncode]


def _site(folder: Path) -> Path:
    """A folder whose ``.pth`` file Python reads at its start, as that of site-packages."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "megatron_dpp_autoload.pth").write_text(PTH_LINE)
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    return site


def compare(folder: Path, host: str, *, packs: bool) -> tuple[int, list[str]]:
    """Compare both runs of a folder line by line, and check that the dynamic schedule ran, with the
    lengths that the host had packed if it ``packs``. It refuses lengths that a microbatch does not
    have.

    Returns:
        The number of equal lines of numbers, and the stubs' names.

    Raises:
        AssertionError: lines differ, or the steps were not the dynamic schedule's.
    """
    num_equal, stubs = 0, set()
    for rank in range(RANKS):
        both, lines = _lines(folder, rank, *ARMS)
        differing = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
        assert not differing, f"rank {rank}: {differing[0][0]}\nbut dynamic: {differing[0][1]}"
        num_equal += len(lines[0])
        told = json.loads(both[1][-2].removeprefix("announced "))
        assert bool(told) == packs, f"rank {rank}: announced {told}"
        alike = all(len(set(sizes)) == 1 for sizes in told)
        assert not told or alike == HOSTS[host].alike, f"rank {rank}: announced {told}"
        stubs |= {name for one in both for name in json.loads(one[-1].partition(" ")[2])}
    (traced,) = (folder / "traces").glob("*-dpp")
    for file in open_run(traced):
        assert any(event["args"]["kind"] == "W" for event in read_events(file, ("task",)))
    return num_equal, sorted(stubs)


def _lines(folder: Path, rank: int, *arms: str) -> tuple[list[list[str]], list[list[str]]]:
    """All lines of a rank's records, and those with numbers, by arm."""
    every = [(folder / f"{arm}.{rank}").read_text().splitlines() for arm in arms]
    others = ("stubbed ", "announced ", "orders ", "time ")
    return every, [[line for line in one if not line.startswith(others)] for one in every]


def compare_planned(folder: Path, host: str) -> str:
    """Compare steps in planned orders with the host's schedule: in these orders bit by bit, and in
    the host's: equal until the first sum of gradients, the losses of that step, too. No step is
    planned of a host whose rows are alike; all of its lines are equal.

    Returns:
        What was compared.

    Raises:
        AssertionError: lines differ, or no step had another order than the host's.
    """
    num_equal, num_host, worst = 0, 0, 0.0
    for rank in range(RANKS):
        every, (own, planned, follows) = _lines(folder, rank, "own", "planned", "follows")
        orders = json.loads(every[1][-3].removeprefix("orders "))
        assert any(orders) != HOSTS[host].alike, f"rank {rank}: steps had the orders {orders}"
        assert planned == follows, f"rank {rank}: {_differing(planned, follows)}"
        num_equal += len(planned)
        first = len(own)
        if any(orders):
            first = next(n for n, line in enumerate(own) if line.startswith("gradients"))
        assert own[:first] == planned[:first], f"rank {rank}: {_differing(own, planned)}"
        assert own[first : first + 1] != planned[first : first + 1] or not orders[0]
        num_host += first
        values = [_NUMBER.findall("\n".join(one)) for one in (own, planned)]
        for (name, a), (other, b) in zip(*values, strict=True):
            assert name == other
            gap = abs(float(a) - float(b)) / max(1.0, abs(float(a)))
            worst = max(worst, gap)
    assert worst < 0.01, f"a number is {worst:.1e} from the host's"
    return (
        f"{num_equal} lines equal bit by bit in the planned orders, {num_host} before the first "
        f"update in the host's, later numbers within {worst:.1e}; last orders {orders}"
    )


_NUMBER = re.compile(r"([\w/()-]+:?) \[?(-?\d+\.\d[\de.+-]*)")


def _differing(one: Sequence[str], other: Sequence[str]) -> str:
    pairs = zip(one, other, strict=False)
    return "\nbut ".join(next(((a, b) for a, b in pairs if a != b), ("lengths differ",)))


def times(folder: Path, setting: Setting, turns: int) -> list[str]:
    """Time the steps of both runs in turns; a line for each kind of step."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(turns):
        for arm in ARMS:
            record = folder / f"{arm}.turn{turn}"
            run(setting, record, dynamic=arm == "dynamic")
            told: dict[str, list[float]] = defaultdict(list)
            for line in Path(f"{record}.0").read_text().splitlines():
                if line.startswith("time "):
                    what, _, took = line.removeprefix("time ").rpartition(": ")
                    told[what].append(float(took))
            for what, values in told.items():
                timed = values[len(values) * UNTIMED // setting.size.rollouts :]
                found[what][arm] += timed
                print(f"turn {turn}, {arm}, {what}: {timed} ms", flush=True)
    return [_row(what, *(one[arm] for arm in ARMS)) for what, one in found.items()]


def _row(what: str, own: Sequence[float], dynamic: Sequence[float]) -> str:
    """Medians with the spread, and the ratio of the medians."""
    middle = [statistics.median(one) for one in (own, dynamic)]
    cells = [f"{m:.0f} ({min(o):.0f} to {max(o):.0f})"
             for m, o in zip(middle, (own, dynamic), strict=True)]  # fmt: skip
    return f"{what} | {' | '.join(cells)} | {middle[1] / middle[0]:.3f}"


def _write_model(folder: Path, size: Size) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.plugin.real.kit", str(folder / "model")],
        check=True, cwd=REPOSITORY, env=os.environ | {"SIZE": size.text()},
        capture_output=True, timeout=TIMEOUT,
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("host", choices=sorted(HOSTS))
    parser.add_argument("--sources", type=Path, default=os.environ.get("DPP_HOSTS"))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--chunks", type=int, default=1, help="virtual stages per rank")
    parser.add_argument("--slices", default="", help="tokens of a slice, for both runs")
    parser.add_argument("--planned", action="store_true", help="compare planned orders")
    parser.add_argument("--keep", type=Path, help="a folder that keeps records, logs and traces")
    parser.add_argument("--time", action="store_true", help="time updates after the comparison")
    parser.add_argument("--turns", type=int, default=3)
    for name in ("layers", "hidden", "vocabulary", "samples", "median", "longest", "most"):
        own = getattr(TIMED, name)
        parser.add_argument(f"--{name}", type=int, default=own, help=f"of --time, {own} otherwise")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if args.sources is None or not packages(args.host, args.sources):
        sys.exit(f"{args.host}: no sources in {args.sources}/{args.host} (--sources, DPP_HOSTS)")
    device = args.device
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    size = ON_GPU if device == "cuda" else ON_CPU
    setting = Setting(args.host, args.sources, device, size, args.chunks, args.slices)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        _write_model(folder, size)
        if args.planned:
            setting = setting._replace(size=size._replace(samples=4 * size.samples))
            arms: dict[str, dict[str, str]] = {
                "own": {},
                "planned": {"DPP_CALL_ORDER": "planned"},
                "follows": {"FOLLOW": str(folder / "planned")},
            }
            for arm, more in arms.items():
                run(setting, folder / arm, dynamic=arm == "planned", PLANNED="1", **more)
            found = compare_planned(folder, args.host)
            print(f"{args.host}, {RANKS} ranks x {args.chunks} chunks: {found}")
            return
        for arm in ARMS:
            run(setting, folder / arm, dynamic=arm == "dynamic")
        packs = HOSTS[args.host].packs or bool(args.slices)
        num_equal, stubs = compare(folder, args.host, packs=packs)
        print(
            f"{args.host}, {RANKS} ranks x {args.chunks} chunks, {device}: {num_equal} lines equal "
            "bit by bit\nstubs: " + ", ".join(stubs), flush=True,
        )  # fmt: skip
        if args.time:
            size = TIMED._replace(**{name: value for name, value in vars(args).items()
                                     if name in Size._fields})  # fmt: skip
            _write_model(folder, size)
            rows = times(folder, setting._replace(size=size, timed=True), args.turns)
            print(f"{size}\n{args.host} | own ms | dynamic ms | dynamic / own\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
