#!/usr/bin/env bash
# Runs the tests with other versions, in environments of their own, and prints a table of what passed:
#     bash scripts/check/versions.sh 2.11.0 2.15.0 [-- pytest arguments]   # of torch, in .versions/torch-VERSION
#     bash scripts/check/versions.sh newest [-- pytest arguments]  # of everything, in .versions/newest and .versions/hosts
# No GPU is needed. With a version of torch, hosts' tests are left out, whose environments have one version of torch, and
# the package's own; Triton is that of scripts/constraints.txt, whose interpreter the tests know, and GPUs run the one that
# torch brings. "newest" has the newest Triton, and with TORCH=2.13.0 that torch beside all else.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
versions=()
while [ $# -gt 0 ]; do
    [ "$1" != -- ] || { shift; break; }
    case $1 in
        newest | [0-9]*.[0-9]*) versions+=("$1") ;;
        *) echo "versions: expected a version of torch such as 2.11.0, or newest; got $1" >&2; exit 2 ;;
    esac
    shift
done
[ ${#versions[@]} -gt 0 ] || { echo "versions: which ones? bash scripts/check/versions.sh 2.11.0 2.15.0, or newest" >&2; exit 2; }
export OMP_NUM_THREADS=1
table=() failed=

run() {  # name, pytest arguments: adds a line to the table
    local log
    log=$(mktemp)
    echo "versions: $1" >&2
    "$VENV/bin/python" -m pytest -n 4 --dist loadfile --no-loadscope-reorder -q "${@:2}" | tee "$log" || failed="$failed, $1"
    table+=("$(printf '%-72s %s' "$1" "$(tail -n 1 "$log")")")
    rm "$log"
}

installed() {  # Python, distributions -> their names and versions
    "$1" -c 'import importlib.metadata as m, sys; print(", ".join(f"{n} {m.version(n)}" for n in sys.argv[1:]))' "${@:2}"
}

# An environment of a host that sees the packages of $VENV, as those of scripts/hosts.sh do, with its newest version and
# whatever else that one needs. torch stays.
host() {  # name, distributions of which the first is the newest, "--", pytest arguments
    local folder=.versions/hosts/$1 python=.versions/hosts/$1/bin/python names=() site
    shift
    while [ "$1" != -- ]; do names+=("$1"); shift; done
    shift
    [ -x $python ] || "$VENV/bin/python" -m venv --without-pip "$folder"
    site=$($python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    printf '%s\n%s\n' "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" "$PWD" >"$site/tp_headloss.pth"
    installed $python torch | sed 's/ /==/' >"$folder/constraints.txt"
    if [ "${names[0]}" = megatron-core ]; then  # plain Python that asks for a newer one, see scripts/hosts.sh
        $python -m pip install -q --no-compile --no-deps --upgrade --ignore-requires-python --only-binary=:all: \
            --python-version 3.12 --target "$site" "${names[@]}"
    else
        $python -m pip install -q --no-compile --no-deps --upgrade "${names[0]}"
        $python -m pip install -q --no-compile -c "$folder/constraints.txt" "${names[@]}"
    fi
    TP_HEADLOSS_NEWEST=.versions/hosts run "$(installed $python "${names[@]}")" "$@"
}

for version in "${versions[@]}"; do
    export VENV=.versions/torch-$version
    [ "$version" != newest ] || VENV=.versions/newest
    torch=torch==$version triton=(-c scripts/constraints.txt triton)
    [ "$version" != newest ] || { torch=torch${TORCH:+==$TORCH}; triton=(triton); }
    echo "versions: making $VENV ..." >&2
    [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/python" -m pip install -q --no-compile --upgrade "$torch"
    "$VENV/bin/python" -m pip install -q --no-compile --no-deps --upgrade "${triton[@]}"
    bash scripts/setup.sh test train
    run "$(installed "$VENV/bin/python" torch triton)" --ignore tests/hosts --ignore tests/promises/test_package.py tests "$@"
    [ "$version" = newest ] || continue
    old=$(sed -n 's/^\[\(.*\)\]$/\1/p' scripts/hosts.txt | awk -F- '$1 in last { print last[$1] } { last[$1] = $0 }')
    newer="not $(echo $old | sed 's/ / and not /g')"
    host megatron megatron-core -- tests/hosts/test_megatron*.py -k "$newer" "$@"
    host torchtitan torchtitan -- tests/hosts/test_t{orchtitan,rainers}.py -k "torchtitan" "$@"
    host transformers transformers trl accelerate peft -- tests/hosts/test_tra{nsformers,iners}.py -k "$newer and not torchtitan" "$@"
    host deepspeed deepspeed transformers -- tests/hosts/test_deepspeed.py "$@"
    host verl verl megatron-core -- tests/hosts/test_verl*.py "$@"
    host nemo_automodel nemo-automodel -- tests/hosts/test_nemo_automodel.py "$@"
done
printf '%s\n' "" "${table[@]}"
[ -z "$failed" ] || { echo "versions: failed:${failed#,}" >&2; exit 1; }
