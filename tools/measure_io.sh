#!/usr/bin/env bash
# Measures tokenizing and conversion on this machine, each beside a rival in the same run: tokenizers against the PyPI
# package, `tessera tokenize` by the number of threads, the training of a tokenizer, and `tessera convert` both ways
# against `cp` of the same files.
#
#   tools/measure_io.sh PROGRAM TOKENIZER_BENCH TEXT SCRATCH [GIGABYTES]
#
# PROGRAM is build/tessera, TOKENIZER_BENCH build/bench/tokenizer_bench, TEXT some MB of English, SCRATCH a new folder
# with room for three times the model (default 5.5 GB). Needs python3 with numpy and tokenizers.
set -euo pipefail
program=$1 bench=$2 text=$3 scratch=$4 gigabytes=${5:-5.5}
here=$(cd "$(dirname "$0")" && pwd)
[[ -e $scratch ]] && { echo "$scratch exists; name a new folder, which is removed in the end" >&2; exit 2; }
mkdir -p "$scratch"

echo "== tokenizer of 32,000 tokens against the package, one thread each"
"$program" tokenize "$text" --train "$scratch/tokenizer.json" --vocab-size 32000 --split qwen
OMP_NUM_THREADS=1 python3 "$here/compare_tokenizers.py" --bench "$bench" --tokenizer "$scratch/tokenizer.json" --text "$text"

for _ in $(seq 30); do cat "$text"; done >"$scratch/big.txt"
echo "== $(du -m "$scratch/big.txt" | cut -f1) MiB of text: training, then tokenizing by threads"
"$program" tokenize "$scratch/big.txt" --train "$scratch/big.json" --vocab-size 32000 --split qwen >/dev/null # warm
start=$(date +%s%N)
"$program" tokenize "$scratch/big.txt" --train "$scratch/big.json" --vocab-size 32000 --split qwen
echo "training took $((($(date +%s%N) - start) / 1000000)) ms"
for threads in 1 2 4 8 16; do
  [[ $threads -gt $(nproc) ]] && break
  echo "-- $threads threads"
  for tokenizer in byte "$scratch/tokenizer.json"; do
    "$program" tokenize "$scratch/big.txt" --tokenizer "$tokenizer" --threads "$threads" -o "$scratch/t" --overwrite | tail -1
    rm -f "$scratch"/t.*
  done
done

echo "== conversion of $gigabytes GB in BF16 against cp, each followed by sync"
python3 "$here/make_model.py" "$scratch/hf" --gigabytes "$gigabytes"
timed() {
  sync
  local start end
  start=$(date +%s%N)
  "$@" | tail -1
  sync
  end=$(date +%s%N)
  echo "$1 ${2:-}: $(((end - start) / 1000000)) ms with sync"
}
for round in 1 2; do
  echo "-- round $round"
  timed cp -r "$scratch/hf" "$scratch/copy"
  rm -rf "$scratch/copy"
  timed "$program" convert "$scratch/hf" "$scratch/own"
  timed "$program" convert "$scratch/own" "$scratch/back"
  cmp "$scratch/hf/config.json" "$scratch/back/config.json"
  rm -rf "$scratch/own" "$scratch/back"
done
rm -rf "$scratch"
