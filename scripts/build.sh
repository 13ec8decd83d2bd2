#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json (default: release) and, where given, only the named targets.
set -euo pipefail
cd "$(dirname "$0")/.."

preset="${1:-release}"
shift || true
targets=()
[[ $# -gt 0 ]] && targets=(--target "$@")
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" "${targets[@]}"
