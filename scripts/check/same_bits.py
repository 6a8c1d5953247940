"""Compare the bits of this tree's results with those of another revision: a refactoring must not change one.

    .venv/bin/python scripts/check/same_bits.py HEAD~1              # 400 calls with each backend, on the CPU or a GPU
    .venv/bin/python scripts/check/same_bits.py HEAD~3 --calls 2000 --backend torch

Random calls of the public functions (statistics, losses, linear heads; teachers, transforms, reductions and types; not
the label's rank, sets, given ids and one launch), in one process without a group, are made by both trees from the same
numbers. Their statistics, losses, sums
and gradients are hashed, call by call. The exit status is 1 if a call differs; its number and arguments are printed,
and `--only NUMBER` makes it alone. Other words of an error count as a difference, too.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DTYPES = ("float32", "bfloat16", "float16")
TEACHERS = ("forward_kl", "reverse_kl", "teacher_entropy", "jsd", "total_variation")
TOPK = (
    "topk_forward_kl", "vocab_forward_kl", "topk_reverse_kl", "topk_log_mass", "tail_log_mass", "tail_entropy",
    "topk_jsd", "vocab_jsd",
)  # fmt: skip


def drawn(draw: random.Random) -> dict:
    """What one call is, in plain values."""
    vocab = draw.choice((1, 7, 64, 130, 300, 1031))
    teacher = draw.choice((None, None, "logits", "entries"))
    served = {"logits": TEACHERS, "entries": TOPK}.get(teacher, ())
    return {
        "call": draw.choice(("statistics", "loss", "linear", "one sweep")),
        "dtype": draw.choice(DTYPES), "lead": draw.choice(((5,), (2, 3), (1,), (0,))), "vocab": vocab,
        "labels": draw.choice((True, True, False)), "shifted": draw.choice((False, True)),
        "want": [n for n in ("entropy", "total", "argmax", "collision") if draw.random() < 0.5],
        "of_teacher": draw.sample(served, draw.randint(1, len(served))) if served else [],
        "teacher": teacher, "entries": draw.randint(1, 9), "renormalize": draw.choice((True, False)),
        "temperatures": [draw.choice((1.0, 0.5, 2.0, "tokens")) for _ in range(3)],
        "bias": draw.random() < 0.3, "scale": draw.choice((1.0, 1.0, -0.7)), "softcap": draw.choice((None, None, 5.0)),
        "infinite": draw.random() < 0.3, "weight": draw.random() < 0.3,
        "reduction": draw.choice(("mean", "sum", "none")),
        "smoothing": draw.choice((0.0, 0.0, 0.1)), "seed": draw.randrange(1 << 30),
    }  # fmt: skip


def made(what: dict, backend: str) -> list:
    """The tensors that one call of this process's tp_headloss gives."""
    import torch

    import tp_headloss as hl

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(what["seed"])
    dtype, lead, vocab = getattr(torch, what["dtype"]), what["lead"], what["vocab"]

    def normal(*shape, kind=torch.float32):
        return torch.randn(shape, generator=generator).to(device, kind)

    x, hidden, weight = 3 * normal(*lead, vocab), normal(*lead, 8, kind=dtype), normal(vocab, 8, kind=dtype)
    x = (x + 80 if what["shifted"] else x).to(dtype)
    if what["infinite"]:
        x[..., ::3] = -torch.inf
    labels = torch.randint(-1, vocab, lead, generator=generator).to(device)
    labels = labels.masked_fill(labels < 0, -100)
    temperature, of_teacher, of_student = (
        torch.rand(lead, generator=generator).to(device) + 0.5 if t == "tokens" else t for t in what["temperatures"]
    )
    bias = normal(vocab).requires_grad_() if what["bias"] else None
    linear = what["call"] in ("linear", "one sweep")
    transform = hl.Transform(None if linear else bias, what["scale"], what["softcap"], temperature)
    teacher, options = None, hl.Options(backend=backend)
    if what["teacher"] == "logits":
        teacher = hl.Teacher(normal(*lead, vocab, kind=dtype), of_teacher, of_student)
    elif what["teacher"] == "entries":
        ids = torch.randint(-1, vocab, (*lead, what["entries"]), generator=generator).to(device)
        tempered = {"temperature": of_teacher} if what["renormalize"] else {}
        log_probs = normal(*ids.shape) - 3
        more = {"student_temperature": of_student, "renormalize": what["renormalize"]}
        teacher = hl.TopKTeacher(ids, log_probs, **tempered, **more)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()] if linear else [x.requires_grad_()]
    leaves += [] if bias is None else [bias]
    want = (*what["want"], *what["of_teacher"])
    keywords = {"transform": transform, **({"bias": bias} if linear else {})}
    if what["call"] == "statistics" or (what["call"] == "linear" and not what["labels"]):
        operands = (hidden, weight) if linear else (x,)
        function = hl.linear_vocab_statistics if linear else hl.vocab_statistics
        given = labels if what["labels"] else None
        stats = function(*operands, given, want=want, teacher=teacher, options=options, **keywords)
        outputs = [value for value in stats if isinstance(value, torch.Tensor) and value is not given]
        upstream = [normal(*value.shape) for value in outputs]
        pairs = [(value, g) for value, g in zip(outputs, upstream) if value.requires_grad]
        values, given = zip(*pairs)
        return [*outputs, *torch.autograd.grad(values, leaves, given, allow_unused=True)]
    terms = [hl.CrossEntropy(label_smoothing=what["smoothing"]), hl.ZLoss(0.1)]
    terms += [hl.Entropy(0.2)] if "entropy" in want else []
    if what["teacher"] == "logits":
        terms += [hl.Distillation(0.5, "forward_kl"), hl.Distillation(0.5, "jsd", temperature_squared=True)]
    elif what["teacher"] == "entries":
        terms.append(hl.TopKDistillation(0.5, "reverse_kl", "topk" if what["renormalize"] else "tail"))
    head = hl.HeadLoss(terms, metrics=("accuracy", "lse"), reduction=what["reduction"], options=options)
    keywords["token_weight"] = torch.rand(lead, generator=generator).to(device) + 0.1 if what["weight"] else None
    keywords["inputs"] = {} if teacher is None else {"teacher": teacher}
    if linear:
        mode = "one_sweep" if what["call"] == "one sweep" and what["reduction"] != "none" else "recompute"
        mode = "recompute" if dtype == torch.float16 else mode
        out = head.linear(hidden, weight, labels, linear=hl.Linear(mode), **keywords)
    else:
        out = head(x, labels, **keywords)
    grads = torch.autograd.grad(out.loss.sum(), leaves, allow_unused=True)
    return [out.loss, out.count, *out.terms.values(), *out.metrics.values(), *grads]


