#!/usr/bin/env bash
# Runs the tests with other versions of torch, in environments of their own, .versions/torch-VERSION:
#     bash scripts/check/versions.sh 2.11.0 2.15.0 [-- pytest arguments]
# No GPU is needed. Left out are the hosts' tests, whose environments have one version of torch, and the package's own.
# Triton is that of scripts/constraints.txt, whose interpreter the tests know; GPUs run the one that torch brings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
versions=()
while [ $# -gt 0 ]; do
    [ "$1" != -- ] || { shift; break; }
    versions+=("$1")
    shift
done
[ ${#versions[@]} -gt 0 ] || { echo "versions: which ones? bash scripts/check/versions.sh 2.11.0 2.15.0" >&2; exit 2; }

failed=
for version in "${versions[@]}"; do
    export VENV=.versions/torch-$version OMP_NUM_THREADS=1
    if [ ! -x "$VENV/bin/python" ]; then
        echo "versions: making $VENV ..." >&2
        "${PYTHON:-python3}" -m venv "$VENV"
        "$VENV/bin/python" -m pip install -q --no-compile "torch==$version" || { rm -rf "$VENV"; exit 1; }
        "$VENV/bin/python" -m pip install -q --no-compile --no-deps -c scripts/constraints.txt --upgrade triton
    fi
    bash scripts/setup.sh test train
    echo "versions: torch $version"
    "$VENV/bin/python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder -q \
        --ignore tests/hosts --ignore tests/promises/test_package.py tests "$@" || failed="$failed $version"
done
[ -z "$failed" ] || { echo "versions: failed with torch$failed" >&2; exit 1; }
