#!/usr/bin/env bash
# Mutation testing: puts small faults into a copy of the code, and prints those that no test notices.
#
#   tools/mutation_test.sh                          # lines that differ from main
#   tools/mutation_test.sh --against BRANCH
#   tools/mutation_test.sh FILE ...                 # whole modules
#   tools/mutation_test.sh FILE ... --sample 50 --seed 1
#
# Files of csrc/ can be named too: their operators are in tools/mutation_cpp.py, and the extension is
# built with each fault, so build it in this tree first (setup.py build_ext --inplace).
#
# Each fault meets the tests of the module's room, or --tests PATH ... Your tree is never changed:
# tests run in a copy. cosmic-ray is installed into build/mutation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
package=cosmic-ray==8.7.0

python=$(bash tools/setup.sh --dev)
packages=build/mutation/packages
if [[ ! -e $packages/$package ]]; then
  rm -rf "$packages"
  "$python" -m pip install --quiet --target "$packages" "$package" >&2
  touch "$packages/$package"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
exec "$python" tools/mutation_test.py "$@"
