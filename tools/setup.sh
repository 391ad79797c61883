#!/usr/bin/env bash
# Makes everything ready to run: environment, requirements, C++ extension. Does only what is missing.
#
#   python=$(bash tools/setup.sh)          # prints the Python to use; says on stderr what it did
#   python=$(bash tools/setup.sh --dev)    # with what the tests need
#   python=$(bash tools/setup.sh --which)  # prints the Python to start from; does nothing
#   bash tools/setup.sh --path             # refuses a PYTHONPATH that hides this project
#
# It starts from PYTHON (3.10 or newer: the engine alone; 3.12 or newer: the trainer, too). Else it
# looks for a Python of at least 3.12: the active virtual environment if that has PyTorch, what
# build/python keeps, .venv, PATH, uv, and the folders of pyenv and conda.
# build/python keeps the first Python that was set up, and each one that PYTHON named.
# TORCH_INDEX_URL names an index of PyTorch.
set -euo pipefail
{ : >&2; } 2>/dev/null || exec 2>/dev/null # where it is closed, files would get its number
trap 'exit 130' INT # else bash goes on where Python takes Ctrl-C for a failure
export PYTHONUTF8=1 PYTHONIOENCODING=utf-8:surrogateescape # paths stay as they are in any locale
name=${DPP_PROGRAM:-$0} # of a launch script that starts this

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# A package with an __init__.py comes before the parts of one without, wherever they are.
set -f
IFS=:
for folder in ${PYTHONPATH:-}; do
  if [[ -e $folder/megatron/__init__.py ]]; then
    echo "${name##*/}: error: PYTHONPATH=$PYTHONPATH: $folder/megatron has an __init__.py, which hides" \
      "this project and megatron-core: take $folder out" >&2
    exit 2
  fi
done
unset IFS
set +f
[[ ${1:-} != --path ]] || exit 0

# is_new PYTHON [MINOR]: it runs (a shim can exist and fail), and is 3.MINOR or newer.
is_new() {
  "$1" -c "import sys; sys.exit(sys.version_info < (3, ${2:-12}))" 2>/dev/null
}

# Whether PATH's python3 belongs to a virtual or conda environment with PyTorch.
environment_is_active() {
  is_new python3 && python3 - 2>/dev/null <<'PYTHON'
import importlib.util, os, sys
environment = sys.prefix != sys.base_prefix or os.path.isdir(sys.prefix + "/conda-meta")
sys.exit(not (environment and importlib.util.find_spec("torch")))
PYTHON
}

# Prints the first Python of at least 3.12 on this machine.
find_python() {
  local each conda
  for each in python3 python3.12 python3.13 python3.14; do
    if is_new "$each"; then
      echo "$each"
      return
    fi
  done
  each=$(uv python find --no-project '>=3.12' 2>/dev/null) && is_new "$each" && echo "$each" && return
  conda=${CONDA_EXE:-/opt/conda/bin/conda}
  for each in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3 \
    {"${conda%/bin/conda}",/opt/conda,"${HOME:-}"/{miniconda3,anaconda3,miniforge3,mambaforge}}{,/envs/*}/bin/python3; do
    if [[ -x $each ]] && is_new "$each"; then
      echo "$each"
      return
    fi
  done
  return 1
}

python=${PYTHON:-}
apart=()
if [[ -z $python ]]; then
  kept=.venv/bin/python
  [[ ! -r $root/build/python ]] || read -r kept <"$root/build/python" || true
  [[ $kept == /* ]] || kept=$root/$kept
  [[ -f $kept && -x $kept ]] || kept=$root/.venv/bin/python
  if environment_is_active; then
    python=python3
  elif [[ -f $kept && -x $kept ]]; then
    python=$kept
  elif python=$(find_python); then
    [[ $python != /* ]] || apart=(--apart)
  else
    echo "${name##*/}: error: no Python 3.12 or newer was found ($(python3 -V 2>&1 || echo no python3)):" \
      "install one (uv python install 3.12, or pyenv install 3.12, or conda create -n dpp python=3.12)," \
      "or name one with PYTHON=" >&2
    exit 2
  fi
fi
if ! command -v "$python" >/dev/null; then
  echo "${name##*/}: error: '$python' is not there; install Python 3.12 or newer, or name one with PYTHON=" >&2
  exit 2
fi
if ! is_new "$python" 10; then
  echo "${name##*/}: error: $("$python" -V 2>&1) at $(command -v "$python") is too old:" \
    "Python 3.12 or newer is needed (the engine alone: 3.10); name one with PYTHON=" >&2
  exit 2
fi
if [[ ${1:-} == --which ]]; then
  exec "$python" -c 'import sys; print(sys.executable)'
fi
exec "$python" "$root/tools/setup_environment.py" ${PYTHON:+--keep} "${apart[@]}" "$@"