def hashes(numbers: list[int], backend: str) -> dict[str, str]:
    """The hash of the bits of each call's results, or its error."""
    import torch

    if backend == "triton" and not torch.cuda.is_available():
        sys.path.insert(0, str(ROOT / "tests/helpers"))
        import interpreter

        interpreter.patch_interpreter()
    found = {}
    for number in numbers:
        digest = hashlib.sha256()
        try:
            for value in made(drawn(random.Random(number)), backend):
                if value is not None:
                    digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            found[str(number)] = digest.hexdigest()
        except Exception as error:
            found[str(number)] = f"{type(error).__name__}: {error}"
    return found


def run(tree: Path, numbers: list[int], backend: str, jobs: int) -> dict[str, str]:
    """`hashes` in processes that import this tree's package."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    if not Path("/dev/nvidia0").exists():
        environment["TRITON_INTERPRET"] = "1"
    command, found = [sys.executable, str(Path(__file__).resolve())], {}
    parts = [json.dumps([numbers[i::jobs], backend]) for i in range(jobs)]
    processes = [
        subprocess.Popen(command, env={**environment, "SAME_BITS": part}, stdout=subprocess.PIPE, text=True)
        for part in parts
    ]
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a process that imports {tree} ended with status {process.returncode}")
        found.update(json.loads(output))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="what to compare this tree with, or a folder that holds such a tree")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of calls")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--backend", choices=("torch", "triton"), nargs="*", default=("torch", "triton"))
    args = parser.parse_args()
    numbers, different = args.only or list(range(args.calls)), []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(args.revision)
        if not (other / "tp_headloss").is_dir():
            other = Path(folder)
            command = ["git", "archive", args.revision, "tp_headloss"]
            archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        for backend in args.backend:
            ours, theirs = (run(tree, numbers, backend, args.jobs) for tree in (ROOT, other))
            failed = [n for n in ours if ":" in ours[n] and ours[n] == theirs[n]]
            different += [(backend, n) for n in ours if ours[n] != theirs[n]]
            print(f"{backend}: {len(numbers)} calls, {len(failed)} of them the same error", flush=True)
            for number in [n for n in ours if ours[n] != theirs[n]][:20]:
                print(f"{backend} {number}: {drawn(random.Random(int(number)))}\n  {theirs[number]}\n  {ours[number]}")
    print(f"{len(different)} calls differ from {args.revision}")
    sys.exit(bool(different))


if __name__ == "__main__":
    if "SAME_BITS" in os.environ:
        print(json.dumps(hashes(*json.loads(os.environ["SAME_BITS"]))))
    else:
        main()
