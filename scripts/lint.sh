#!/usr/bin/env bash
# Checks formatting of every C++ and CUDA file, and runs clang-tidy (warnings are errors) on the files that differ from
# the commit given by `--since`, or on all. Needs a configured build folder (scripts/build.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"

if [[ "${1:-}" == "--since" ]]; then
  mapfile -t units < <(git diff --name-only --diff-filter=d "$2" -- 'src/*.cc' 'bench/*.cc')
else
  mapfile -t units < <(git ls-files 'src/*.cc' 'bench/*.cc')
fi
[[ ${#units[@]} -eq 0 ]] && exit 0

# clang cannot read g++'s precompiled headers, and without them a missing include is found.
mkdir -p build/tidy
sed -E 's/ -include [^ ]*cmake_pch\.hxx//' build/compile_commands.json > build/tidy/compile_commands.json
printf '%s\0' "${units[@]}" | xargs -0 -n 4 -P "$(nproc)" clang-tidy -p build/tidy --quiet 2> >(grep -v 'warnings generated' >&2)
