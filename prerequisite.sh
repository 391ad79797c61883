#!/usr/bin/env bash
# Installs what is missing and builds the C++ extension. run_single_*.sh does this by itself too.
set -euo pipefail
bash "$(dirname "${BASH_SOURCE[0]}")/tools/setup.sh" "$@" >/dev/null
