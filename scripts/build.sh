#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json (default: release) and, where given, only the named targets;
# settings such as -DTESSERA_CUDA=OFF may be among them. Shows one line that moves, or a line for each tenth where the
# output is no terminal, and in full what the compiler has to say.
set -euo pipefail
cd "$(dirname "$0")/.."

preset="${1:-release}"
shift || true
settings=()
targets=()
for argument in "$@"; do
  if [[ "$argument" == -D* ]]; then settings+=("$argument"); else targets+=("$argument"); fi
done
[[ ${#targets[@]} -gt 0 ]] && targets=(--target "${targets[@]}")

folder=build
[[ "$preset" != release ]] && folder="build-$preset"

source scripts/ninja_progress.sh

cmake --preset "$preset" "${settings[@]}" >/dev/null
kernels="without kernels for GPUs"
grep -q '^TESSERA_CUDA:BOOL=ON' "$folder/CMakeCache.txt" && kernels="with kernels for GPUs"
echo "building $folder, $kernels"
SECONDS=0
log="$folder/build.log"
build() {
  NINJA_STATUS='[%f/%t] ' cmake --build --preset "$preset" "${targets[@]}" 2>&1 | tee "$log" | follow_ninja "$folder"
}
# Once in some thousand times GCC finds the place taken where a precompiled header must stand in memory.
build || { grep -q 'PCH allocation failure' "$log" && build; }
