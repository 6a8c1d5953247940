#!/usr/bin/env bash
# What only four or eight GPUs can show, in parts of at most nine minutes, the most valuable first:
#     bash scripts/check/four_and_eight.sh OUT [PART...]       # by default all parts
#     GPUS=2 bash scripts/check/four_and_eight.sh OUT          # a rehearsal: every command, at a size of seconds
# Results are OUT/*.json, for docs/bench, and a report of the tests; a part that fails or takes too long stops no other.
# megatron and torchtitan need their hosts (scripts/hosts.txt has the versions), which may be on PYTHONPATH.
# LIMIT is the seconds of a part.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../arguments.sh"
out=${1:?four_and_eight: where to? bash scripts/check/four_and_eight.sh OUT [PART...]}
out=$(from_here "$out")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
shift
parts="one_read cross_entropy tests linear tasks narrow megatron megatron_dp torchtitan soak"
expect_among "$parts" "$@"
# shellcheck disable=SC2086  # one word per part
[ $# -gt 0 ] || set -- $parts
python=${PYTHON:-python3}
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
expect_modules "$python" torch triton
mkdir -p "$out"
ranks=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
[ "$ranks" -lt 4 ] || export TP_HEADLOSS_FULL=1

on_ranks() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"; }
# Megatron at a tensor-parallel size, all other ranks data parallel.
pretrain() {
    # shellcheck disable=SC2046  # one word per option
    on_ranks launch/megatron_pretrain.py --tp "$1" --lr 3e-4 --heads 16 --overwrite \
        --losses stock stock-fused logits head head-one-sweep stock --out "$out/megatron_tp$1_of_$ranks.json" \
        $(sized "--vocab 49152 --corpus-mb 9 --layers 4 --hidden 1024 --length 1024 --batch 16 --steps 200" \
            "--vocab 4096 --corpus-mb 1 --steps 5")
}
# The options of a real run, or those of a rehearsal.
sized() { if [ "$ranks" -ge 4 ]; then echo "$1"; else echo "$2"; fi; }

# shellcheck disable=SC2046  # one word per option
part() {
    local test=tests/engine/test_one_read_ranks.py
    case $1 in
        # equal bits at all sizes, a rank that does not come, 200 random calls, two groups at once
        one_read) "$python" -m pytest -q --durations 5 $test \
            -k "$(sized "does_not_come or same_bits or float64 or at_once or replays" "does_not_come or same_bits and 1024")" ;;
        tests) bash scripts/check/gpu_check.sh --jobs 8 --limit 500 --report "$out/gpu_check_tp$ranks.md" --only \
            $(sized "test_cuda test_cuda_graphs test_cuda_symmetric_memory test_sharding test_epilogue test_faults
                test_agreement test_linear test_teacher_head test_distillation test_topk_distillation test_module
                test_sequences test_sets test_rank test_at_ids_beside test_policy test_generated
                test_clip_grad_norm test_forgotten_shard test_sharded_teachers test_bad_inputs_triton" test_transports) ;;
        cross_entropy) on_ranks scripts/bench/bench.py --tokens $(sized "1024 2048 4096 8192" 1024) \
            --vocab $(sized "32000 50304 128256 151936" 32064) --tasks ce --seconds 0.02 --implementations ours \
            "ours, two*" flash-attention Fast-LLM "Transformer*place" "Liger*" --json "$out/tp${ranks}_ce.json" ;;
        # from how many columns and tokens of a rank on one read takes less time than two launches
        narrow) on_ranks scripts/bench/bench.py --tokens $(sized "1024 4096 16384" 1024) \
            --vocab $(sized "$((2048 * ranks)) $((4096 * ranks)) $((6144 * ranks)) $((8000 * ranks))" 8192) --tasks ce \
            --seconds 0.02 --implementations "ours, one*" "ours, two*" --json "$out/tp${ranks}_narrow.json" ;;
        linear) on_ranks scripts/bench/bench_linear.py --seconds 0.2 --json "$out/tp${ranks}_linear.json" \
            $(sized "" "--tokens 1024 --hidden 512 --vocab 32064 --implementations ours* *GEMMs")
            on_ranks launch/batch_invariance.py $(sized "" "--vocab 32064 --hidden 512 --sequences 4") ;;
        tasks) on_ranks scripts/bench/bench.py --vocab $(sized 128256 32064) --seconds 0.03 --implementations "ours*" \
            --tasks $(sized "ce ce+z+smoothing+metrics clip+kl+entropy rl ce+kl kl jsd ce+topk sets log_probs_at
                ce+rank" "ce+kl sets") \
            --json "$out/tp${ranks}_tasks.json"
            on_ranks scripts/bench/sampling.py --implementations ours --json "$out/tp${ranks}_sampling.json" \
                $(sized "" "--tokens 16 --spread 2 --seconds 0.02") ;;
        megatron) pretrain "$ranks" ;;
        megatron_dp) pretrain $((ranks / 2)) ;;
        torchtitan) on_ranks scripts/hosts_gpu/torchtitan_trainer.py --json "$out/torchtitan_fsdp_tp2.json" --ways FSDP_TP2 \
            --heads torchtitan tp_headloss --parts curve $(sized "--steps 30" --tiny) ;;
        soak) "$python" -m pytest -q "$test::test_random_steps_agree_with_two_launches[$ranks]"
            "$python" scripts/check/soak.py --ranks "$ranks" $(sized "--examples 10000 --hours 0.08" "--examples 20 --round 10") ;;
    esac
}

export -f part on_ranks sized pretrain
export out python ranks
failed=
for name in "$@"; do
    echo "== $name, $ranks GPUs"
    timeout --kill-after 10 "${LIMIT:-540}" bash -c "set -ef; part $name" 2>&1 | tee "$out/$name.log" | tail -n 60 || failed="$failed $name"
done
[ -z "$failed" ] || { echo "four_and_eight: failed:$failed" >&2; exit 1; }
