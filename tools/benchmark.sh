#!/usr/bin/env bash
# The scaling table of this machine: tokens/s and speed-up over numbers of devices and modes. With
# GPUs GPT-2 345M, without any the sample model.
#
#   tools/benchmark.sh [options of megatron-dpp train]     # --model large, --max-steps 20, ...
#
# NUM_GPUS is the largest number of devices (default: all GPUs; 2 processes without any).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash tools/setup.sh)
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
devices=--gpus
model=medium
if ((gpus == 0)); then
  devices=--procs
  model=sample
fi
most=${NUM_GPUS:-$((gpus > 0 ? gpus : 2))}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
trap 'exit 130' INT
first=

# measure MODE NUMBER [OPTION...]: tokens/s of a short run, from the median of its later steps.
measure() {
  local mode=$1 number=$2 rate
  local directory=$runs/$1-$2
  shift 2
  PYTHON=$python python3 train "$devices" "$number" "${@}" --run-dir "$directory" >"$runs/log" 2>&1 ||
    { printf '%7s  %-9s %s\n' "$number" "$mode" "$(grep -m 1 error "$runs/log")" && return; }
  rate=$("$python" - "$directory/metrics.jsonl" <<'PYTHON'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rows = [row for row in rows if "loss" in row][3:]
print(round(rows[0]["tokens"] / statistics.median(row["ms"] for row in rows) * 1e3))
PYTHON
  )
  first=${first:-$rate}
  printf '%7s  %-9s %10s  %s\n' "$number" "$mode" "$rate" "$(awk "BEGIN{printf \"%.2f\", $rate/$first}")"
}

printf '%7s  %-9s %10s  %s\n' devices mode tokens/s speed-up
given=(--model "$model" --max-steps 12 --eval-iters 0 "$@")
for ((number = 1; number <= most; number *= 2)); do
  measure simple "$number" --mode simple "${given[@]}"
  ((number > 1)) || continue
  measure zero "$number" --mode deepspeed "${given[@]}"
  measure pipeline "$number" --mode 3d --pp "$number" "${given[@]}"
  measure tensor "$number" --mode 3d --tp "$number" "${given[@]}"
done
