#!/usr/bin/env bash
# Every host of this folder on two GPUs, as many as fit in 9 minutes, the most used first; on four, two hosts at a time:
#   bash scripts/hosts_gpu/all.sh FOLDER
# Each leaves FOLDER/NAME.json, with what it has measured by its time limit, and FOLDER/NAME.log; none stops the others.
#   ONLY="transformers megatron" bash scripts/hosts_gpu/all.sh FOLDER    # these alone
#   LIMIT=300 OPTIONS=--tiny bash scripts/hosts_gpu/all.sh FOLDER        # on CPUs
set -u
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh"
out=${1:?where the results go: bash scripts/hosts_gpu/all.sh FOLDER}
[ $# = 1 ] || { echo "all: expected one FOLDER, got $*" >&2; exit 2; }
# shellcheck disable=SC2086  # one word per host
expect_among "$(sed -n 's/^ *host \([a-z0-9_]*\) .*/\1/p' "${BASH_SOURCE[0]}" | xargs)" ${ONLY:-}
out=$(from_here "$out")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
end=$((SECONDS + ${LIMIT:-540}))
mkdir -p "$out"
rm -f "$out"/*.failed
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore

host() { # name, time limit in seconds, GPUs (several: a rank on each), script and its options
    local name=$1 limit=$2 gpus=$3 began=$SECONDS start=(python3)
    case " ${ONLY:-$name} " in *" $name "*) ;; *) return ;; esac
    # On one GPU a plain process: torchrun's variables would make Trainer wrap the model for several.
    case $gpus in *,*) start=(python3 -m torch.distributed.run --standalone --nproc-per-node 2) ;; esac
    [ "$limit" -le $((end - SECONDS)) ] || limit=$((end - SECONDS))
    # shellcheck disable=SC2086  # options
    { [ "$limit" -ge 20 ] && CUDA_VISIBLE_DEVICES=$gpus timeout -k 15 "$limit" "${start[@]}" scripts/hosts_gpu/"$4" \
        --json "$out/$name.json" "${@:5}" ${OPTIONS:-} >"$out/$name.log" 2>&1; } || echo "$limit s" >"$out/$name.failed"
    grep -h "rank(s), " "$out/$name.log"
    echo "$name: $((SECONDS - began)) s"
}

titan=(torchtitan_trainer.py --heads torchtitan tp_headloss "tp_headloss, gradients in fp8")

first() { # its two GPUs
    host transformers 110 "$1,$2" transformers_trainer.py
    host transformers_1 110 "$1" transformers_trainer.py & # beside each other
    host trl_1 110 "$2" trl_trainer.py
    wait
    host trl 90 "$1,$2" trl_trainer.py
    host nemo_automodel 110 "$1,$2" nemo_automodel_loss.py
    host deepspeed 140 "$1,$2" deepspeed_autotp.py
    host trl_grpo 150 "$1" trl_trainer.py --ways GRPO --steps 10 --parts curve
}

second() {
    host torchtitan 130 "$1,$2" "${titan[@]}"
    host torchtitan_fsdp 110 "$1,$2" "${titan[@]}" --parts curve --ways FSDP compile
    host megatron 160 "$1,$2" megatron_core.py --heads Megatron-Core "Megatron-Core, fused" tp_headloss \
        "tp_headloss, one sweep" "tp_headloss, gradients in fp8" "tp_headloss, loss of logits"
    host torchtitan_checkpoint 90 "$1,$2" "${titan[@]}" --parts curve --ways checkpoint
    host verl 100 "$1,$2" verl_engine.py
    host torchtitan_graphs 90 "$1,$2" "${titan[@]}" --parts curve --ways graphs
    host torchtitan_chunks 60 "$1,$2" torchtitan_trainer.py --heads "torchtitan, chunks"
}

if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -ge 4 ]; then
    first 0 1 &
    second 2 3
    wait
else
    first 0 1
    second 0 1
fi
for file in "$out"/*.failed; do [ ! -e "$file" ] || echo "not complete: $(basename "$file" .failed)"; done
