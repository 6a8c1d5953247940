#!/usr/bin/env bash
# Makes or completes the virtual environment .venv:   bash scripts/setup.sh [EXTRA...]   (extras of setup.cfg)
# Starts from $PYTHON (default python3). Only what is missing is installed; where nothing is, pip never runs.
# $VENV is the path of another environment than .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
venv=$VENV/bin/python

die() { echo "setup: $*" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || die "no '$PYTHON' here; set PYTHON to a Python >= 3.10"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "Python >= 3.10 is needed, '$PYTHON' is $("$PYTHON" --version 2>&1); set PYTHON to another one"

stamp=$VENV/.setup-$({
    "$PYTHON" -c 'import sys; print(sys.version, sys.prefix)'
    echo "$@"
    cat setup.cfg scripts/constraints.txt scripts/setup.sh
} | cksum | tr -d ' ')
if [ -x $venv ] && [ -f "$stamp" ]; then exit 0; fi

extras='import configparser; c = configparser.ConfigParser(); c.read("setup.cfg"); print(*c["options.extras_require"])'
expect_among "$("$PYTHON" -c "$extras")" "$@"

abi='import sys; print(sys.version_info[:2])'
if [ ! -x $venv ] || [ "$($venv -c "$abi")" != "$("$PYTHON" -c "$abi")" ]; then
    echo "setup: making $VENV with $("$PYTHON" --version) ..." >&2
    # Without ensurepip there is no pip in the venv; that is enough where nothing has to be installed.
    "$PYTHON" -m venv --clear "$VENV" >/dev/null 2>&1 || "$PYTHON" -m venv --clear --without-pip "$VENV" ||
        die "'$PYTHON -m venv $VENV' failed"
fi
site=$($venv -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

has() { $venv -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT

# What is installed already wins over constraints.txt, so no requirement can replace it, torch least of all.
write_constraints() {
    $venv - >"$constraints" <<'PY'
import importlib.metadata as metadata
import re

for line in open("scripts/constraints.txt"):
    if line.strip() and not line.startswith("#"):
        name = re.match(r"[\w.-]+", line)[0]
        try:
            if name == "setuptools":  # a new environment holds one, for some Pythons older than torch needs
                raise metadata.PackageNotFoundError
            print(f"{name}=={metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(line.strip())
PY
}

install() {
    echo "setup: installing $* ..." >&2
    $venv -m pip --version >/dev/null 2>&1 || die "'$PYTHON' has no pip (Debian: python3-venv), so no way to install: $*"
    write_constraints
    # Python compiles what it imports, a small part of all that pip would compile.
    local pip=("$venv" -I -m pip install -q --no-compile)
    if [ -x "$VENV/bin/uv" ]; then
        source scripts/uv.sh
        pip=("$VENV/bin/uv" pip install -q --python "$venv")
    fi
    "${pip[@]}" -c "$constraints" "$@" || die "could not install: $*"
}

case " $* " in # takes a third of pip's time for what developers need
    *" dev "*) has uv || install uv ;;
esac

# A GPU build of torch that $PYTHON sees is kept: the venv gets the directories it and its dependencies live in.
# (--system-site-packages would not do: where $PYTHON is itself in a venv, it shows the wrong directories.)
if ! has torch; then
    "$PYTHON" - >"$site/existing_torch.pth" 2>/dev/null <<'PY' || rm -f "$site/existing_torch.pth"
import os
import sys

import torch

version = tuple(int(number) for number in torch.__version__.split(".")[:2])
if not (torch.version.cuda or torch.version.hip) or version < (2, 11):
    sys.exit(1)
print(*(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")), sep="\n")
PY
fi

# torch alone and first: in one resolution with the rest, pip may look at other versions of it, gigabytes each.
has torch || install torch
# A GPU build of torch brings the triton it fits.
[ "$(uname -s)" != Linux ] || has triton || install triton

missing=$($venv - "$@" <<'PY'
import configparser
import importlib.metadata as metadata
import sys

config = configparser.ConfigParser()
config.read("setup.cfg")
for extra in sys.argv[1:]:
    for name in config["options.extras_require"][extra].split():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            print(name)
PY
)
# shellcheck disable=SC2086  # one word per package
[ -z "$missing" ] || install $missing

pwd >"$site/tp_headloss.pth" # last: pip would miss what the package needs and is not there yet
touch "$stamp"
