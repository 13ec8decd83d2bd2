#!/usr/bin/env bash
# From a clean clone to a trained model: installs what is missing, builds, takes the King James Bible (4.4 MB of prose,
# Debian package bible-kjv-text) as text, trains a Mixture-of-Experts language model of about 10 M active parameters for
# about two minutes on two cores, and lets it write. Everything lands in demo/; extra arguments go to `tessera train`.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/bootstrap.sh
if ! command -v bible >/dev/null; then
  as_root=()
  [[ $(id -u) -ne 0 ]] && as_root=(sudo)
  echo "installing bible-kjv"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bible-kjv >/dev/null
fi
scripts/build.sh release tessera

mkdir -p demo
if [[ ! -s demo/text.txt ]]; then
  # One verse a line; the references at the line starts go.
  bible -f 'gen1:1-rev22:21' </dev/null | sed -E 's/^[0-9]?[A-Za-z]+[0-9]+:[0-9]+ //' > demo/text.tmp
  mv demo/text.tmp demo/text.txt
fi
# BF16 where the processor multiplies it natively.
precision=f32
grep -q avx512_bf16 /proc/cpuinfo && precision=bf16

build/tessera train configs/demo.toml --train.precision="$precision" "$@"
echo
build/tessera generate demo/run --prompt "And it came to pass" --max-tokens 600 --temperature 0.7 --top-p 0.95
