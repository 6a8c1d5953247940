#!/usr/bin/env bash
# Makes a repository for the kernels hub of Hugging Face from this checkout:   bash scripts/hub.sh FOLDER
# `kernels.get_local_kernel(Path("FOLDER"))` loads it as it is; whoever publishes it uploads the folder. The package has a
# name of its own there, by its content, so that several of them, and an installed one, may be in one process.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
[ $# = 1 ] || { echo "hub: where to? bash scripts/hub.sh FOLDER" >&2; exit 2; }
folder=$(from_here "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -e "$folder" ] || { echo "hub: $folder is there already" >&2; exit 1; }
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' tp_headloss/version.py)
content=$(find tp_headloss scripts/hub -type f -not -path "*/__pycache__/*" | sort | xargs cat | sha256sum | cut -c1-12)
mkdir -p "$folder"
cp scripts/hub/README.md "$folder"
for backend in cpu cuda rocm; do  # the same for each: kernels are compiled where they run
    build=$folder/build/torch-$backend
    mkdir -p "$build"
    cp -r tp_headloss/. scripts/hub/layers.py LICENSE NOTICE "$build"
    find "$build" -name __pycache__ -prune -exec rm -r {} +
    echo 'from . import layers' >>"$build/__init__.py"
    cat >"$build/metadata.json" <<JSON
{
  "id": "_tp_headloss_${version//./_}_${content}_$backend",
  "name": "tp-headloss",
  "version": 1,
  "license": "Apache-2.0",
  "python-depends": [],
  "backend": {"type": "$backend"}
}
JSON
done
echo "hub: made $folder"
