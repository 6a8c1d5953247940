#!/usr/bin/env bash
# All that only GPUs can show, in one report:   bash scripts/check/gpu_check.sh [--report runs/gpu_check.md] [--jobs 6]
# The report is in the current folder; --report docs/gpu_check.md writes the page of the documentation anew.
# With the project's environment where there is one (scripts/setup.sh test train), else with $PYTHON (default python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; fi
source "$root/scripts/arguments.sh" --  # --help is Python's
expect_modules "$python" torch triton
export TP_HEADLOSS_FULL=1
exec "$python" "$root/scripts/check/gpu_check.py" "$@"
