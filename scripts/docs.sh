#!/usr/bin/env bash
# Builds the documentation into build/site:   bash scripts/docs.sh
# Shows it at http://127.0.0.1:8000 and builds again what changes:   bash scripts/docs.sh serve
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
case ${1:-} in  # options are of MkDocs
    "" | -*) ;;
    *) expect_among serve "$1" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh docs
# Otherwise the theme announces its successor on every run.
export NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = serve ]; then exec .venv/bin/python -m mkdocs serve "${@:2}"; fi
exec .venv/bin/python -m mkdocs build --strict --quiet "$@"
