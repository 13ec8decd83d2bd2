#!/usr/bin/env bash
# Installs with apt what building Tessera needs, and where there is nvcc fetches the headers of cuDNN's frontend from
# PyPI into .deps; does nothing when all is there. `--ci` adds the checkers and, in .deps/python, what the Python module is
# built and tested with; `--fuzz` adds the compiler of the fuzzers.
# `--demo` installs what scripts/demo.sh needs on CPU cores, its text included: less, without MPI.
set -euo pipefail
cd "$(dirname "$0")/.."

# The headers are the same in the wheels for all versions of Python; one is named so that its hash can be.
frontend=nvidia-cudnn-frontend==1.23.0
frontend_hash=sha256:7bdae232a3071501012611fab14aae34dd16983205e56d3c1641317910fdd385

fetch_frontend() {
  [[ -e .deps/cudnn_frontend/include/cudnn_frontend.h ]] && return
  local folder
  folder=$(mktemp -d)
  echo "fetching $frontend"
  echo "$frontend --hash=$frontend_hash" >"$folder/requirements.txt"
  if ! python3 -m pip download -q --no-deps --require-hashes --only-binary=:all: --python-version 3.11 \
      --platform manylinux_2_28_x86_64 -r "$folder/requirements.txt" -d "$folder"; then
    echo "bootstrap: $frontend could not be fetched; attention on GPUs will do without cuDNN" >&2
  else
    python3 -m zipfile -e "$folder"/*.whl "$folder/wheel"
    mkdir -p .deps/cudnn_frontend
    mv "$folder/wheel/include" .deps/cudnn_frontend/include
  fi
  rm -rf "$folder"
}

# Versions are named so that a build is the same tomorrow. Without them the Python module and its tests are left out.
python_packages=(nanobind==3.1.0 scikit-build-core==1.1.2 numpy pytest==9.2.0 pyarrow)

make_python() {
  [[ -e .deps/python/complete ]] && return
  echo "fetching ${python_packages[*]}"
  rm -rf .deps/python
  if python3 -m venv .deps/python &&
      .deps/python/bin/python -m pip install -q --disable-pip-version-check "${python_packages[@]}"; then
    touch .deps/python/complete
  else
    rm -rf .deps/python
    echo "bootstrap: packages from PyPI could not be fetched; the Python module is left out" >&2
  fi
}

has_nvcc() {
  command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]
}

install_missing() {
  local as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || { echo "bootstrap: run as root, or install sudo: ${missing[*]} are missing" >&2; exit 2; }
    as_root=(sudo)
  fi
  echo "installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

option="${1:-}"
if [[ "$option" != "--demo" ]] && has_nvcc; then fetch_frontend; fi

packages=(build-essential cmake ninja-build ccache mold libdnnl-dev libtomlplusplus-dev libcli11-dev libfmt-dev
          nlohmann-json3-dev zlib1g-dev libzstd-dev liblzma-dev libpcre2-dev libutf8proc-dev
          libsentencepiece-dev libhwloc-dev libcpp-httplib-dev libgtest-dev libgmock-dev)
case "$option" in
  --demo) packages+=(bible-kjv) ;;
  --ci) packages+=(libopenmpi-dev openmpi-bin clang-format clang-tidy python3-dev python3-venv) ;;
  --fuzz) packages+=(libopenmpi-dev openmpi-bin clang libclang-rt-dev) ;;
  *) packages+=(libopenmpi-dev openmpi-bin) ;;
esac

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done

[[ ${#missing[@]} -eq 0 ]] || install_missing
[[ "$option" != "--ci" ]] || make_python
