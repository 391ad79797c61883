#!/usr/bin/env bash
# The scaling table of this machine: tokens/s, speed-up, efficiency and memory over numbers of
# devices and modes. With GPUs GPT-2 345M and GPT-3 1.3B, without any the sample model.
#
#   tools/benchmark.sh [--model NAME] [--devices 1,2,4] [--only MODE] [...]
#
# NUM_GPUS is the largest number of devices, without --devices. Arguments are profiling/bench_scaling.py's. Results go to benchmark/scaling.json.
# PYTHON names an interpreter that has everything; without it, set-up runs first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$(bash tools/setup.sh)}
mkdir -p benchmark
arguments=(--json benchmark/scaling.json "$@")
if ! command -v nvidia-smi >/dev/null || [[ -z $(nvidia-smi -L 2>/dev/null) ]]; then
  arguments+=(--cpu)
fi
exec "$PYTHON" profiling/bench_scaling.py "${arguments[@]}"
