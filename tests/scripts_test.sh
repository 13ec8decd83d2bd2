#!/usr/bin/env bash
# Tests what the scripts decide and show, without a build: usage tests/scripts_test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
failures=0

# expect WHAT FOUND WANTED: WANTED is a pattern.
expect() {
  # shellcheck disable=SC2053
  if [[ "$2" != $3 ]]; then
    printf '%s: found\n%s\nexpected\n%s\n' "$1" "$2" "$3" >&2
    failures=$((failures + 1))
  fi
}

fake_ninja() {
  local step
  for step in {0..30}; do
    echo "[$step/30] Building x$step.cc"
    if [[ $step -eq 7 ]]; then printf 'FAILED: x7.o\nx7.cc:1: error: no such thing\n'; fi
  done
  return 1
}

test_progress() {
  source scripts/ninja_progress.sh
  local output code=0
  output=$(fake_ninja | follow_ninja build-x) || code=$?
  expect "the build's exit code" "$code" 1
  expect "lines of progress" "$(grep -c 'of 30 steps' <<<"$output")" 10
  expect "the compiler's words" "$output" $'*FAILED: x7.o\nx7.cc:1: error: no such thing\n*'
  expect "no line for each step" "$output" '!(*Building*)'
}

# choice_of SMALL MEDIUM LARGE: the choice where a step of these models takes this many milliseconds.
choice_of() (
  folder_of_test=$(mktemp -d)
  trap 'rm -rf "$folder_of_test"' EXIT
  source scripts/demo.sh
  step_times=("$@")
  cd "$folder_of_test"
  mkdir demo
  echo '  "device": "a machine",' > demo/bench.json
  measure() {
    case "$1" in small) echo "${step_times[0]}" ;; medium) echo "${step_times[1]}" ;; large) echo "${step_times[2]}" ;; esac
  }
  choose >/dev/null
  cat demo/choice
)

# The time that a choice takes: steps * milliseconds, with validations.
seconds_of() {
  sed -nE 's/^# .* about ([0-9]+) s$/\1/p' <<<"$1"
}

test_sizes() {
  local choice
  choice=$(choice_of 120 450 1200)  # two cores with AVX2
  expect "a slow machine's model" "$choice" '# a machine: small model*--train.steps=818*'
  expect "its time" "$(seconds_of "$choice")" '9[0-9]'
  choice=$(choice_of 12 40 200)
  expect "a faster machine's" "$choice" '# a machine: medium model*--train.steps=2485*'
  expect "its time" "$(seconds_of "$choice")" '@(9[0-9]|100)'
  choice=$(choice_of 3 10 30)
  expect "a fast machine's" "$choice" '# a machine: large model*--train.steps=3318*'
  choice=$(choice_of 1 1 2)
  expect "no more than two passes over the text" "$choice" '*--train.steps=4000*'
  choice=$(choice_of 90000 90000 90000)
  expect "some steps on any machine" "$choice" '*--train.steps=20*'
}

test_arguments() {
  expect "--seconds without a number" "$(scripts/demo.sh --seconds x 2>&1 || echo "code $?")" \
    "demo: --seconds takes a number from 20 to 86400, found 'x'"$'\n''code 2'
  expect "--help" "$(scripts/demo.sh --help)" 'usage: scripts/demo.sh*'
}

# A repository with two sources, of which a.cc includes a.h; its clang-tidy finds fault with files that say BAD.
make_linted_repository() {
  mkdir -p scripts src/a build bin
  cp "$1"/scripts/{lint.sh,tidy.py,check_includes.py,check_cuda.py} scripts/
  sed -i '/^LAYERS = \[/,/^\]/c LAYERS = ["a"]' scripts/check_includes.py
  printf '#!/bin/sh\ncase "$*" in *--version*) echo 1;; *) ! cat "$4" | grep BAD;; esac\n' > bin/clang-tidy
  printf '#!/bin/sh\n' > bin/clang-format
  chmod +x bin/*
  touch .clang-tidy src/a/a.h
  echo '#include "a/a.h"' > src/a/a.cc
  echo 'int b;' > src/a/b.cc
  python3 - <<'PYTHON'
import json, os
json.dump([{"file": f"{os.getcwd()}/src/a/{name}.cc", "directory": "build", "command": "c++"} for name in "ab"],
          open("build/compile_commands.json", "w"))
PYTHON
  printf 'build\nbin\ncache\n' > .gitignore
  git init -q -b main
  git config user.email test@example.com
  git config user.name test
  git add .
  GIT_COMMITTER_DATE='2026-01-01T12:00Z' git commit -q -m first
}

test_lint() {
  local here=$PWD repository output
  repository=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$repository'" RETURN
  cd "$repository"
  make_linted_repository "$here"
  export TESSERA_TIDY_CACHE=$repository/cache
  local path=$PATH
  PATH=$repository/bin:$PATH

  expect "all sources at first" "$(scripts/lint.sh --all)" '*2 of 2 sources to check*'
  expect "none the second time" "$(scripts/lint.sh --all)" '*0 of 2 sources to check*'
  echo 'int a;' > src/a/a.h
  expect "those that include a changed header" "$(scripts/lint.sh --all)" '*1 of 2 sources to check*'
  echo 'int a, c;' > src/a/a.h
  expect "a changed header, by its source" "$(scripts/lint.sh --since HEAD)" '*lint: 1 files differ*1 of 1 sources*'
  echo 'int BAD;' > src/a/b.cc
  expect "a fault" "$(scripts/lint.sh --since HEAD 2>&1 || echo "code $?")" '*int BAD*code 1'
  expect "a fault is not remembered" "$(scripts/lint.sh --since HEAD 2>&1 || echo "code $?")" '*1 of 2 sources*code 1'
  expect "what the time did not suffice for" "$(scripts/lint.sh --since HEAD --seconds 0)" '*not checked within 0 s: src/a/b.cc*'
  GIT_COMMITTER_DATE='2026-01-03T12:00Z' git commit -q -a -m second
  expect "the commits of the last day" "$(scripts/lint.sh --seconds 0)" '*lint: 2 files differ from * (2026-01-0*'
  expect "an option that is none" "$(scripts/lint.sh --al 2>&1 || echo "code $?")" "lint: unknown option '--al'*code 2"
  PATH=$path
  cd "$here"
}

test_measure_house() {
  command -v ctags >/dev/null || { echo "measure_house: not tested, ctags is missing"; return; }
  local folder
  folder=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$folder'" RETURN
  { echo 'int many(int a, int b, int c, int d, int e, int f, int g, std::map<int, int> h, int i) {'
    for _ in {1..90}; do echo '  use(static_cast<size_t>(a));'; done
    echo '}'; } > "$folder/long.cc"
  printf '// A word.\n__global__ void __launch_bounds__(128) kernel(int x) {\n}\n' > "$folder/kernel.cu"
  printf 'int tested() {\n}\n' > "$folder/long_test.cc"
  local output
  output=$(tools/measure_house.py --long "$folder")
  expect "figures" "$output" '*| 47 / 92 / 92 | 1 | 1 | * | 1.1 % | * |*'
  expect "the long function" "$output" '*long.cc:1: many: 92 lines, 9 parameters*'
  expect "no tests" "$output" '!(*tested*)'
}

shopt -s extglob
test_progress
test_sizes
test_arguments
test_lint
test_measure_house
[[ $failures -eq 0 ]] && echo "all scripts' tests passed"
exit $((failures > 0))
