#!/usr/bin/env bash
# Fetches the wheels of gpu_wheels.txt, for Python 3.12 on x86-64, into a folder; further packages as PACKAGE==VERSION:
#
#     benchmarks/fetch_gpu_wheels.sh FOLDER [bitsandbytes==0.50.2 liger-kernel==... ...]
#
# PYTHON names another interpreter with pip.
set -euo pipefail
folder=${1:?usage: fetch_gpu_wheels.sh FOLDER [PACKAGE==VERSION ...]}
shift
platforms=()
# pip compares names of platforms, so a wheel for an older one is found under its own name only
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${platform}_x86_64")
done
"${PYTHON:-python3}" -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --dest "$folder" --requirement "$(dirname "$0")/gpu_wheels.txt" "$@"
