"""Finds or makes the Python environment, installs missing packages, builds the C++ extension.

``tools/setup.sh`` runs it for ``run_*.sh``, ``tools/test.sh`` and ``prerequisite.sh``. It prints
the path of the Python to use on stdout and one line about what it did on stderr. A second run looks
at versions and at a hash of the sources and does nothing. Only the standard library is imported,
because nothing else need be there yet.

Which environment: the one at hand when PyTorch is installed in it (which is then never replaced),
else ``.venv``. Where the one at hand must not be written to, ``.venv`` is laid over it. The first
choice other than ``.venv``, and each with ``--keep``, is noted in ``build/python``, where
``tools/setup.sh`` looks.
"""

from __future__ import annotations

import sys

try:
    import argparse
    import contextlib
    import fcntl
    import hashlib
    import importlib.metadata
    import json
    import os
    import shutil
    import subprocess
    import sysconfig
    import time
    from dataclasses import asdict, dataclass, replace
    from pathlib import Path
    from typing import IO
except KeyboardInterrupt:  # Ctrl-C at any time is no traceback
    sys.exit(130)

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
KEPT = BUILD / "python"
LOG = BUILD / "setup.log"
TORCH_WHERE_NONE_IS = "torch==2.13.0"

# Held at the installed version while other packages are installed: they go with the user's PyTorch.
_KEPT_PACKAGES = ("numpy", "torch", "torchaudio", "torchvision", "transformer-engine", "triton")


class SetupFailed(Exception):
    """The user has to do something, which the text names."""


@dataclass(frozen=True)
class Environment:
    """A Python interpreter; ``missing`` holds the requirement lines that it does not meet, ``core``
    the version of megatron-core. It ``trains`` from Python 3.12 on."""

    python: str
    extension_suffix: str
    has_headers: bool
    is_writable: bool
    torch: str | None
    missing: list[str]
    core: str | None = None
    trains: bool = True


def describe(requirement_files: list[str]) -> Environment:
    """Describes the running interpreter."""
    purelib = Path(sysconfig.get_path("purelib"))
    in_venv = sys.prefix != sys.base_prefix
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    return Environment(
        python=sys.executable,
        extension_suffix=sysconfig.get_config_var("EXT_SUFFIX"),
        has_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        is_writable=os.access(purelib, os.W_OK) and (in_venv or not marker.exists()),
        torch=_installed_version("torch"),
        missing=[line for line in _requirements(requirement_files) if not _is_met(line)],
        core=_installed_version("megatron-core"),
        trains=sys.version_info >= (3, 12),
    )


