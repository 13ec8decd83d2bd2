#!/usr/bin/env bash
# Sets everything up, builds, and runs the fast tests; `--slow` runs the slow ones as well.
set -euo pipefail
cd "$(dirname "$0")/.."

# Threads that spin for others on a busy machine slow tests down by an order of magnitude.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

scripts/bootstrap.sh
scripts/build.sh release
if [[ "${1:-}" == "--slow" ]]; then
  ctest --test-dir build --output-on-failure -L slow
fi
# Two at a time: much of the tests is starting processes and waiting.
ctest --test-dir build -j2 --output-on-failure -LE slow
