#!/usr/bin/env bash
# Lint, format, types and the site of docs/. Changes no source; fails at the end if anything was found.
#
#   tools/check.sh [--only CHECK] [PYTHON]    # the Python of tools/setup.sh when not given
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
only=
if [[ ${1:-} == --only ]]; then
  only=${2:?--only CHECK}
  shift 2
fi
python=${1:-$(bash tools/setup.sh --dev)} || exit 1
bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')

failed=()
names=()
check() {
  local name=$1
  shift
  names+=("$name")
  [[ -z $only || $only == "$name" ]] || return 0
  "$@" || failed+=("$name")
}
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
# Types, and versions without a line, depend on the packages that are here: those of the lock count.
locked=$(sed -n 's/^\(megatron-core\|torch\)==/\1 /p' requirements-lock.txt | paste -sd ' ')
here=$("$python" -c 'from importlib.metadata import version
print("megatron-core", version("megatron-core"), "torch", version("torch").partition("+")[0])')
with_the_lock() {
  if [[ $here == "$locked" ]]; then
    "$@"
  else
    echo "check.sh: $* is left out: it is for $locked, and $here is here"
  fi
}
check mypy with_the_lock "$python" -m mypy
check lock with_the_lock "$python" tools/lock.py --check
mapfile -t scripts < <(git ls-files '*.sh' '*.sbatch' '.ci/run')
# SC1091: it does not follow sourced files, which are in the list themselves.
check shellcheck "$bin/shellcheck" --exclude=SC1091 "${scripts[@]}"
# There is no hadolint for every platform.
hadolint() { [[ ! -x $bin/hadolint ]] || "$bin/hadolint" Dockerfile; }
check hadolint hadolint
mapfile -t sources < <(git ls-files 'csrc/*.cc' 'csrc/*.h')
check clang-format "$bin/clang-format" --dry-run --Werror "${sources[@]}"
# A dead link or a page that is missing from the navigation fails. The site is build/site.
check budget "$python" tools/budget.py
check mkdocs env NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict
if [[ -n $only && " ${names[*]} " != *" $only "* ]]; then
  echo "check.sh: error: --only $only: expected one of: $(printf '"%s" ' "${names[@]}")" >&2
  exit 2
fi
if ((${#failed[@]})); then
  printf 'check failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
