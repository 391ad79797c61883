#!/usr/bin/env bash
# A soak: two ranks train under random signals, stops, blackouts and full disks. Each job has to end
# by itself in time, to name the culprit, and to leave nothing; the losses have to be an undisturbed
# run's. Memory, descriptors and threads have to stay flat.
#
#   tools/soak.sh [HOURS] [--seed N]
#
# Default: a third of an hour. The last lines are tables; the exit code is 1 where anything was not
# as it has to be. Blackouts and full disks need root: network namespaces and a tmpfs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi
PYTHON=${PYTHON:-$(bash tools/setup.sh --dev)}
own=()
if [[ $(id -u) == 0 ]] && unshare --mount true 2>/dev/null; then # another's files are not what a job left
  own=(unshare --mount bash -c 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' soak)
fi
exec "${own[@]}" "$PYTHON" -m tests.soak "$@"
