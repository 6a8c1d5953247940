#!/usr/bin/env bash
# What only four or eight GPUs can show, in parts of at most nine minutes, the most valuable first:
#     bash scripts/check/four_and_eight.sh OUT [PART...]       # by default all parts; GPUS=2 rehearses with two
# Results are OUT/*.json, for docs/bench, and a report of the tests; a part that fails or takes too long stops no other.
# megatron needs megatron-core (scripts/hosts.txt has the version).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:?four_and_eight: where to? bash scripts/check/four_and_eight.sh OUT [PART...]}
shift
[ $# -gt 0 ] || set -- one_read tests cross_entropy linear tasks megatron soak
mkdir -p "$out"
python=${PYTHON:-python3}
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
ranks=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
on_ranks() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"; }

part() {
    case $1 in
        # a rank that dies or stalls, equal bits at all sizes, graphs, 1,000 repeats
        one_read) TP_HEADLOSS_FULL=1 "$python" -m pytest -q tests/engine/test_one_read.py -k "not random_steps" ;;
        tests) bash scripts/check/gpu_check.sh --jobs 8 --limit 520 --report "$out/gpu_check_tp$ranks.md" ;;
        cross_entropy) on_ranks scripts/bench/bench.py --tokens 1024 2048 4096 8192 --vocab 32064 50304 128256 151936 \
            --tasks ce --seconds 0.03 --limit 40 --json "$out/tp${ranks}_ce.json" ;;
        linear) on_ranks scripts/bench/bench_linear.py --json "$out/tp${ranks}_linear.json" ;;
        tasks) on_ranks scripts/bench/bench.py --vocab 128256 --seconds 0.03 --limit 40 --implementations "ours*" \
            --tasks ce clip+kl+entropy rl ce+kl kl jsd ce+topk sets log_probs_at ce+rank --json "$out/tp${ranks}_tasks.json"
            on_ranks scripts/bench/sampling.py --json "$out/tp${ranks}_sampling.json" ;;
        megatron) on_ranks launch/megatron_pretrain.py --tp "$ranks" \
            --losses stock stock-fused logits head head-one-sweep stock --vocab 49152 --corpus-mb 9 --layers 4 \
            --hidden 1024 --heads 16 --length 1024 --batch 16 --steps 200 --lr 3e-4 \
            --out "$out/megatron_tp$ranks.json" --overwrite ;;
        soak) TP_HEADLOSS_FULL=1 "$python" -m pytest -q tests/engine/test_one_read.py -k random_steps ;;
        *) echo "four_and_eight: no part $1" >&2; return 2 ;;
    esac
}

export -f part on_ranks
export out python ranks
failed=
for name in "$@"; do
    echo "== $name, $ranks GPUs"
    timeout 540 bash -c "set -e; part $name" 2>&1 | tee "$out/$name.log" | tail -n 60 || failed="$failed $name"
done
[ -z "$failed" ] || { echo "four_and_eight: failed:$failed" >&2; exit 1; }
