"""The layers of a run that names none: Transformer Engine's, or the local ones."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.dpp.errors import ConfigError
from megatron.dpp_train.cost.device import known_gpu
from megatron.dpp_train.launch import cli
from megatron.dpp_train.launch.checked import checked
from megatron.dpp_train.launch.estimate_command import main as estimate
from megatron.dpp_train.launch.layers import default_layers
from megatron.dpp_train.launch.main import main, plan
from megatron.dpp_train.launch.resolve import Devices, asked_layout, base_flags, resolve
from megatron.dpp_train.launch.scripts import RECIPES, start
from megatron.dpp_train.options.arguments import parse_args
from tests.conftest import REPOSITORY

ARTIFICIAL = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255"
H100S = f"--dry-run --gpu H100 --gpus 8 {ARTIFICIAL}"
ENGINE = "transformer_engine"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for an installed Transformer Engine: files that nothing imports."""
    folder = tmp_path / "site" / ENGINE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('only looked for')")
    (folder.parent / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()
    return folder


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four H100, as ``nvidia-smi`` lists them."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\nfor i in 0 1 2 3; do case "$1" in\n'
        '-L) echo "GPU $i: NVIDIA H100 80GB HBM3";; *) echo "NVIDIA H100 80GB HBM3, 81559";; '
        "esac; done\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return script


def layers(words: str) -> tuple[str, str]:
    """The flag of a run of ``train``, and the line about it."""
    found = plan(f"{words} {H100S}".split())
    lines = [line for line in found.heading if line.startswith("layers: ")]
    return str(found.resolved.flags["--transformer-impl"]), "".join(lines)


@pytest.mark.parametrize(
    ("words", "of", "why"),
    [
        ("--mode 3d --pp 2 --chunks 2", ENGINE, "Transformer Engine is installed"),
        ("--mode 3d --pp 2 --tp 2", ENGINE, "overrides that"),
        ("--mode zero --zero-stage 1", ENGINE, "is installed"),
        ("--mode auto", ENGINE, "is installed"),
        ("--mode 3d --pp 2 --cp 2", ENGINE, "is installed"),
        ("--mode 3d --pp 2 --dpp-head-in-forward on", ENGINE, "is installed"),
        ("--mode zero --zero-stage 3", "local", "sharded by FSDP2"),
        ("--mode 3d --tp 2", "local", "CUDA graphs .* no tensor parallelism"),
        ("--mode 3d --pp 2 --dpp-cuda-graphs on --seq-length 1000", "local", "a multiple of 128"),
        ("--mode 3d --pp 2 --fp32", "local", "fp16 and bf16 alone"),
        ("--mode 3d --pp 2 --deterministic-mode", "local", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"),
        ("--mode 3d --pp 2 --reset-attention-mask", "local", "masks of documents"),
        ("--mode 3d --pp 2 --swiglu --residual-scale 0.5", "local", "--residual-scale is theirs"),
        ("--mode 3d --pp 2 --softmax-type off-by-one", "local", "--softmax-type off-by-one"),
        ("--mode 3d --pp 2 --dpp-slice-tokens 512", "local", "--dpp-slice-tokens 512: not run"),
    ],
)  # fmt: skip
def test_the_layers_of_a_run_that_names_none(
    words: str, of: str, why: str, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    name, line = layers(words)
    assert (name, line.partition(" (")[0]) == (of, f"layers: {of}")
    assert re.search(why, line), line


def test_a_plan_for_named_gpus_takes_transformer_engine_to_be_installed_there() -> None:
    """It named the local layers of this machine, and refused the ones that it said to ask for."""
    name, line = layers("--mode 3d --pp 2")
    assert name == ENGINE and "taken to be installed on the machine of the plan" in line
    assert layers(f"--mode 3d --pp 2 --transformer-impl {ENGINE}") == (ENGINE, "")
    assert layers("--mode 3d --pp 2 --fp8-format hybrid")[0] == ENGINE
    given = "--tflops 300 --memory 80 --bandwidth 2000 --gpus 4"
    found = plan(f"--mode 3d --pp 2 --dry-run {given} --use-precision-aware-optimizer "
                 f"{ARTIFICIAL} --use-distributed-optimizer".split())  # fmt: skip
    assert found.resolved.flags["--transformer-impl"] == ENGINE


def test_a_plan_for_named_gpus_needs_no_package_of_the_run() -> None:
    found = plan(f"--mode zero --zero-stage 2 --engine deepspeed {H100S}".split())
    assert found.resolved.flags["--deepspeed-zero-stage"] == 2


def test_a_run_on_this_machine_needs_the_package(
    gpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"--mode 3d --pp 2 --transformer-impl {ENGINE} {ARTIFICIAL}".split()) == 2
    assert "Transformer Engine, which is not installed; pip install" in capsys.readouterr().err
    found = plan(f"--mode 3d --pp 2 --dry-run {ARTIFICIAL}".split())
    assert "local (Trans" in found.resolved.notes[0]


def test_an_estimate_for_named_gpus_needs_no_package_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It refused Transformer Engine's layers, and FP8 with them."""

    def out(words: str, status: int = 0) -> str:
        model = "--model llama3-8b --seq-length 2048 --bf16 --ranks 4 "
        assert estimate((model + words).split()) == status
        text = capsys.readouterr()
        return text.err if status else text.out

    def weights(text: str) -> float:
        return float(text.partition("stage 0")[2].split()[0])

    assumed = "layers: transformer_engine (Transformer Engine is taken to be installed on"
    by_name = out("--gpu H100")
    assert by_name.startswith(assumed)
    engine = "--transformer-impl transformer_engine "
    assert out(f"--gpu H100 {engine}") == by_name.partition("\n")[2]
    assert out("--tflops 300 --memory 80 --bandwidth 2000").startswith(assumed)
    assert "this machine has no GPU; name those" in out(f"{engine}--memory 80 --tflops 300", 2)
    assert out("--gpu V100").startswith("layers: local (Transformer Engine needs a GPU from Amp")
    assert "layers:" not in out("--memory 80")
    narrow = out("--gpu H100 --fp8-format hybrid")
    assert "copies of the layers' weights are counted" in narrow
    in_layers = 32 * (4096 * 4096 * 2.5 + 3 * 4096 * 14336 + 2 * 4096) * 2  # two bytes each
    assert weights(narrow) - weights(by_name) == pytest.approx(in_layers / 2**30, abs=0.02)
    assert "A100 has no 8-bit matrix units" in out("--gpu A100 --fp8-format hybrid", 2)


@pytest.mark.parametrize("gpu", ["A100", "V100"])
def test_a_gpu_without_8_bit_units_is_told(gpu: str) -> None:
    with pytest.raises(ConfigError, match=f"--fp8-format hybrid: {gpu} has no 8-bit matrix units"):
        plan(f"--mode 3d --pp 2 --fp8-format hybrid --dry-run --gpu {gpu} {ARTIFICIAL}".split())


@pytest.mark.parametrize(
    ("words", "why"),
    [("--gpu V100 --gpus 8", "from Ampere on"), ("--procs 2", "")],
)  # fmt: skip
def test_a_device_that_cannot_run_the_kernels_has_local_layers(
    words: str, why: str, engine: Path
) -> None:
    found = plan(f"--mode 3d --pp 2 --fp16 --dry-run {words} {ARTIFICIAL}".split())
    assert found.resolved.flags["--transformer-impl"] == "local"
    assert bool(why) == any(why in line for line in found.heading if line.startswith("layers:"))


def test_a_package_without_its_extension_for_pytorch_is_not_installed(engine: Path) -> None:
    (extension,) = engine.parent.glob("*.so")
    extension.unlink()
    assert "taken to be installed" in layers("--mode 3d --pp 2")[1]
    (engine / "wheel_lib").mkdir()
    extension = engine / "wheel_lib" / extension.name
    extension.touch()
    assert "Transformer Engine is installed" in layers("--mode 3d --pp 2")[1]


@pytest.mark.parametrize("named", ["flag", "spec", "file", "own file"])
def test_layers_that_are_named_stay(named: str, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("transformer-impl: local\n")
    if named == "own file":
        own = (REPOSITORY / "configs" / "models" / "small.yaml").read_text()
        file.write_text(f"{own}spec: local\nmock-data: true\ntrain-iters: 1\n")
        words = f"--mode megatron --config {file}"
        found = plan(f"{words} --dry-run --gpu H100 --gpus 1".split())
    else:
        words = {
            "flag": "--transformer-impl local", "spec": "--spec local", "file": f"--config {file}"
        }[named]  # fmt: skip
        found = plan(f"--mode 3d --pp 2 {words} {H100S}".split())
    assert found.resolved.parsed.transformer_impl == "local" or named in ("spec", "own file")
    assert found.resolved.flags.get("--transformer-impl") in (None, "local")
    assert not any(line.startswith("layers:") for line in found.heading)


@pytest.mark.parametrize("saved", ["local", ENGINE])
def test_a_run_goes_on_with_the_layers_of_its_checkpoint(
    saved: str, engine: Path, tmp_path: Path
) -> None:
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    state = {"args": SimpleNamespace(transformer_impl=saved), "iteration": 3}
    torch.save(state, tmp_path / "iter_0000003" / "common.pt")
    (tmp_path / "iter_0000003" / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    args = parse_args(f"--bf16 --load {tmp_path}".split())
    found = default_layers(args, "gpt", on_gpu=True, is_ampere=True)
    assert found is not None and found.name == saved


def test_a_dry_run_names_the_layers_of_the_python_that_would_train(
    gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named those of the Python that it ran in."""
    package = tmp_path / "site" / ENGINE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "transformer_engine_torch.so").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("megatron.dpp_train.launch.scripts.set_up", lambda _: str(python))
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("PRECISION", "bf16")
    start(["gpt-sample", "node"])
    said = capsys.readouterr().out
    assert "layers: transformer_engine (Transformer Engine is installed)" in said
    assert f"--transformer-impl {ENGINE}" in said
    python.unlink()
    start(["gpt-sample", "node"])
    assert "layers: local (Transformer Engine is not installed)" in capsys.readouterr().out


MODELS = sorted(path.stem for path in (REPOSITORY / "configs" / "models").glob("*.yaml"))


@pytest.mark.parametrize("name", MODELS)
def test_every_models_flags_go_with_both_kinds_of_layers(name: str, engine: Path) -> None:
    h100 = known_gpu("H100")
    devices = Devices(per_node=8, num_nodes=1, on_gpu=True, device=h100)
    for more, of in (("", ENGINE), ("--transformer-impl local", "local")):
        words = f"--mode 3d --pp 4 --model {name} {more} {ARTIFICIAL}"
        options, rest = cli.parse(words.split())
        flags = base_flags(options, rest, devices)
        found = resolve(options, flags, devices, layout=asked_layout(options, flags), shard="none")
        assert checked(found, devices).transformer_impl == of


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("recipe", [*RECIPES, *(f"{name}-sample" for name in RECIPES)])
def test_every_preset_says_its_layers(
    recipe: str, installed: bool, engine: Path, gpus: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """BERT's are local, whatever is installed. A variable wins."""
    if not installed:
        next(engine.parent.glob("*.so")).unlink()
    monkeypatch.setenv("DRY_RUN", "1")
    monkeypatch.setenv("PYTHON", sys.executable)  # else .venv is looked for
    expected = ENGINE if installed and recipe.startswith("gpt") else "local"
    for given, of in (("", expected), ("local", "local")):
        monkeypatch.setenv("TRANSFORMER_IMPL", given)
        assert main(["--preset", recipe, "node"]) == 0
        text = capsys.readouterr().out
        command = text.splitlines()[-1]
        assert f"--transformer-impl {of} " in command
        assert (f"layers: {of} (" in text) == (not given)
    monkeypatch.delenv("TRANSFORMER_IMPL")
    assert main(["--preset", recipe, "node", "--transformer-impl", "local"]) == 0
    assert "--transformer-impl local" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setenv("TRANSFORMER_IMPL", "apex")
    assert main(["--preset", recipe, "node"]) == 2
    assert "TRANSFORMER_IMPL=apex: must be auto, local or" in capsys.readouterr().err
