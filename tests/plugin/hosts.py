"""Versions of Megatron-LM that the tests run, unpacked, and their runs on CPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.runtime.launcher import REPOSITORY, free_port, has_gpu, shared_gpus, start, wait

sys.path.insert(0, str(REPOSITORY / "profiling"))

import megatron_sources

SOURCES = Path(os.environ.get("DPP_MEGATRON_SOURCES", REPOSITORY.parent / "shared" / "megatron-lm"))
"""Archives ``NAME.tar.xz`` of Megatron-LM's sources, each with one folder ``NAME``, or folders."""
NEWEST = "main-2026-08-22"
WHEEL, SCRIPTS = "wheel", "core_v0.19.0"
"""The installed megatron-core with its training code, and the version whose scripts it runs."""
VERSIONS = ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0", WHEEL, NEWEST)
PACKAGES = ("six", "pydantic", "einops", "triton", "pybind11")
"""Packages that Megatron-LM's training code imports, and that its helpers are compiled with."""

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 3 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm"
)
ON_CPU = "--transformer-impl local --distributed-backend gloo --use-cpu-initialization"
ENGINE = "--transformer-impl transformer_engine --bf16 --deterministic-mode"
"""Flags of Transformer Engine's layers, with which :meth:`Hosts.run` takes GPUs."""
PP2X2 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
DYNAMIC = "--use-dpp --dpp-strict --dpp-policy dynamic"
_TIMEOUT = 170.0
_ON_GPU = {
    "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # fmt: skip
"""Settings that Megatron-LM's --deterministic-mode asks for."""


class Hosts:
    """Unpacks each version once.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._static: dict[tuple[str, str], Path] = {}

    @property
    def paths(self) -> list[Path]:
        """Further folders of the module path of a run."""
        return [self._folder]

    def static(self, version: str, num_ranks: int, flags: str) -> Path:
        """The record of a run with the host's own schedule, which later tests use again."""
        key = (version, flags)
        if key not in self._static:
            record = Path(tempfile.mkdtemp(dir=self._folder)) / "static"
            self.run(version, num_ranks, flags, record)
            self._static[key] = record
        return self._static[key]

    def unpacked(self, version: str) -> Path:
        """The folder of a version; skips the test where it cannot be had."""
        if version == WHEEL:
            return self._scripts_of_wheel()
        found = megatron_sources.find(SOURCES, version)
        if found is None:
            pytest.skip(f"no {version}.tar.xz in {SOURCES} (DPP_MEGATRON_SOURCES)")
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"Megatron-LM's training code needs {', '.join(missing)}")
        megatron_sources.for_old_python(self._folder)
        root = megatron_sources.unpacked(found, self._folder)
        self._add_helpers(root / "megatron" / "core" / "datasets")
        return root

    def _scripts_of_wheel(self) -> Path:
        """A folder with the scripts that wheels lack."""
        if importlib.util.find_spec("megatron.training") is None:
            pytest.skip("the installed megatron-core has no training code")
        scripts, folder = self.unpacked(SCRIPTS), self._folder / WHEEL
        folder.mkdir(exist_ok=True)
        for script in scripts.glob("*.py"):
            shutil.copy(script, folder)
        return folder

    def _add_helpers(self, datasets: Path) -> None:
        """Those of the installed megatron-core where the source is the same; else compiled without
        optimisation, once for all versions that have them alike."""
        source = datasets / "helpers.cpp"
        name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
        if (datasets / name).is_file():
            return
        import megatron.core.datasets

        installed = Path(megatron.core.datasets.__file__).parent
        built = installed / name
        if not built.is_file() or (installed / source.name).read_text() != source.read_text():
            built = self._folder / f"{hash(source.read_text())}-{name}"
        if not built.is_file():
            import pybind11

            include = (sysconfig.get_path("include"), pybind11.get_include())
            subprocess.run(
                ["c++", "-O0", "-shared", "-std=c++17", "-fPIC", *(f"-I{path}" for path in include),
                 str(source), "-o", str(built)],
                check=True,
            )  # fmt: skip
        (datasets / name).write_bytes(built.read_bytes())

    def run(
        self, version: str, num_ranks: int, flags: str, record: Path, *, fails: bool = False,
        script: str = "pretrain_gpt.py", model: str = MODEL,
    ) -> str:  # fmt: skip
        """Run a version's ``pretrain_gpt.py``, or another script of it; returns all output.
        ``model`` are the flags that all runs share.

        ``record`` and a rank's number name the file that ``entry.py`` writes.
        """
        root, on_gpu = self.unpacked(version), ENGINE in flags
        own = {
            "CUDA_DEVICE_MAX_CONNECTIONS": "8" if "fsdp" in flags else "1",
            "HOST": str(root / script),
            "RECORD": str(record),
        }
        words = f"{model} {'' if on_gpu else ON_CPU} {flags}".split()
        entry = Path(__file__).with_name("entry.py")
        if not has_gpu():
            path = os.pathsep.join(map(str, (root, REPOSITORY, *self.paths)))
            words = [json.dumps(own | {"PYTHONPATH": path}), str(entry), *words]
            script = Path(__file__).with_name("forked_run.py")
            finished = wait(start(script, num_ranks, words, preload="libraries"), _TIMEOUT)
            output = "\n".join(one.output for one in finished)
        else:
            processes = megatron_sources.start(
                root, entry, words, port=free_port(), ranks=num_ranks, log=record, paths=self.paths,
                more=[own | (_ON_GPU | shared_gpus(rank)[1] if on_gpu else {})
                      for rank in range(num_ranks)],
            )  # fmt: skip
            finished = wait(processes, _TIMEOUT)
            output = "\n".join(
                Path(f"{record}.{rank}.log").read_text(errors="replace")
                for rank in range(num_ranks)
            )
        assert fails or all(one.returncode == 0 for one in finished), output[-20000:]
        return output


def records(record: Path, num_ranks: int) -> list[list[str]]:
    """The lines that each rank has written."""
    return [Path(f"{record}.{rank}").read_text().splitlines() for rank in range(num_ranks)]
