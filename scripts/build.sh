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

clear_line() {
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
}

# show_progress DONE TOTAL
show_progress() {
  local tenth=$((10 * $1 / $2)) elapsed
  elapsed=$(printf '%d:%02d' $((SECONDS / 60)) $((SECONDS % 60)))
  if [[ -t 1 ]]; then
    printf '\r\033[Kbuilding %s: %d of %d steps, %d %%, %s' "$folder" "$1" "$2" $((100 * $1 / $2)) "$elapsed"
  elif [[ $tenth -gt $shown ]]; then
    echo "building $folder: $1 of $2 steps, $elapsed"
  fi
  shown=$tenth
}

# Ninja's lines "[done/total] ..." become progress; all others are for people.
follow_ninja() {
  local line shown=0
  while IFS= read -r line; do
    if [[ "$line" =~ ^\[([0-9]+)/([0-9]+)\]\  ]]; then
      show_progress "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    elif [[ "$line" != "ninja: "@(Entering|no work)* ]]; then
      clear_line
      printf '%s\n' "$line"
    fi
  done
  clear_line
}

cmake --preset "$preset" "${settings[@]}" >/dev/null
kernels="without kernels for GPUs"
grep -q '^TESSERA_CUDA:BOOL=ON' "$folder/CMakeCache.txt" && kernels="with kernels for GPUs"
echo "building $folder, $kernels"
SECONDS=0
NINJA_STATUS='[%f/%t] ' cmake --build --preset "$preset" "${targets[@]}" 2>&1 | follow_ninja
