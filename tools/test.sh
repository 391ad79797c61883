#!/usr/bin/env bash
# Set-up, checks and tests in one: what CI runs, and what should pass before a commit.
#
#   tools/test.sh [--long] [--gpu] [--rdma] [--coverage] [further arguments of pytest]
#
# Processes share the test files, one per core from 2 to 4, because most tests use one core or wait;
# -n N at the end sets another number. One process runs all with -n 0, with --gpu, --rdma or
# --coverage, and on machines with GPUs.
# --long runs the tests marked slow too; --gpu turns the skips of tests that find no GPU into
# failures. --rdma boots an emulated machine with soft-RoCE devices and tests RDMA in it, with --long
# training too (installs missing Debian packages). --coverage prints the lines of megatron/ that ran,
# in sub-processes too. Without it the last line is pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

required=()
arguments=()
coverage=
for argument in "$@"; do
  case $argument in
    --gpu) required+=(gpu multigpu) ;;
    --rdma) required+=(rdma) ;;
    --coverage) coverage=yes ;;
    -h | --help)
      sed -n '2,12s/^# \{0,1\}//p' tools/test.sh
      exit 0
      ;;
    *) arguments+=("$argument") ;;
  esac
done

PYTHON=$(bash tools/setup.sh --dev)
export PYTHON
bash tools/check.sh "$PYTHON"

if ((${#required[@]})); then
  DPP_REQUIRE=$(IFS=, && echo "${required[*]}")
  export DPP_REQUIRE
fi
# Hundreds of processes import the same modules, which an image may have told Python to compile anew.
unset PYTHONDONTWRITEBYTECODE
# Many processes share few cores in these tests; more threads in each only get in each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=false
if [[ ! $coverage ]]; then
  cores=$(nproc)
  processes=(-n $((cores < 2 ? 2 : cores > 4 ? 4 : cores)) --dist loadfile --no-loadscope-reorder)
  if ((${#required[@]})) || compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    processes=()
  fi
  exec "$PYTHON" -m pytest "${processes[@]}" "${arguments[@]}"
fi
rm -rf build/coverage && mkdir -p build/coverage
status=0
"$PYTHON" -m coverage run -m pytest "${arguments[@]}" || status=$?
"$PYTHON" -m coverage combine --quiet && "$PYTHON" -m coverage report
exit "$status"
