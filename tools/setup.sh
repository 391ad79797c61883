#!/usr/bin/env bash
# Makes everything ready to run: environment, requirements, C++ extension. Does only what is missing.
#
#   python=$(bash tools/setup.sh)          # prints the Python to use; says on stderr what it did
#   python=$(bash tools/setup.sh --dev)    # with what the tests need
#   python=$(bash tools/setup.sh --which)  # prints the Python to start from; does nothing
#   bash tools/setup.sh --path             # refuses a PYTHONPATH that hides this project
#
# It starts from PYTHON, else from the active virtual environment if that has PyTorch, else from the
# Python that build/python keeps (.venv where that one is gone), else from PATH's python3.
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

# Whether PATH's python3 belongs to a virtual or conda environment with PyTorch.
environment_is_active() {
  python3 - 2>/dev/null <<'PYTHON'
import importlib.util, os, sys
environment = sys.prefix != sys.base_prefix or os.path.isdir(sys.prefix + "/conda-meta")
sys.exit(not (environment and importlib.util.find_spec("torch")))
PYTHON
}

python=${PYTHON:-}
if [[ -z $python ]]; then
  kept=.venv/bin/python
  [[ ! -r $root/build/python ]] || read -r kept <"$root/build/python" || true
  [[ $kept == /* ]] || kept=$root/$kept
  [[ -f $kept && -x $kept ]] || kept=$root/.venv/bin/python
  if [[ -f $kept && -x $kept ]] && ! environment_is_active; then
    python=$kept
  fi
fi
python=${python:-python3}
if ! command -v "$python" >/dev/null; then
  echo "${name##*/}: error: '$python' is not there; install Python 3.10 or newer, or name one with PYTHON=" >&2
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "${name##*/}: error: $("$python" -V 2>&1) at $(command -v "$python") is too old:" \
    "Python 3.10 or newer is needed; name one with PYTHON=" >&2
  exit 2
fi
if [[ ${1:-} == --which ]]; then
  exec "$python" -c 'import sys; print(sys.executable)'
fi
exec "$python" "$root/tools/setup_environment.py" ${PYTHON:+--keep} "$@"
