"""Plant one-line bugs, one at a time, in a copy of the package, and see whether the tests notice.

.venv/bin/python scripts/check/mutants.py                  # all of them, two at a time; an hour on two cores
.venv/bin/python scripts/check/mutants.py --only 0 7 12    # some, by number
.venv/bin/python scripts/check/mutants.py --list

A mutant is killed if the tests of its group fail, and survives if they pass. Survivors, and mutants whose line is no
longer there, are listed at the end and make the exit status 1.
"""

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
KERNELS, TOPK, EAGER = "backends/kernels.py", "backends/topk_kernels.py", "backends/eager.py"
SUMS, MEGATRON = "backends/sums_kernels.py", "integrations/megatron.py"

GROUPS = {  # tests -> (file of the package, code, what it becomes)
    "test_losses test_accuracy test_bad_inputs test_bad_inputs_triton test_distillation test_sharding": [
        (KERNELS, "target += tl.where(owner == 1.0, tl.load(at + 2 * n, mask=here, other=0.0), 0.0)", "target += tl.where(owner == 1.0, 0.0, 0.0)"),
        (KERNELS, "others = tl.fma(factor, s, others)", "others = tl.fma(1.0, s, others)"),
        (KERNELS, "moment = tl.fma(factor, tl.fma(drop, s, e), moment)", "moment = tl.fma(factor, e, moment)"),
        (KERNELS, "ignored = owners == 2.0 * PACKETS", "ignored = owners == 2.0"),
        (KERNELS, "top = tl.maximum(shift, target)", "top = shift"),
        (KERNELS, "whole = others + p_target", "whole = others"),
        (KERNELS, "log_prob = 0.0 - tl.where(target == top, log_sum, log_sum - offset)", "log_prob = 0.0 - log_sum"),
        (KERNELS, "bad = (~(whole > 0.0) | (owners != 1.0)) & ~ignored", "bad = ~(whole > 0.0) & ~ignored"),
        (KERNELS, "index = tl.where(m == peak, tl.minimum(index, column), index)", "index = tl.where(m == peak, column, index)"),
        (KERNELS, "_settle(others / whole, bad, ignored)", "_settle(others, bad, ignored)"),
        (KERNELS, "_settle(log_sum - mean, bad, ignored)", "_settle(log_sum, bad, ignored)"),
        (KERNELS, "v = tl.where(inside == target, float(\"-inf\"), z)", "v = z"),
        (KERNELS, "z = tl.where(inside < size, z, float(\"-inf\"))", "pass"),
        (KERNELS, "at_target = tl.exp(offset) * common / whole", "at_target = tl.exp(offset) * common"),
        (KERNELS, "(tl.maximum(shifted, -200.0) - mean))", "tl.maximum(shifted, -200.0))"),
        (KERNELS, "dz += tl.where(z == float(\"-inf\"), 0.0, w)", "dz += w"),
        (KERNELS, "        dz *= slope\n", "        dz *= 1.0\n"),
        (KERNELS, "dz = tl.where(columns < valid_width, dz, 0.0)", "pass"),
        (KERNELS, "dz += p * (g * per_student) - q * (g * per_teacher)", "dz += p * (g * per_student)"),
        (KERNELS, "variation_mean += sign * p", "variation_mean += p"),
        (KERNELS, "teacher = tl.fma(factor_t, d, teacher)", "teacher = tl.fma(1.0, d, teacher)"),
        (SUMS, "divisor = tl.where(divisor == 0.0, float(\"inf\"), divisor)", "pass"),
        (SUMS, "            if (SQUARES >> i) & 1:\n                value *= value", "            if False:\n                value *= value"),
        (SUMS, "g *= 2.0 * tl.load(value_ptrs[i]", "g *= tl.load(value_ptrs[i]"),
        ("stats.py", "whole = scaled * whole + at_target", "whole = scaled * whole"),
        ("stats.py", "weigh(scaled, gap) + weigh(at_target, scale * target - state.teacher_target)", "weigh(scaled, gap)"),
        (EAGER, "dz = dz + tile.scale * _of_teacher(", "dz = dz + _of_teacher("),
        ("api.py", "(1.0 / teacher.temperature, temperature / teacher.of_student)", "(1.0 / teacher.temperature, 1.0 / teacher.of_student)"),
        ("losses/distillation.py", "return temperature**2 * values", "return temperature * values"),
        ("shard.py", "step = -(-padded_size // world_size)", "step = padded_size // world_size"),
        ("shard.py", "return max(0, min(self.stop, self.vocab_size) - self.start)", "return self.stop - self.start"),
        ("head_loss.py", "return count.clamp(min=1) if weight is None else nonzero(count)", "return count"),
        ("head_loss.py", "labels = torch.where(token_weight == 0, self.ignore_index, labels.long())", "pass"),
        ("head_loss.py", "    if value.dim() not in (0, labels.dim()):", "    if False:"),
        ("reduce.py", "denominator.double().masked_fill", "denominator.float().masked_fill"),
        (KERNELS, "for first in range(0, PACKETS, STEP):\n        for k in tl.static_range(STEP):\n            at = _packet(packets_ptr, peers_ptr, first + k, slot_offset, ROWS * n, CHUNKS) + token\n            m =", "for first in range(0, 8, STEP):\n        for k in tl.static_range(STEP):\n            at = _packet(packets_ptr, peers_ptr, first + k, slot_offset, ROWS * n, CHUNKS) + token\n            m ="),
    ],
    "test_topk test_topk_distillation": [
        ("stats.py", "live = live if mask is None else live & mask", "live = live"),
        ("stats.py", "values[-len(sums) // 2 :] = sums[::2].clamp(min=0)", "values[-len(sums) // 2 :] = sums[1::2].clamp(min=0)"),
        (EAGER, "common = common - g[\"vocab_jsd\"] * here[\"vocab_jsd_mean\"]", "common = common"),
        (EAGER, "return _fill(dz, tile.columns, at)", "return dz"),
        ("losses/distillation.py", "tail - stats.tail_entropy - outside", "tail + stats.tail_entropy - outside"),
        (TOPK, "cross -= tl.where(mass == 0.0, 0.0, mass * drop)", "pass"),
        (TOPK, "log_tau += tl.log(tl.where(kept, total, 1.0))", "pass"),
        (TOPK, "common = outside * common + inside * g_outside", "common = outside * common"),
        (TOPK, "p *= tl.load(at + 7 * n)", "p *= 1.0"),
        (KERNELS, "entry += tl.sum((ids < start + first)", "entry += tl.sum((ids <= start + first)"),
        (KERNELS, "dz += tl.load(extra_ptr + row * n_entries + positions, mask=readable, other=0.0)", "dz += 0.0"),
        ("topk.py", "cut = before >= top_p", "cut = before > 2"),
        ("topk.py", "bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()", "bits).long()"),
    ],
    "test_policy test_sequences test_preference": [
        ("reduce.py", "counted = valid if weight is None else valid & (weight != 0)", "counted = valid"),
        ("losses/ratio.py", "bounded(log_prob - other, -limit, limit)", "bounded(log_prob - other, high=limit)"),
        ("losses/ratio.py", "held * 0 * grad), None", "0.0), None"),
        ("losses/policy.py", "held = torch.where(advantages == 0, ratio * 0, held)", "pass"),
        ("losses/rollout.py", "torch.where(mean.isnan(), torch.nan, ratio.exp())", "ratio.exp()"),
        ("sequences.py", "offsets = bounds.clamp(0, tokens).cummax(0).values", "offsets = bounds"),
        ("sequences.py", "sum_over_ranks(self._poisoned(self._local_sum(values)), self.group)", "sum_over_ranks(self._local_sum(values), self.group)"),
        ("losses/policy.py", "bounded(ratio, high=high), bounded(ratio, low, most)", "bounded(ratio, high=high), bounded(ratio, low)"),
        ("losses/policy.py", "masked_fill(advantages > 0, temperatures[0])", "masked_fill(advantages < 0, temperatures[0])"),
        ("losses/policy.py", "candidates = mask & ~clipped_away &", "candidates = mask &"),
        ("losses/kl.py", "value = with_gradient_of(value, _value(x, \"k2\"))", "pass"),
        ("losses/kl.py", "return torch.expm1(-x) + x", "return torch.expm1(x) - x"),
        ("losses/rollout.py", "(weight < bounds[0]) | (weight > bounds[1]), 0.0", "(weight > bounds[1]), 0.0"),
        ("losses/preference.py", "- label_smoothing * logsigmoid(-h)", "- label_smoothing * logsigmoid(h)"),
        ("losses/metrics.py", "(ratio > dual_clip) & (advantages < 0)", "(ratio > dual_clip)"),
        ("sequences.py", "right=True", "right=False"),
        ("comm.py", "out[name] = column.amin(0)", "out[name] = column.sum(0)"),
        ("head_loss.py", "count = total / sequences.ranks", "count = total"),
    ],
    "test_linear": [
        ("sweeps.py", "add=not first or self.wanted.main_grad is not None", "add=not first"),
        ("sweeps.py", "self.bias[ids] += gradient.sum(0, dtype=self.bias.dtype)", "self.bias[ids] = gradient.sum(0, dtype=self.bias.dtype)"),
        ("sweeps.py", "valid = min(max(spec.valid_width - here.start, 0), here.stop - here.start)", "valid = here.stop - here.start"),
        ("sweeps.py", "add=v is not ids[0])", "add=False)"),
        ("sweeps.py", "exact = wanted.weight if blocks == 1 else passes.float_type(wanted.weight)", "exact = wanted.weight"),
        ("comm.py", "if world_size == 1 or how == \"none\" or grad.numel() == 0:", "if world_size == 1 or grad.numel() == 0:"),
        ("autograd.py", "weight.grad_added_to_main_grad = True", "pass"),
        ("autograd.py", "upstream = torch.where(upstream == ctx.upstream, 1.0, torch.nan).to(upstream.dtype)", "upstream = torch.ones_like(upstream)"),
    ],
    "test_module": [
        ("module.py", "            errors.append(\n", "            print(\n"),
        ("module.py", "random.Random(f\"{self.init.seed} {first}\")", "random.Random(f\"{self.init.seed}\")"),
        ("module.py", ".masked_fill(unknown.unsqueeze(-1), torch.nan)", ""),
        ("module.py", "return F.linear(hidden, weight, bias)", "return F.linear(hidden, weight)"),
        ("module.py", "given[shard.start : min(shard.stop, shard.vocab_size)]", "given[: shard.width]"),
        ("module.py", "labels[..., min(depth, length) :]", "labels[..., min(1, length) :]"),
        ("module.py", "return replace(self.transform, temperature=of_call.temperature)", "return of_call"),
        ("module.py", "return x.new_empty(0).requires_grad_()", "return None"),
        ("autograd.py", "return FromShards.apply(grad, *ctx.reduction), None", "return grad, None"),
        ("autograd.py", "return ToShards.apply(grad, *ctx.reduction), None", "return grad, None"),
    ],
    "test_dtensor": [
        ("dtensor.py", "weight.to_local(grad_placements=_weight_grads(hidden, weight, dim))", "weight.to_local()"),
        ("dtensor.py", "if shard.padded_size not in (None, rows):", "if False:"),
        ("dtensor.py", " or _members(group) != _members(shard.group):", ":"),
        ("dtensor.py", "        if not replicated:", "        if False:"),
        ("dtensor.py", "    if others and not (is_dtensor(hidden)", "    if False and not (is_dtensor(hidden)"),
    ],
    "test_megatron": [
        (MEGATRON, "scale=config.mup_output_mult if", "scale=1.0 if"),
        (MEGATRON, "how = \"reduce_scatter\" if layer.sequence_parallel else \"none\" if partial", "how = \"none\" if partial"),
        (MEGATRON, "weight = layer.weight if weight is None else weight", "weight = layer.weight"),
        (MEGATRON, "labels = labels.masked_fill((labels < 0) | (labels >= shard.vocab_size), OUTSIDE)", "pass"),
        (MEGATRON, "return torch.where(far.any(), torch.nan, factor), None, None", "return factor, None, None"),
        (MEGATRON, "    if head.calls == before:", "    if False:"),
        (MEGATRON, "return out.loss.transpose(0, 1).contiguous()", "return out.loss.contiguous()"),
    ],
    "test_contract": [
        ("autograd.py", "for x in (*saved, *upstream) if x is not None", "for x in upstream if x is not None"),
        ("autograd.py", "        if torch.is_grad_enabled():  # what the", "        if False:  # what the"),
    ],
    "test_agreement": [
        ("agreement.py", "        if not failed:\n            _compare(facts)", "        if not failed:\n            pass"),
        ("agreement.py", "text, checksum = _describe_tensor(value, SHARDED.get(name))", "text, checksum = _describe_tensor(value, 0)"),
        ("agreement.py", "if a != b or checksum != other_checksum:", "if a != b:"),
        ("agreement.py", "raise RAISED.get(name, RuntimeError)(", "raise RuntimeError("),
        ("agreement.py", "text, parts = value.__qualname__, _closed_over(value)", "text = value.__qualname__"),
        ("agreement.py", "    if str(covered) != vocab_size:", "    if False:"),
        ("agreement.py", "    if alike[True] and alike[False]:", "    if False:"),
        ("agreement.py", "        elif set(errors) != {errors[0]}:", "        elif True:"),
    ],
    "test_rl_trainers": [
        ("integrations/nemo_rl.py", "labels[:, : ids.shape[1] - 1] = ids[:, 1:]", "labels[:, : ids.shape[1]] = ids"),
        ("integrations/verl.py", "return temperature.clamp(min=LOWEST_TEMPERATURE)", "return temperature"),
        ("integrations/verl.py", "label = label.masked_fill(~label_mask.bool(), IGNORED)", "pass"),
    ],
}  # fmt: skip


