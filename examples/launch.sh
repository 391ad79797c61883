#!/usr/bin/env bash
# Starts a run from settings in the environment; what all launch scripts end with.
#
#   bash examples/launch.sh RECIPE ROLE [PATHS] [flags of the training script]
#   bash examples/launch.sh flags pretrain_gpt.py [its flags]
#
# RECIPE is gpt or bert, or with -sample the sizes of run_*.sh; ROLE is node, master or worker.
# `megatron-dpp env` (docs/environment.md) lists the settings; DRY_RUN=1 prints the command only.
set -euo pipefail
{ : >&2; } 2>/dev/null || exec 2>/dev/null # where it is closed, files would get its number
trap 'exit 130' INT # else bash goes on where Python takes Ctrl-C for a failure
export DPP_PROGRAM=${DPP_PROGRAM:-$0} # what errors begin with: the script that was called
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[[ -z ${PYTHONPATH:-} ]] || bash "$repository/tools/setup.sh" --path || exit
# Settings are checked before set-up, with any Python of at least 3.10; set-up says what is wrong
# where there is none.
can_check() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}
python=${PYTHON:-python3}
can_check "$python" || python=python3
can_check "$python" || python=$(bash "$repository/tools/setup.sh")
export PYTHONSAFEPATH=1 # else a random.py where it is called would be Python's
PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m megatron.dpp train --preset "$@"
