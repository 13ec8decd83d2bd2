#!/usr/bin/env bash
# From a clean clone to a trained model that writes: see usage below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
usage: scripts/demo.sh [--seconds N] [--cuda | --no-cuda] [option of `tessera train`...]

Installs what is missing, builds the program, takes the King James Bible (4.1 MB of prose, Debian package
bible-kjv-text) as text, trains a Mixture-of-Experts language model on it, and lets it write.

The training is sized to the machine: the speed of three models is measured, and the largest that makes enough steps
in the time is trained for as many as fit. What is chosen is printed, and kept in demo/choice. Stopped by Ctrl-C, the
same command goes on; to begin anew, delete demo/.

  --seconds N  train for about so long (default 100; between 20 and 86400)
  --cuda       build the kernels for Hopper GPUs as well: minutes more, needs nvcc 13. The default where a GPU's driver
               and nvcc are; the folder build-demo, where it is built, keeps what was chosen there before
  --no-cuda    build for the CPU alone
  --help       this text

model    parameters  active per token  least steps
small         4.05M             1.39M            -
medium        10.3M             3.24M         1200
large         30.8M             9.58M         2400  (configs/demo.toml)
TEXT
}

refuse() {
  echo "demo: $1" >&2
  exit 2
}

seconds=100
cuda=""
train_options=()

read_arguments() {
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --help | -h) usage; exit 0 ;;
      --cuda) cuda=ON ;;
      --no-cuda) cuda=OFF ;;
      --seconds)
        [[ "${2:-}" =~ ^[0-9]{2,5}$ ]] && ((10#$2 >= 20 && 10#$2 <= 86400)) \
          || refuse "--seconds takes a number from 20 to 86400, found '${2:-}'"
        seconds=$((10#$2))
        shift ;;
      *) train_options+=("$1") ;;
    esac
    shift
  done
}

folder=build-demo
tessera=$folder/tessera
cores=$(nproc)

has_nvcc() {
  command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]
}
has_gpu_driver() {
  [[ -e /proc/driver/nvidia/version || -e /dev/nvidiactl ]]
}

# has_features NAME...: whether the processor has all.
has_features() {
  local feature
  for feature in "$@"; do
    grep -qwm1 "$feature" /proc/cpuinfo || return 1
  done
}

# BF16 is worth while only where it is multiplied natively.
multiplies_bf16() {
  has_features avx512_bf16 || has_features amx_bf16 || { [[ $cuda == ON ]] && has_gpu_driver; }
}

# Sets $cuda where the user left it open: what the build folder has, or what the machine can use.
choose_cuda() {
  if [[ "$cuda" == ON ]]; then
    has_nvcc || refuse "--cuda needs nvcc 13, which was found neither in PATH nor in /usr/local/cuda/bin"
  elif [[ -z "$cuda" && -e $folder/CMakeCache.txt ]]; then
    cuda=OFF
    if grep -q '^TESSERA_CUDA:BOOL=ON' $folder/CMakeCache.txt; then cuda=ON; fi
  elif [[ -z "$cuda" ]]; then
    cuda=OFF
    if has_gpu_driver && has_nvcc; then cuda=ON; fi
  fi
}

# Levels of vector code above AVX2 that this processor can run; others would only be compiled.
cpu_levels() {
  has_features avx512f avx512bw avx512cd avx512dq avx512vl || return 0
  echo -n avx512
  if has_features avx512_bf16; then echo -n ";avx512bf16"; fi
}

# Measured on two cores of a server processor: 250 s of one core's time, and 500 s for the kernels for GPUs.
say_what_comes() {
  local work=250 gpus=""
  if [[ $cuda == ON ]]; then
    work=750
    gpus=", kernels for GPUs included"
  fi
  if [[ -x $tessera ]]; then
    echo "demo: $folder has a program; it is brought up to date, then trains for about $seconds s"
  else
    echo "demo: set-up installs packages and builds for about $(((work / cores + 59) / 60)) min on $cores cores$gpus;" \
      "then training takes about $seconds s"
  fi
}

fetch_text() {
  mkdir -p demo
  [[ -s demo/text.txt ]] && return
  # One verse a line; the references at the line starts go.
  bible -f 'gen1:1-rev22:21' </dev/null | sed -E 's/^[0-9]?[A-Za-z]+[0-9]+:[0-9]+ //' > demo/text.tmp
  mv demo/text.tmp demo/text.txt
}

# shape_of MODEL: its options.
shape_of() {
  case "$1" in
    large) echo "--optim.learning_rate=2e-3" ;;
    medium) echo "--model.preset= --model.hidden_size=256 --model.num_layers=4 --model.num_heads=4" \
      "--model.num_kv_heads=2 --moe.num_experts=8 --moe.top_k=2 --moe.inner_size=384 --optim.learning_rate=3e-3" ;;
    small) echo "--model.preset= --model.hidden_size=192 --model.num_layers=3 --model.num_heads=3" \
      "--moe.num_experts=8 --moe.top_k=2 --moe.inner_size=256 --train.micro_batch=4 --train.global_batch=4" \
      "--optim.learning_rate=4e-3" ;;
  esac
}

