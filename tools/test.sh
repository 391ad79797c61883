#!/usr/bin/env bash
# Set-up, checks and tests in one: what CI runs, and what should pass before a commit.
#
#   tools/test.sh [--long] [--gpu] [--rdma] [further arguments of pytest]
#
# --long runs the tests marked slow too; --gpu turns the skips of tests that find no GPU into
# failures. --rdma boots an emulated machine with soft-RoCE devices and tests RDMA in it (about 8
# minutes where two cores are free; installs missing Debian packages). The last line is pytest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

required=()
arguments=()
for argument in "$@"; do
  case $argument in
    --gpu) required+=(gpu multigpu) ;;
    --rdma) required+=(rdma) ;;
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' tools/test.sh
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
# Many processes share few cores in these tests; more threads in each only get in each other's way.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m pytest "${arguments[@]}"
