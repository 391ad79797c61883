#!/usr/bin/env bash
# Lint, format and types of everything: changes nothing, fails at the end if anything was found.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-$(bash tools/setup.sh --dev)} || exit 1

failed=()
check() {
  local name=$1
  shift
  "$@" || failed+=("$name")
}
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check mypy "$python" -m mypy
mapfile -t scripts < <(git ls-files '*.sh' '.ci/run')
for script in "${scripts[@]}"; do
  check "bash -n $script" bash -n "$script"
done
if command -v shellcheck >/dev/null; then
  check shellcheck shellcheck "${scripts[@]}"
else
  echo "shellcheck is not installed: left out"
fi
mapfile -t sources < <(git ls-files 'csrc/*.cc' 'csrc/*.cpp' 'csrc/*.h')
if ((${#sources[@]} == 0)); then
  echo "no C++ sources: clang-format left out"
elif command -v clang-format >/dev/null; then
  check clang-format clang-format --dry-run --Werror "${sources[@]}"
else
  echo "clang-format is not installed: left out"
fi
if ((${#failed[@]})); then
  printf 'check failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
