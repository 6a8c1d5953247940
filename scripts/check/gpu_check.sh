#!/usr/bin/env bash
# All that only GPUs can show, in one report:   bash scripts/check/gpu_check.sh [--report docs/gpu_check.md] [--jobs 6]
# With the project's environment where there is one (scripts/setup.sh test train), else with $PYTHON (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
export TP_HEADLOSS_FULL=1
exec "$python" scripts/check/gpu_check.py "$@"
