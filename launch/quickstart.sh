#!/usr/bin/env bash
# Trains a small model with the vocabulary sharded over two ranks, then the same model unsharded in plain torch, and
# draws the two loss curves over each other. Needs no GPU and takes minutes:
#     bash launch/quickstart.sh [options of launch/train.py, e.g. --steps 50]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/arguments.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
    "" | -*) ;;
    *) echo "quickstart: expected options of launch/train.py, such as --steps 50, got $1" >&2; exit 2 ;;
esac
bash scripts/setup.sh train
python=.venv/bin/python
out=runs/quickstart
# Unless an older run is to be continued, it is replaced.
case " $* " in *" --resume "*) ;; *) set -- --overwrite "$@" ;; esac

# One GPU per rank or none: both runs then do the same arithmetic.
device=cpu
if [ "$($python -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then device=cuda; fi

echo "== two ranks on $device, half of the vocabulary each"
OMP_NUM_THREADS=1 $python -m torch.distributed.run --standalone --nproc-per-node 2 \
    launch/train.py --tp 2 --device $device --out $out/sharded "$@"
echo "== one process on $device, torch.nn.functional.cross_entropy"
# Threads that sleep while they wait: on a busy machine spinning ones are ten times slower.
OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 $python launch/train.py --baseline --device $device --out $out/baseline "$@"
echo "== comparison"
$python launch/plot.py $out/sharded $out/baseline --png $out/comparison.png
