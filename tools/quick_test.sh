#!/usr/bin/env bash
# In about two minutes: does training work on this machine? Looks at the environment, the devices
# and the links, then runs each mode that the machine can do for a few steps. One verdict per line;
# the exit code is the number of lines that say FAILED.
#
#   tools/quick_test.sh
#
# A run fails that prints nothing for five minutes: slow machines take longer, and lose no verdict.
# PYTHON names another interpreter to start from. A first set-up takes longer.
set -uo pipefail
if (($#)); then
  [[ $1 == -h || $1 == --help ]] ||
    { echo "quick_test.sh: error: takes no argument ($1)" >&2 && exit 2; }
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PYTHON=$(bash tools/setup.sh) || exit 1
export PYTHON
logs=$(mktemp -d)
failed=0
patience=300 # seconds without a new line
process=
trap '[[ -z $process ]] || kill "$process" 2>/dev/null; exit 130' INT TERM

verdict() {
  printf '%-9s %-22s %s\n' "$1" "$2" "$3"
  [[ $1 != FAILED ]] || failed=$((failed + 1))
}

# run NAME OPTION...: a few steps; the loss of the last must be below that of the first.
run() {
  local name=$1 start=$SECONDS code=0 losses
  local log=$logs/$1.log metrics=$logs/$1.jsonl
  shift
  : >"$log" # before the run opens it: its age is asked for at once
  "$PYTHON" train "$@" --model sample --num-layers 4 --batch-size 16 --max-steps 6 \
    --eval-iters 0 --lr 5e-4 --run-dir "$logs/$name" --metrics-file "$metrics" >"$log" 2>&1 &
  process=$!
  while kill -0 "$process" 2>/dev/null && (($(date +%s) - $(stat -c %Y "$log") <= patience)); do
    sleep 0.5
  done
  local silent=
  ! kill "$process" 2>/dev/null || silent=yes
  wait "$process" || code=$?
  process=
  if [[ $silent ]]; then
    verdict FAILED "$name" "no new line for $patience s (log: $log)"
    return
  elif ((code)); then
    verdict FAILED "$name" "$(grep -m 1 'error' "$log" | cut -c -90) (log: $log)"
    return
  fi
  losses=$("$PYTHON" - "$metrics" <<'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
losses = [row["loss"] for row in rows if "loss" in row]
print("ok" if losses[-1] < losses[0] else "FAILED", f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
PYTHON
  )
  verdict "${losses%% *}" "$name" "${losses#* } in $((SECONDS - start)) s"
}

if versions=$("$PYTHON" -c 'import sys, torch, megatron.core as m
print(f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, megatron-core {m.__version__}")' \
  2>"$logs/environment.log"); then
  verdict ok environment "$versions"
else
  verdict FAILED environment "$(tail -n 1 "$logs/environment.log")"
fi
gpus=$(command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -c '^GPU')
gpus=${gpus:-0}
verdict ok devices "$gpus GPUs, $(nproc) cores"
if "$PYTHON" -m megatron.dpp doctor >"$logs/doctor.log" 2>&1; then
  verdict ok links "$(grep -c ' note ' "$logs/doctor.log") notes (megatron-dpp doctor)"
else
  verdict FAILED links "see $logs/doctor.log"
fi

if ((gpus > 0)); then
  devices=(--gpus)
  count=$((gpus >= 4 ? 4 : gpus >= 2 ? 2 : 1))
else
  devices=(--procs)
  count=2
fi
run simple --mode simple "${devices[@]}" "$count"
if ((count > 1)); then
  run pipeline --mode 3d --pp 2 --chunks 2 "${devices[@]}" 2
  run tensor --mode 3d --tp 2 "${devices[@]}" 2
  for stage in 1 2 3; do
    run "zero-$stage" --mode deepspeed --zero-stage "$stage" "${devices[@]}" 2
  done
else
  verdict skipped "3d, zero" "need two GPUs"
fi
((failed)) || rm -r "$logs"
exit "$failed"
