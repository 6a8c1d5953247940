#!/usr/bin/env bash
# Lint, documentation, types and tests:   bash scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
    "" | -*) ;;
    *) [ -e "${1%%::*}" ] || { echo "test: expected options and tests of pytest, got $1, which is not here" >&2; exit 2; } ;;
esac
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same files
bash scripts/setup.sh test train docs dev
export OMP_NUM_THREADS=1
python=.venv/bin/python

$python -m ruff check .
# What needs no tests' results runs beside them, while their ranks wait for each other, and is waited for at the end.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
checks=()
for check in "bash scripts/docs.sh" "$python -m mypy" "$python -m pyright --pythonpath $python"; do
    nice $check >"$logs/${#checks[@]}" 2>&1 & checks+=("$!:$check")
done
# In a new clone Python compiles torch and the tests here, once, and not in each worker at the same time.
collected=
if [ ! -d tests/__pycache__ ]; then
    $python -m pytest --collect-only -q tests >/dev/null & collected=$!
fi
bash scripts/hosts.sh  # mostly waits for downloads
[ -z "$collected" ] || wait "$collected" || true  # what cannot be collected fails below

# A worker has its own ranks and fixtures, so that whole files go to one of them; three for two cores, because
# ranks wait for each other and for timeouts. A fourth would import and collect all tests once more, for 15 seconds.
# On GPUs one test after the other: they share the devices' memory and NCCL.
workers=3
if $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then workers=0; fi
failed=
$python -m pytest -n $workers --dist loadfile --no-loadscope-reorder tests "$@" || failed=" pytest"
for number in "${!checks[@]}"; do
    wait "${checks[number]%%:*}" || { cat "$logs/$number" >&2; failed="$failed ${checks[number]#*:}"; }
done
[ -z "$failed" ] || { echo "test: failed:$failed" >&2; exit 1; }
