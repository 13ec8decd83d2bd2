#!/usr/bin/env bash
# Runs the GPU tests of the operators under compute-sanitizer, one process a test, and prints what each operator got.
#
# usage: tools/gpu_sanitizers.sh [-a | -f FILTER] [-p build/tests/cuda_test] [-t "memcheck racecheck"] [-s 60] [-j 8]
#                                [-o DIR]
#
#   -a  all tests, not only those of one tiny shape    -f  tests, as --gtest_filter
#   -p  the test program           -t  tools: memcheck, racecheck, synccheck, initcheck
#   -s  seconds that a test may take under a tool; it is ended then
#   -j  tests at a time            -o  a folder for the logs, kept (otherwise the logs of clean tests are lost)
#
# The tests whose names begin with "Tiny" put every kernel through all its phases in one launch, few enough for tools that
# slow a kernel down a thousand times; suites without such a test are named. Of the other tests those of large shapes may
# not end in time. They are counted as unfinished: an operator of which no test ended fails the run, as do errors and
# failed tests. Racecheck watches our own kernels alone, not those of libraries; the other tools watch all.
set -euo pipefail

program=build/tests/cuda_test
tools="memcheck racecheck"
filter='*.Tiny*'
export limit=60
jobs=8
out=
while getopts ap:t:f:s:j:o: option; do
  case $option in
    a) filter='*' ;;
    p) program=$OPTARG ;;
    t) tools=$OPTARG ;;
    f) filter=$OPTARG ;;
    s) limit=$OPTARG ;;
    j) jobs=$OPTARG ;;
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
# Leaves the result of a test under a tool in a file: clean, errors, failed or unfinished.
run_test() {
  local tool=$1 test=$2 log code=0 result
  log=$logs/$tool.${test//\//_}
  local options=(--tool "$tool" --error-exitcode 99 --print-limit 20)
  [ "$tool" != racecheck ] || options+=(--kernel-name kernel_substring=tessera)
  timeout "$limit" "$sanitizer" "${options[@]}" "$program" "--gtest_filter=$test" > "$log.log" 2>&1 || code=$?
  case $code in
    0) result=clean ;;
    99) result=errors ;;
    124) result=unfinished ;;
    *) result=failed ;;
  esac
  echo "$result" > "$log.result"
}
export -f run_test

SECONDS=0
for tool in $tools; do
  while read -r test; do printf '%s %s\n' "$tool" "$test"; done <<< "$tests"
done | OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 xargs -P "$jobs" -L 1 bash -c 'run_test "$0" "$1"'

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
echo "$(wc -l <<< "$tests") tests, $SECONDS s, at most $limit s each"
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
