"""Run another project's training code on two CPU ranks, under its own schedule and the dynamic one.

    python -m tests.plugin.real.run verl --sources DIR [--chunks 2] [--slices 16] [--keep FOLDER]

With ``--slices`` the first of the two is Megatron's order of slices.
``DIR/HOST`` holds a folder per package of the host: an unpacked wheel or a checkout. Python must
have the packages that the host imports; ``docs/plugin.md`` has the list. Prints what was compared
and what was stubbed, and fails at the first line that differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatron.dpp.plugin_command import PTH_LINE
from megatron.dpp.report.reader import open_run, read_events
from tests.runtime.launcher import REPOSITORY, free_port

RANKS, TIMEOUT = 2, 900.0
DELAYS = "jitter:0.5,delay:3ms,message-delay:3ms"


class Host(NamedTuple):
    """A project whose training code calls megatron-core's schedules.

    Args:
        package: a module that its sources have.
        worker: the module beside this one that runs it.
        enters: how the plugin enters its workers, as variables.
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
        {"PTH": "1", "DPP_MAX_TOKENS": "96", "DPP_ACTIVATION_CAP": "static"},
        packs=True,
        alike=True,
    ),
    "slime": Host("slime", "slime_worker", {"FLAGS": _INIT, "USE_DPP": ""}, packs=True),
    "verl": Host(
        "verl",
        "verl_worker",
        {"VERL_USE_EXTERNAL_MODULES": "megatron.dpp.autoload", "DPP_MAX_TOKENS": "80"},
        packs=True,
    ),
}


def packages(host: str, sources: Path) -> list[Path]:
    """The folders that a host's packages are imported from; none where they are absent."""
    folders = [folder for folder in sorted((sources / host).glob("*")) if folder.is_dir()]
    roots = [folder / "src" if (folder / "src").is_dir() else folder for folder in folders]
    found = any((root / HOSTS[host].package).is_dir() for root in roots)
    return roots if found else []


def run(
    host: str, sources: Path, record: Path, chunks: int, *, dynamic: bool, slices: str = ""
) -> None:
    """Run a host on all ranks; ``record`` and a rank's number name the files of its numbers, and
    ``slices`` is the number of tokens of a slice.

    Raises:
        AssertionError: a rank failed, with its output.
    """
    path = [*map(str, packages(host, sources)), str(REPOSITORY)]
    if (dynamic or slices) and "PTH" in HOSTS[host].enters:
        path.insert(0, str(_site(record.parent)))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "RECORD": str(record),
        "MODEL": str(record.parent / "model"), "CHUNKS": str(chunks), "HOST": host,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MAKEFLAGS": f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    if dynamic:
        environment |= {
            "USE_DPP": "1", "DPP_STRICT": "1", "DPP_ANNOUNCE": "1", "DPP_INJECT": DELAYS,
            "DPP_TRACE": "1", "DPP_TRACE_DIR": str(record.parent / "traces"), **HOSTS[host].enters,
        }  # fmt: skip
    if slices:
        order = {} if dynamic else {"USE_DPP": "1", "DPP_STRICT": "1", "DPP_POLICY": "megatron"}
        environment |= {**HOSTS[host].enters, **order, "DPP_SLICE_TOKENS": slices}
    worker = f"tests.plugin.real.{HOSTS[host].worker}"
    processes = []
    for rank in range(RANKS):
        with Path(f"{record}.{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", worker],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
    try:
        failed = [rank for rank, one in enumerate(processes) if one.wait(TIMEOUT)]
    finally:
        for one in processes:
            one.kill()
    logs = [Path(f"{record}.{rank}.log").read_text(errors="replace")[-6000:] for rank in failed]
    assert not failed, "\n".join(logs)


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
        both = [(folder / f"{arm}.{rank}").read_text().splitlines() for arm in ("own", "dynamic")]
        lines = [list(filter(_is_number, one)) for one in both]
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


def _is_number(line: str) -> bool:
    return not line.startswith(("stubbed ", "announced "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("host", choices=sorted(HOSTS))
    parser.add_argument("--sources", type=Path, default=os.environ.get("DPP_HOSTS"))
    parser.add_argument("--chunks", type=int, default=1, help="virtual stages per rank")
    parser.add_argument("--slices", default="", help="tokens of a slice, for both runs")
    parser.add_argument("--keep", type=Path, help="a folder that keeps records, logs and traces")
    args = parser.parse_args()
    if args.sources is None or not packages(args.host, args.sources):
        sys.exit(f"{args.host}: no sources in {args.sources}/{args.host} (--sources, DPP_HOSTS)")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "tests.plugin.real.kit", str(folder / "model")],
            check=True, cwd=REPOSITORY, capture_output=True, timeout=TIMEOUT,
        )  # fmt: skip
        for arm in ("own", "dynamic"):
            dynamic = arm == "dynamic"
            run(
                args.host, args.sources, folder / arm, args.chunks,
                dynamic=dynamic, slices=args.slices,
            )  # fmt: skip
        packs = HOSTS[args.host].packs or bool(args.slices)
        num_equal, stubs = compare(folder, args.host, packs=packs)
    print(f"{args.host}, {RANKS} ranks x {args.chunks} chunks: {num_equal} lines equal bit by bit")
    print("stubs: " + ", ".join(stubs))


if __name__ == "__main__":
    main()
