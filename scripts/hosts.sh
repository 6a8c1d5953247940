#!/usr/bin/env bash
# Makes the virtual environments .hosts/NAME-VERSION, one for each host framework and version that the tests run with,
# and one with the oldest Triton:
#     bash scripts/hosts.sh [NAME-VERSION...]
# Each sees the packages of .venv, torch among them, and adds its own, which scripts/hosts.txt lists.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
all=$(sed -n 's/^\[\(.*\)\]$/\1/p' scripts/hosts.txt | xargs)
expect_among "$all" "$@"
[ -x .venv/bin/uv ] || bash scripts/setup.sh dev

source scripts/uv.sh
main=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

make() {
    local name=$1 python=.hosts/$1/bin/python packages
    packages=$(awk -v section="[$name]" '/^\[/ { inside = $0 == section; next } inside' scripts/hosts.txt)
    local stamp
    stamp=.hosts/$name/.made-$({ cat scripts/hosts.sh; echo "$packages"; } | cksum | tr -d ' ')
    if [ -f "$stamp" ]; then return; fi
    echo "hosts: making .hosts/$name ..." >&2
    .venv/bin/python -m venv --clear --without-pip ".hosts/$name"
    local site
    site=$($python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    printf '%s\n%s\n' "$main" "$PWD" >"$site/tp_headloss.pth"
    # Without dependencies: nothing can bring another torch. What .venv happens to have, too, is installed all the same.
    local options=(--python "$python" --no-deps)
    case $name in
        # What runs here of it is plain Python, though it asks for a newer one.
        megatron-0.19.2) options+=(--only-binary :all: --python-version 3.12 --target "$site") ;;
    esac
    echo "$packages" >".hosts/$name/packages.txt"
    .venv/bin/uv pip install -q "${options[@]}" -r ".hosts/$name/packages.txt"
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