class Mutant(NamedTuple):
    number: int
    tests: str
    file: str
    code: str
    becomes: str

    def __str__(self):
        return (
            f"{self.number:3d} {self.file}: {' '.join(self.code.split())[:70]} -> {' '.join(self.becomes.split())[:50]}"
        )


def all_mutants() -> list[Mutant]:
    planted = [(tests, *change) for tests, changes in GROUPS.items() for change in changes]
    return [Mutant(number, *mutant) for number, mutant in enumerate(planted)]


def copy_of_tree(folder: Path) -> Path:
    """What git tracks, as it is now, beside the environments."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    for environment in (".venv", ".hosts"):
        if (ROOT / environment).exists():
            (folder / environment).symlink_to((ROOT / environment).resolve())
    return folder


def verdict(mutant: Mutant, tree: Path, timeout: float, environment: dict) -> str:
    """ "killed ...", "SURVIVED" or "OUTDATED"."""
    path = tree / "tp_headloss" / mutant.file
    source = path.read_text()
    if mutant.code not in source:
        return "OUTDATED"
    path.write_text(source.replace(mutant.code, mutant.becomes, 1))
    tests = [str(path) for name in mutant.tests.split() for path in (tree / "tests").rglob(f"{name}.py")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return "killed by the timeout"
    finally:
        path.write_text(source)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        f"killed by {failed[0].split()[1]}"
        if run.returncode and failed
        else "SURVIVED"
        if not run.returncode
        else "killed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds; a mutant that makes tests hang is killed")
    args = parser.parse_args()
    mutants = [m for m in all_mutants() if args.only is None or m.number in args.only]
    if args.list:
        print(*mutants, sep="\n")
        return
    waiting, verdicts, begin = queue.SimpleQueue(), {}, time.monotonic()
    for mutant in mutants:
        waiting.put(mutant)

    def work():
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_of_tree(Path(folder))
            environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            while not waiting.empty():
                mutant = waiting.get()
                verdicts[mutant] = verdict(mutant, tree, args.timeout, environment)
                print(mutant, "|", verdicts[mutant], flush=True)

    threads = [threading.Thread(target=work) for _ in range(args.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [mutant for mutant, said in verdicts.items() if not said.startswith("killed")]
    print(f"{len(verdicts) - len(left)} of {len(mutants)} killed in {time.monotonic() - begin:.0f} s")
    for mutant in left:
        print(mutant, "|", verdicts[mutant])
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
