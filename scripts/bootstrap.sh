#!/usr/bin/env bash
# Installs with apt what building Tessera needs; does nothing when all is there. `--ci` adds the checkers, and `--fuzz`
# the compiler of the fuzzers.
set -euo pipefail

packages=(build-essential cmake ninja-build ccache mold libdnnl-dev libtomlplusplus-dev libcli11-dev libfmt-dev
          nlohmann-json3-dev zlib1g-dev libzstd-dev liblzma-dev libpcre2-dev libutf8proc-dev
          libsentencepiece-dev libgtest-dev libgmock-dev libopenmpi-dev openmpi-bin)
[[ "${1:-}" == "--ci" ]] && packages+=(clang-format clang-tidy)
[[ "${1:-}" == "--fuzz" ]] && packages+=(clang libclang-rt-dev)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "bootstrap: run as root, or install sudo: ${missing[*]} are missing" >&2; exit 2; }
  as_root=(sudo)
fi
echo "installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
