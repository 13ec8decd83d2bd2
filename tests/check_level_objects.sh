#!/usr/bin/env bash
# check_level_objects.sh LIST [BASELINE]: whether the objects in the file LIST, which are compiled for CPU levels above
# the program's own, leave the rest of the program alone. What they define for others must bear the level's name:
# the linker could otherwise take their copy of an inline function for all callers, and the program would end with
# SIGILL on lesser processors. The object BASELINE, which runs on any processor, must have no AVX.
set -euo pipefail

failures=0
fail() {
  echo "$1"
  failures=$((failures + 1))
}

mapfile -t objects < "$1"
[[ ${#objects[@]} -gt 0 && -n "${objects[0]}" ]] || { echo "no objects in $1"; exit 1; }
for object in "${objects[@]}"; do
  symbols=$(nm -C --defined-only "$object" | cut -d' ' -f2-)
  # GCC's references to types and the handler of exceptions, and the empty objects of std::ranges, have no code.
  shared=$(grep -E '^[A-Zu] ' <<< "$symbols" | grep -vE '_avx512(bf16)?(\(|$)|::avx512(bf16)?::' |
    grep -vE '^V DW\.ref\.|^C std::ranges::[a-z_]+$' || true)
  [[ -z "$shared" ]] || fail "$object defines for others:"$'\n'"$shared"
  # A copy of a type is another type to catch, a copy of a static variable is another variable, and constructors of
  # static variables run on every processor.
  copies=$(grep -E 'typeinfo for tessera::[A-Za-z0-9_:]+$|guard variable for|_GLOBAL__sub_I|__tls_init' \
    <<< "$symbols" || true)
  [[ -z "$copies" ]] || fail "$object has copies of:"$'\n'"$copies"
done
if [[ $# -gt 1 ]]; then
  vectors=$(objdump -d --no-show-raw-insn "$2" | grep -E $'\tv[a-z0-9]+ |%[yz]mm' | head -5 || true)
  [[ -z "$vectors" ]] || fail "$2 uses AVX:"$'\n'"$vectors"
fi
echo "${#objects[@]} objects, $failures faults"
[[ $failures -eq 0 ]]
