#!/usr/bin/env bash
# Makes the virtual environments .hosts/NAME-VERSION, one for each host framework and version that the tests run with:
#     bash scripts/hosts.sh [NAME-VERSION...]
# Each sees the packages of .venv, torch among them, and adds its own; none can replace that torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
all="megatron-0.16.1 megatron-0.19.2 torchtitan-0.3.0 transformers-5.17.0 transformers-5.23.0"
main=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
.venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$constraints"

make() {
    local name=$1 python=.hosts/$1/bin/python stamp=.hosts/$1/.made-$(cat scripts/hosts.sh "$constraints" | cksum | tr -d ' ')
    if [ -f "$stamp" ]; then return; fi
    echo "hosts: making .hosts/$name ..." >&2
    .venv/bin/python -m venv --clear --without-pip ".hosts/$name"
    local site
    site=$($python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    printf '%s\n%s\n' "$main" "$PWD" >"$site/tp_headloss.pth"
    local pip=("$python" -m pip install -q -c "$constraints")
    case $name in
        # What runs here of it is plain Python, though it asks for a newer one.
        megatron-0.19.2) "${pip[@]}" --no-deps --ignore-requires-python --only-binary=:all: --python-version 3.12 \
            --target "$site" megatron-core==0.19.2 ;;
        megatron-*) "${pip[@]}" "megatron-core==${name#*-}" ;;
        # Of what its trainer needs, the tests need no logging service.
        torchtitan-*)
            "${pip[@]}" --no-deps "torchtitan==${name#*-}" spmd_types==0.2.3 torchdata torch_checkpointing
            "${pip[@]}" tyro einops pillow "datasets>=4.7,<4.8" ;;
        transformers-5.23.0) "${pip[@]}" transformers==5.23.0 trl==1.16.0 ;;
        transformers-*) "${pip[@]}" "transformers==${name#*-}" accelerate ;;
    esac
    touch "$stamp"
}

failed=
running=()
# shellcheck disable=SC2086  # one word per environment
for name in ${*:-$all}; do
    make "$name" & running+=("$!:$name")
done
for pair in "${running[@]}"; do
    wait "${pair%%:*}" || failed="$failed ${pair#*:}"
done
[ -z "$failed" ] || { echo "hosts: could not make:$failed" >&2; exit 1; }
