#!/usr/bin/env bash
# Every host of this folder on two GPUs, as many as fit in 9 minutes, the most used first:
#   bash scripts/hosts_gpu/all.sh FOLDER
# Each leaves FOLDER/NAME.json, with what it has measured by its time limit, and FOLDER/NAME.log; none stops the others.
#   ONLY="transformers megatron" bash scripts/hosts_gpu/all.sh FOLDER    # these alone
#   LIMIT=300 OPTIONS=--tiny bash scripts/hosts_gpu/all.sh FOLDER        # on CPUs
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:?where the results go: bash scripts/hosts_gpu/all.sh FOLDER}
end=$((SECONDS + ${LIMIT:-540}))
mkdir -p "$out"
rm -f "$out"/*.failed
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore

host() { # name, time limit in seconds, "2" ranks or the one GPU, script and its options
    local name=$1 limit=$2 began=$SECONDS start=(python3 -m torch.distributed.run --standalone --nproc-per-node 2)
    case " ${ONLY:-$name} " in *" $name "*) ;; *) return ;; esac
    # On one GPU a plain process: torchrun's variables would make Trainer wrap the model for several.
    [ "$3" = 2 ] || start=(env "CUDA_VISIBLE_DEVICES=${3#gpu}" python3)
    [ "$limit" -le $((end - SECONDS)) ] || limit=$((end - SECONDS))
    # shellcheck disable=SC2086  # options
    { [ "$limit" -ge 20 ] && timeout -k 15 "$limit" "${start[@]}" scripts/hosts_gpu/"$4" --json "$out/$name.json" \
        "${@:5}" ${OPTIONS:-} >"$out/$name.log" 2>&1; } || echo "$limit s" >"$out/$name.failed"
    grep -h "rank(s), " "$out/$name.log"
    echo "$name: $((SECONDS - began)) s"
}

host transformers 100 2 transformers_trainer.py
host transformers_1 80 gpu0 transformers_trainer.py & # beside each other
host trl_1 80 gpu1 trl_trainer.py
wait
host trl 90 2 trl_trainer.py
host torchtitan 90 2 torchtitan_trainer.py --heads torchtitan tp_headloss
host megatron 130 2 megatron_core.py --heads Megatron-Core "Megatron-Core, fused" tp_headloss "tp_headloss, one sweep"
host nemo_automodel 80 2 nemo_automodel_loss.py
host deepspeed 120 2 deepspeed_autotp.py
host verl 100 2 verl_engine.py
host trl_grpo 150 gpu0 trl_trainer.py --ways GRPO --steps 10 --parts curve
titan=(torchtitan_trainer.py --heads torchtitan tp_headloss --parts curve --ways)
host torchtitan_fsdp 90 2 "${titan[@]}" FSDP compile
host torchtitan_graphs 60 2 "${titan[@]}" graphs
host torchtitan_checkpoint 60 2 "${titan[@]}" checkpoint
host torchtitan_chunks 60 2 torchtitan_trainer.py --heads "torchtitan, chunks"
for file in "$out"/*.failed; do [ ! -e "$file" ] || echo "not complete: $(basename "$file" .failed)"; done
