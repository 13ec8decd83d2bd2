#!/usr/bin/env bash
# Builds the wheel of the Python module, installs it in a fresh virtual environment and runs the examples there. By
# default the wheel takes the module of the release build, which has to be there (TESSERA_PYTHON); `--build` compiles
# everything as `pip install .` does, in build-python/, which takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

from_source=""
case "${1:-}" in
  "") ;;
  --build) from_source=1 ;;
  *) echo "test_wheel: unknown option '$1'; it takes --build or nothing" >&2; exit 2 ;;
esac

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=python3
[[ -x .deps/python/bin/python ]] && python=.deps/python/bin/python

options=()
if [[ -z "$from_source" ]]; then
  ls build/python/tessera/_tessera.*.so >/dev/null 2>&1 ||
    { echo "test_wheel: build/ has no Python module; scripts/bootstrap.sh --ci and scripts/build.sh make it" >&2; exit 2; }
  options=(-C build-dir="$folder/build" -C cmake.define.TESSERA_PREBUILT_PYTHON="$PWD/build/python/tessera")
fi
"$python" -m pip wheel -q --no-deps --disable-pip-version-check -w "$folder/wheel" "${options[@]}" .

"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check "$folder"/wheel/*.whl
examples=$PWD/python/examples
cd "$folder"
unset PYTHONPATH
for example in "$examples"/*.py; do
  echo "running $(basename "$example") with the wheel"
  venv/bin/python "$example" --quick
done
venv/bin/python - <<'TEXT'
import importlib.resources as resources

import tessera

files = {entry.name for entry in resources.files(tessera).iterdir()}
assert {"py.typed", "_tessera.pyi"} <= files, files
print(f"tessera {tessera.__version__}: the wheel is whole")
TEXT