# least_steps MODEL: with fewer a smaller model, which makes more of them in the same time, has the lower loss.
least_steps() {
  case "$1" in large) echo 2400 ;; medium) echo 1200 ;; small) echo 0 ;; esac
}

# measure MODEL PRECISION: prints the milliseconds of a step, and saves what the bench says of the machine.
measure() {
  local shape
  read -ra shape <<<"$(shape_of "$1")"
  $tessera bench configs/demo.toml "${shape[@]}" --train.precision="$2" --steps 3 --warmup 1 --json > demo/bench.json
  sed -nE 's/^ *"median_seconds": *([0-9.e+-]+),?$/\1/p' demo/bench.json | awk '{printf "%d", 1000 * $1 + 0.5}'
}

# steps_within MILLISECONDS: how many steps of that length fit the time, beside three validations that take as long as
# five each. No more than two passes over the text, after which little is learnt.
steps_within() {
  local steps=$((1000 * seconds / ($1 > 0 ? $1 : 1) - 15))
  ((steps > 4000)) && steps=4000
  ((steps < 20)) && steps=20
  echo "$steps"
}

# Measures the models from the smallest on, as long as a larger one can make enough steps to be the better one in this
# time, and writes the options of the last that can to demo/choice.
choose() {
  local precision=f32 model chosen="" milliseconds=0 steps=4000
  if multiplies_bf16; then precision=bf16; fi
  for model in small medium large; do
    [[ -n "$chosen" && $steps -lt $(least_steps "$model") ]] && break
    local measured possible
    measured=$(measure "$model" "$precision")
    possible=$(steps_within "$measured")
    echo "demo: $model model in $precision: $measured ms a step, $possible steps in $seconds s"
    [[ -n "$chosen" && $possible -lt $(least_steps "$model") ]] && break
    chosen=$model milliseconds=$measured steps=$possible
  done
  save_choice
}

# Saves what choose() found, with the schedule that fits the steps.
save_choice() {
  {
    echo "# $(sed -nE 's/^ *"device": *"(.*)",?$/\1/p' demo/bench.json): $chosen model in $precision, $steps steps of" \
      "$milliseconds ms, about $(((steps + 15) * milliseconds / 1000)) s"
    shape_of "$chosen" | tr ' ' '\n'
    printf '%s\n' "--train.precision=$precision" "--train.steps=$steps" "--optim.warmup_steps=$((steps / 12 + 1))" \
      "--train.validation_interval=$((steps / 3 + 1))" "--run.checkpoint_interval=$((steps / 2 + 1))" \
      "--run.log_interval=$((steps / 20 + 1))"
  } > demo/choice.tmp
  mv demo/choice.tmp demo/choice
}

stopped=0

# phase NAME COMMAND...: runs the command and keeps how long it took.
times=()
phase() {
  local name=$1 start=$SECONDS
  shift
  "$@"
  if [[ $stopped -ne 0 ]]; then
    echo "demo: stopped; the same command goes on" >&2
    exit 130
  fi
  times+=("$name $((SECONDS - start)) s")
}

build() {
  scripts/build.sh demo tessera "-DTESSERA_CUDA=$cuda" "-DTESSERA_CPU_LEVELS=$(cpu_levels)"
}

size() {
  if [[ -s demo/choice ]]; then
    echo "demo: as chosen before (demo/choice):"
  else
    choose
  fi
  sed -n 's/^# /demo: /p' demo/choice
}

train() {
  mapfile -t options < <(grep -v '^#' demo/choice)
  $tessera train configs/demo.toml "${options[@]}" "${train_options[@]}"
}

write_text() {
  echo
  $tessera generate demo/run --prompt "And it came to pass" --max-tokens 600 --temperature 0.7 --top-p 0.95
}

# For tests/scripts_test.sh, which calls the functions above.
[[ "${BASH_SOURCE[0]}" != "$0" ]] && return 0

read_arguments "$@"
trap 'stopped=1' INT TERM
choose_cuda
say_what_comes
phase packages scripts/bootstrap.sh --demo
phase build build
fetch_text
phase measuring size
phase training train
phase writing write_text
printf '\ndemo: %s; %s s in all; everything is in demo/, the program is %s\n' \
  "$(IFS=,; echo "${times[*]}" | sed 's/,/, /g')" "$SECONDS" "$tessera"
