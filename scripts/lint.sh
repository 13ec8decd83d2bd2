#!/usr/bin/env bash
# Checks formatting, the order of rooms and the rules for CUDA in the whole tree, and with clang-tidy and nvcc's front end
# (warnings are errors) the sources that changed. See usage below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: scripts/lint.sh [--since COMMIT | --all] [--seconds N]

Needs a configured build folder (scripts/build.sh). clang-tidy, and for kernels nvcc, check

  (default)         what this branch changed: against its upstream where it is ahead of that, otherwise in the commits
                    of the day up to the last one; and what is not committed
  --since COMMIT    what differs from COMMIT
  --all             every source: hours on two cores where nothing is remembered, to be run weekly
  --seconds N       begin no further source after N seconds; what is left is named

A source that passed is remembered by its content and costs nothing until it changes (scripts/tidy.py).
TEXT
}

refuse() {
  echo "lint: $1" >&2
  exit 2
}

since=""
all=""
limit=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --since)
      since=$(git rev-parse --verify --quiet "${2:-}^{commit}") || refuse "--since takes a commit, found '${2:-}'"
      shift ;;
    --all) all=1 ;;
    --seconds)
      [[ "${2:-}" =~ ^[0-9]{1,6}$ ]] || refuse "--seconds takes a number of seconds, found '${2:-}'"
      limit=(--seconds "$2")
      shift ;;
    --help | -h) usage; exit 0 ;;
    *) refuse "unknown option '$1'; see --help" ;;
  esac
  shift
done

# The commit with which the working tree is compared: see usage.
choose_base() {
  local base last
  if base=$(git merge-base HEAD '@{upstream}' 2>/dev/null) && [[ $base != $(git rev-parse HEAD) ]]; then
    echo "$base"
    return
  fi
  last=$(git log -1 --format=%ct)
  base=$(git rev-list -1 --first-parent --before=$((last - 24 * 3600)) HEAD)
  echo "${base:-$(git hash-object -t tree /dev/null)}"
}

# The changed files, those of the newest commits first: a limit of time then leaves the oldest.
list_changed() {
  {
    git diff --name-only HEAD
    git log --format= --name-only "$1..HEAD" 2>/dev/null || true
    git diff --name-only "$1"
  } | awk '!seen[$0]++' | grep -E '^(src|bench)/.*\.(cc|h|cu|cuh)$' | while read -r file; do
    if [[ -e "$file" ]]; then echo "$file"; fi
  done
}

mapfile -t sources < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"
scripts/check_includes.py
scripts/check_cuda.py

if [[ -n "$all" ]]; then
  mapfile -t files < <(git ls-files 'src/*.cc' 'src/*.cu' 'bench/*.cc')
else
  [[ -n "$since" ]] || since=$(choose_base)
  mapfile -t files < <(list_changed "$since")
  echo "lint: ${#files[@]} files differ from $(git log -1 --format='%h (%cs)' "$since" 2>/dev/null || echo "an empty tree")"
fi
[[ ${#files[@]} -eq 0 ]] || scripts/tidy.py "${limit[@]}" "${files[@]}"
