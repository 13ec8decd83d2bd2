#!/usr/bin/env bash
# Checks formatting of every C++ and CUDA file, and runs clang-tidy (warnings are errors) on the files that differ from
# the commit given by `--since`, the first 30 of them, or without it on all. Needs a configured build folder
# (scripts/build.sh).
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t sources < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
clang-format --dry-run --Werror "${sources[@]}"

if [[ "${1:-}" == "--since" ]]; then
  # Bounded, since a file takes 15 to 30 s.
  max_units=30
  mapfile -t units < <(git diff --name-only --diff-filter=d "$2" -- 'src/*.cc' 'bench/*.cc')
  if [[ ${#units[@]} -gt $max_units ]]; then
    echo "clang-tidy: only the first $max_units of ${#units[@]} changed files; scripts/lint.sh checks all"
    units=("${units[@]:0:$max_units}")
  fi
else
  mapfile -t units < <(git ls-files 'src/*.cc' 'bench/*.cc')
fi
[[ ${#units[@]} -eq 0 ]] && exit 0

# clang cannot read g++'s precompiled headers, and without them a missing include is found. Files that are compiled for
# several CPU levels are checked once, as for AVX2, with flags that clang knows.
mkdir -p build/tidy
python3 - <<'EOF'
import json, re
commands = [entry for entry in json.load(open("build/compile_commands.json")) if " -fno-weak " not in entry["command"]]
for entry in commands:
    entry["command"] = re.sub(r" -include \S*cmake_pch\.hxx", "", entry["command"])
json.dump(commands, open("build/tidy/compile_commands.json", "w"), indent=0)
EOF
printf '%s\0' "${units[@]}" | xargs -0 -n 4 -P "$(nproc)" clang-tidy -p build/tidy --quiet 2> >(grep -v 'warnings generated' >&2)