def _requirements(files: list[str]) -> list[str]:
    lines = [
        line.strip()
        for file in files
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_met(line: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        return True
    version = _installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def inspect(python: str, requirement_files: list[str]) -> Environment:
    """Asks another interpreter to describe itself."""
    command = [python, __file__, "--describe", *requirement_files]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SetupFailed(f"{python} does not work: {result.stderr.strip()[-500:]}")
    return Environment(**json.loads(result.stdout))


def existing_environment(
    at_hand: Environment, requirement_files: list[str], *, anew: bool
) -> Environment | None:
    """The environment at hand, the one that was kept (unless ``anew``) or ``.venv``, whichever can
    be used first; None if none can."""
    if at_hand.torch and (at_hand.is_writable or not at_hand.missing):
        return at_hand
    kept = [ROOT / _kept()] if has_kept() and not anew else []
    there = [python for python in (*kept, VENV_PYTHON) if can_run(python)]
    return inspect(str(there[0]), requirement_files) if there else None


def choose_environment(
    requirement_files: list[str], *, anew: bool, apart: bool = False
) -> tuple[Environment, list[str]]:
    """The environment to use, made when needed, and what was done for it."""
    at_hand = describe(requirement_files)
    if apart:  # of nobody's PATH: nothing is written into it
        at_hand = replace(at_hand, is_writable=False)
    found = existing_environment(at_hand, requirement_files, anew=anew)
    if found:
        return found, []
    command = [sys.executable, "-m", "venv", str(VENV_PYTHON.parents[1])]
    if at_hand.torch:
        command.append("--system-site-packages")
    try:
        run_logged(command, "python -m venv failed (on Debian it needs the package python3-venv)")
    except SetupFailed:
        shutil.rmtree(VENV_PYTHON.parents[1], ignore_errors=True)
        raise
    return inspect(str(VENV_PYTHON), requirement_files), ["made .venv"]


def install(environment: Environment) -> list[str]:
    """Installs the missing requirements with pip and leaves PyTorch as it is."""
    missing = environment.missing
    if not missing:
        return []
    torch_lines = [line for line in missing if line.startswith("torch>")]
    if torch_lines and environment.torch:
        raise SetupFailed(
            f"PyTorch {environment.torch} of {environment.python} is not {torch_lines[0]}, and "
            "set-up replaces no PyTorch: upgrade it, or name another interpreter with PYTHON="
        )
    say(f"installing {', '.join(missing)} (log: {LOG})")
    if torch_lines:
        index = os.environ.get("TORCH_INDEX_URL")
        _pip_install(environment, [TORCH_WHERE_NONE_IS, *(["--index-url", index] if index else [])])
    others = [line for line in missing if line not in torch_lines]
    if others:
        _pip_install(environment, ["--constraint", str(_write_constraints(environment)), *others])
    return [f"installed {len(missing)} packages"]


def _pip_install(environment: Environment, arguments: list[str]) -> None:
    command = [environment.python, "-m", "pip", "install", *arguments]
    run_shown(command, f"pip could not install {' '.join(arguments)}")


def _write_constraints(environment: Environment) -> Path:
    listing = subprocess.run(
        [environment.python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True
    )
    packages = json.loads(listing.stdout or "[]")
    kept = [
        f"{package['name']}=={package['version']}\n"
        for package in packages
        if package["name"].lower() in _KEPT_PACKAGES or package["name"].startswith("nvidia-")
    ]
    path = BUILD / "constraints.txt"
    path.write_text("".join(kept), encoding="utf-8")
    return path


def source_digest(environment: Environment) -> str:
    """Hash of everything the extension is built from."""
    digest = hashlib.sha256()
    sources = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
    for path in [*sources, ROOT / "setup.py"]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    settings = [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")]
    digest.update("\0".join([environment.extension_suffix, *settings]).encode())
    return digest.hexdigest()


def extension_is_stale(environment: Environment) -> bool:
    """True if sources or settings differ from those of the last build, or its files are gone."""
    if not (ROOT / "setup.py").is_file():
        return False
    try:
        stamp = json.loads(_stamp_path(environment).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    is_same = stamp.get("digest") == source_digest(environment)
    return not is_same or not all((ROOT / name).exists() for name in stamp["files"])


def _stamp_path(environment: Environment) -> Path:
    return BUILD / f"extension{environment.extension_suffix}.json"


def check_compiler(environment: Environment) -> None:
    """Raises :class:`SetupFailed` when the extension could not be built."""
    compiler = (os.environ.get("CXX", "").split() or ["g++"])[0]
    if shutil.which(compiler) is None:
        raise SetupFailed(
            f"no C++ compiler: '{compiler}' is not in PATH, and the extension in csrc/ has to be "
            "built. Install one (apt-get install g++, dnf install gcc-c++) or name one with CXX="
        )
    if not environment.has_headers:
        raise SetupFailed(
            f"Python.h of {environment.python} is missing, and the extension in csrc/ has to be "
            "built. Install the headers (apt-get install python3-dev, dnf install python3-devel)"
        )


def build_extension(environment: Environment) -> list[str]:
    """Builds in place and notes what was built from what."""
    start = time.monotonic()
    say(f"building the C++ extension (log: {LOG})")
    stamp_path = _stamp_path(environment)
    stamp_path.unlink(missing_ok=True)
    digest = source_digest(environment)
    command = [environment.python, "setup.py", "build_ext", "--inplace", "--force"]
    run_logged(command, "the C++ extension could not be built")
    built = (ROOT / "megatron" / "dpp").rglob(f"*{environment.extension_suffix}")
    files = sorted(str(path.relative_to(ROOT)) for path in built)
    if not files:
        raise SetupFailed(f"setup.py built no *{environment.extension_suffix}; see {LOG}")
    stamp_path.write_text(json.dumps({"digest": digest, "files": files}), encoding="utf-8")
    return [f"built the extension in {time.monotonic() - start:.0f} s"]


def read_flags(environment: Environment, done: list[str]) -> list[str]:
    """Keeps a table of Megatron's flags, by which ``train`` checks a command line at once."""
    if any(BUILD.glob("flags-*.json")) and not done:
        return []
    found = inspect(environment.python, ["requirements.txt"])  # packages may have come just now
    module = "megatron.dpp_train.presets.flag_table"
    if not (found.trains and found.core and (ROOT / f"{module.replace('.', '/')}.py").is_file()):
        return []
    run_logged([environment.python, "-m", module], "Megatron's flags could not be read")
    return ["read Megatron's flags"]


def run_logged(command: list[str], complaint: str) -> None:
    with LOG.open("a", encoding="utf-8", errors="backslashreplace") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        result = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        tail = "\n".join(LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        raise SetupFailed(f"{complaint}; the end of {LOG}:\n{tail}")


def run_shown(command: list[str], complaint: str) -> None:
    """Runs pip, which shows its progress on stderr and adds to the log by itself."""
    result = subprocess.run([*command, "--log", str(LOG)], cwd=ROOT, stdout=sys.stderr)
    if result.returncode != 0:
        raise SetupFailed(f"{complaint}; pip says why above, and in {LOG}")


def take_lock() -> IO[str]:
    """Waits until no other set-up of this clone runs. The lock goes away with its process.

    Raises:
        OSError: the clone cannot be written to.
    """
    BUILD.mkdir(exist_ok=True)
    lock = (BUILD / "setup.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up of this clone")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def link_command(environment: Environment) -> None:
    """Puts ``megatron-dpp`` into ``.venv``, so that an activated shell finds it."""
    command = VENV_PYTHON.with_name("megatron-dpp")
    if environment.python == str(VENV_PYTHON) and not command.is_symlink():
        command.unlink(missing_ok=True)
        command.symlink_to("../../megatron-dpp")


def check_ready(requirement_files: list[str], why: OSError, *, anew: bool) -> Environment:
    """The environment of a clone that cannot be written to, where everything is there already.

    Raises:
        SetupFailed: there is something to do.
    """
    environment = existing_environment(describe(requirement_files), requirement_files, anew=anew)
    kept = _kept() if KEPT.is_file() else ""
    if environment is None and kept and not can_run(ROOT / kept):
        raise SetupFailed(
            f"this user may not run {kept}, which {KEPT} keeps: name a Python that has everything "
            "with PYTHON=, or take a clone of your own"
        )
    if environment is None:
        to_do = "make .venv"
    elif environment.missing:
        to_do = f"install {', '.join(environment.missing)}"
    elif extension_is_stale(environment):
        to_do = "build the C++ extension"
    else:
        return environment
    raise SetupFailed(
        f"{why.filename or BUILD}: {why.strerror}, and set-up has to {to_do}: run tools/setup.sh "
        "where the clone can be written to"
    )


def can_run(python: Path) -> bool:
    """True for a program of this user's; False also in a folder that they may not enter."""
    return os.path.isfile(python) and os.access(python, os.X_OK)


def _kept() -> str:
    return os.fsdecode(KEPT.read_bytes()).strip()


def has_kept() -> bool:
    """True if ``build/python`` names an interpreter that is still there, and can be run."""
    return KEPT.is_file() and can_run(ROOT / _kept())


def keep(environment: Environment) -> None:
    """Notes the environment in ``build/python``, at once: others read the file without the lock.

    A path in the clone is noted relative to it, so that a copy of the clone has its own.

    Raises:
        SetupFailed: it cannot be written.
    """
    path, scratch = Path(environment.python), KEPT.with_name(f".python-{os.getpid()}")
    line = os.fsencode(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path) + b"\n"
    try:
        if KEPT.is_file() and KEPT.read_bytes() == line:
            return
        scratch.write_bytes(line)
        scratch.replace(KEPT)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise SetupFailed(f"{KEPT}: {error.strerror}; the earlier choice is kept") from error


def set_up(
    requirement_files: list[str], *, anew: bool, apart: bool = False
) -> tuple[Environment, list[str]]:
    """Runs the missing steps; returns the environment and the steps that were run.

    Args:
        anew: choose the environment without regard to the one that was kept, and keep it.
        apart: the Python at hand may be used, and not be written to.

    Raises:
        SetupFailed: a compiler, a package or an environment cannot be had.
    """
    environment, done = choose_environment(requirement_files, anew=anew, apart=apart)
    is_stale = extension_is_stale(environment)
    if is_stale:
        check_compiler(environment)  # before minutes of downloads
    done += install(environment)
    if is_stale:
        done += build_extension(environment)
    done += read_flags(environment, done)
    link_command(environment)
    if anew or not (has_kept() or can_run(VENV_PYTHON)):
        keep(environment)
    return inspect(environment.python, requirement_files) if done else environment, done


def set_up_alone(
    requirement_files: list[str], *, anew: bool, apart: bool = False
) -> tuple[Environment, list[str]]:
    """:func:`set_up` under the lock; where none can be had, only looks."""
    try:
        lock = take_lock()
    except OSError as error:
        return check_ready(requirement_files, error, anew=anew), []
    with lock:
        return set_up(requirement_files, anew=anew, apart=apart)


def say(text: str) -> None:
    """Print a line for the user, who may have no room for it: set-up does its work all the same."""
    with contextlib.suppress(OSError):
        os.write(2, f"set-up: {text}\n".encode(errors="surrogateescape"))


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dev", action="store_true", help="install what the tests need too")
    parser.add_argument("--quiet", action="store_true", help="say nothing if nothing was to do")
    parser.add_argument("--keep", action="store_true", help="use this Python from now on")
    parser.add_argument("--apart", action="store_true", help="write nothing into this Python")
    parser.add_argument("--describe", nargs="+", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.describe:
        print(json.dumps(asdict(describe(args.describe))))
        return 0
    files = ["requirements.txt", *(["requirements-dev.txt"] if args.dev else [])]
    try:
        environment, done = set_up_alone(files, anew=args.keep, apart=args.apart)
    except SetupFailed as error:
        name = Path(os.environ.get("DPP_PROGRAM") or "setup.sh").name  # of a launch script
        print(f"{name}: error: set-up: {error}", file=sys.stderr)
        return 2
    what = ", ".join(done) or "nothing to do"
    using = f"using {environment.python}, PyTorch {environment.torch}"
    if done or not args.quiet:
        say(f"{what}; {using} ({time.monotonic() - start:.1f} s)")
    print(environment.python)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
