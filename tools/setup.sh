#!/usr/bin/env bash
# Makes everything ready to run: environment, requirements, C++ extension. Does only what is missing.
#
#   python=$(bash tools/setup.sh)          # prints the Python to use; says on stderr what it did
#   python=$(bash tools/setup.sh --dev)    # with what the tests need
#
# PYTHON names another interpreter to start from; build/python keeps it for later set-ups without
# PYTHON. TORCH_INDEX_URL names an index to install PyTorch from.
set -euo pipefail

root=$(dirname "${BASH_SOURCE[0]}")/..
python=${PYTHON:-}
if [[ -z $python && -r $root/build/python ]]; then
  read -r python <"$root/build/python" || true
  [[ -x $python ]] || python=
fi
python=${python:-python3}
if ! command -v "$python" >/dev/null; then
  echo "error: '$python' is not there; install Python 3.10 or newer, or name one with PYTHON=" >&2
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "error: $("$python" -V 2>&1) at $(command -v "$python") is too old: Python 3.10 or newer is" \
    "needed; name one with PYTHON=" >&2
  exit 2
fi
exec "$python" "$root/tools/setup_environment.py" ${PYTHON:+--keep} "$@"
