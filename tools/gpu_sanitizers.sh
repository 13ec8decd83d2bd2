#!/usr/bin/env bash
# Runs the GPU tests of the operators under compute-sanitizer and prints what each operator got.
#
# usage: tools/gpu_sanitizers.sh [-a | -f FILTER] [-p build/tests/cuda_test] [-t "memcheck racecheck"] [-s SECONDS] [-j 8]
#                                [-b TESTS] [-o DIR]
#
#   -a  all tests, not only those of one tiny shape    -f  tests, as --gtest_filter
#   -p  the test program           -t  tools: memcheck, racecheck, synccheck, initcheck
#   -s  seconds that a process may take under a tool, 60 for tiny tests, 180 for others; it is ended then
#   -j  processes at a time        -b  tests of a process (tiny ones: as many as keep all processes busy; others: 1)
#   -o  a folder for the logs, kept (otherwise the logs of clean tests are lost)
#
# The tests whose names begin with "Tiny" put every kernel through all its phases in one launch, few enough for tools that
# slow a kernel down a thousand times; suites without such a test are named. A program takes many seconds to start under a
# tool, so a process runs several tests; where it does not end clean they run again by halves, until it is known which
# test is to blame. Other tests than tiny ones may not end in time. They are counted as unfinished: an operator of which
# no test ended fails the run, as do errors and failed tests. The tools watch all kernels, libraries' too: told to leave
# these out, racecheck itself fails beside cuBLASLt's.
set -euo pipefail

program=build/tests/cuda_test
tools="memcheck racecheck"
filter='*.Tiny*'
export limit=
jobs=8
batch=
out=
while getopts ap:t:f:s:j:b:o: option; do
  case $option in
    a) filter='*' ;;
    p) program=$OPTARG ;;
    t) tools=$OPTARG ;;
    f) filter=$OPTARG ;;
    s) limit=$OPTARG ;;
    j) jobs=$OPTARG ;;
    b) batch=$OPTARG ;;
    o) out=$OPTARG ;;
    *) exit 2 ;;
  esac
done

fail() {
  echo "gpu_sanitizers: $1" >&2
  exit 2
}

sanitizer=$(command -v compute-sanitizer || true)
for candidate in "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer}/compute-sanitizer; do
  [ -n "$sanitizer" ] || { [ -x "$candidate" ] && sanitizer=$candidate; }
done
[ -n "$sanitizer" ] || fail "there is no compute-sanitizer in PATH or in ${CUDA_HOME:-/usr/local/cuda}; it comes with CUDA"
[ -x "$program" ] || fail "there is no program $program; build the target cuda_test, or name it with -p"
export sanitizer program

list_tests() {
  "$program" --gtest_list_tests "--gtest_filter=$1" | awk '/^[^ ]/ { suite = $1; next } /^  / { print suite $1 }'
}
tests=$(list_tests "$filter")
[ -n "$tests" ] || fail "$program has no test that fits '$filter'"
probe=$("$program" "--gtest_filter=$(head -n 1 <<< "$tests")" 2>&1) || true
if grep -q "no GPU: " <<< "$probe"; then fail "$(grep -m 1 "no GPU: " <<< "$probe")"; fi

logs=${out:-$(mktemp -d)}
mkdir -p "$logs"
export logs
[ -n "$out" ] || trap 'rm -rf "$logs"' EXIT

# shellcheck disable=SC2317
# Leaves the result of each test under a tool in a file: clean, errors, failed or unfinished.
run_tests() {
  local tool=$1 log code=0 result test half
  shift
  log=$logs/$tool.${1//\//_}
  local options=(--tool "$tool" --error-exitcode 99 --print-limit 20)
  timeout "$limit" "$sanitizer" "${options[@]}" "$program" "--gtest_filter=$(IFS=:; echo "$*")" > "$log.log" 2>&1 ||
    code=$?
  case $code in
    0) result=clean ;;
    99) result=errors ;;
    124) result=unfinished ;;
    *) result=failed ;;
  esac
  if [ "$result" != clean ] && [ $# -gt 1 ]; then
    mv "$log.log" "$log.together.log"
    half=$(($# / 2))
    run_tests "$tool" "${@:1:half}"
    run_tests "$tool" "${@:half+1}"
    for test in "$@"; do
      if ! grep -q clean "$logs/$tool.${test//\//_}.result"; then return; fi
    done
    # Only together are they not clean, unless there was too little time.
    [ "$result" != unfinished ] || return 0
    mv "$log.together.log" "$log.log"
    set -- "$1"
  fi
  for test in "$@"; do
    echo "$result" > "$logs/$tool.${test//\//_}.result"
  done
}
export -f run_tests

num_tests=$(wc -l <<< "$tests")
if [ "$filter" = '*.Tiny*' ]; then
  : "${limit:=60}" "${batch:=$(((num_tests + jobs - 1) / jobs))}"
fi
: "${limit:=180}" "${batch:=1}"
SECONDS=0
# Neighbours, which take alike, go to different processes.
for tool in $tools; do
  awk -v tool="$tool" -v count="$(((num_tests + batch - 1) / batch))" \
    '{ of[NR % count] = of[NR % count] " " $0 } END { for (i in of) print tool of[i] }' <<< "$tests"
done | OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 xargs -P "$jobs" -L 1 bash -c 'run_tests "$@"' _

count() { cat "$logs/$1.$2".*.result 2> /dev/null | grep -c "^$3\$" || true; }

bad=0
printf '%-28s' "tests of"
for tool in $tools; do printf '%-34s' "$tool"; done
echo
for suite in $(cut -d . -f 1 <<< "$tests" | uniq); do
  printf '%-28s' "$suite"
  for tool in $tools; do
    line=
    for result in clean unfinished failed errors; do
      number=$(count "$tool" "${suite//\//_}" "$result")
      [ "$number" = 0 ] || line+="${line:+, }$number $result"
      case $result:$number in
        clean:0 | failed:[1-9]* | errors:[1-9]*) bad=1 ;;
      esac
    done
    printf '%-34s' "$line"
  done
  echo
done
echo "$num_tests tests, $SECONDS s, $batch a process of at most $limit s"
for tool in $tools; do
  unfinished=$(cd "$logs" && grep -l unfinished "$tool".*.result 2> /dev/null | sed "s/^$tool\.//; s/\.result$//") || true
  [ -z "$unfinished" ] || echo "unfinished under $tool: ${unfinished//$'\n'/ }"
done
if [ "$filter" = '*.Tiny*' ]; then
  without=$(comm -13 <(cut -d . -f 1 <<< "$tests" | sort -u) <(list_tests '*' | cut -d . -f 1 | sort -u))
  [ -z "$without" ] || echo "without a tiny test: ${without//$'\n'/ }"
fi
[ "$bad" = 1 ] || exit 0

for result in "$logs"/*.result; do
  grep -q "clean\|unfinished" "$result" && continue
  echo
  echo "$(basename "${result%.result}"): $(cat "$result")"
  grep -m 12 "=========\|Failure\|FAILED" "${result%.result}.log" || tail -n 12 "${result%.result}.log"
done
exit 1
