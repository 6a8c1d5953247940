"""How exact loss and gradients are, against float64, in units in the last place, for each dtype of the logits.

python scripts/bench/accuracy.py --json docs/bench/accuracy_cpu.json       # on a CPU, the torch backend
python scripts/bench/accuracy.py --json docs/bench/accuracy_h200.json      # on a GPU, the kernels

Cross-entropy with random upstream gradients, over vocabularies and distributions that are hard in different ways. The
bounds are those of tests/statistics/test_accuracy.py; docs/theory.md derives them. An error over its bound is a share
above 1.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from tp_headloss import Options, vocab_statistics

sys.path.append(str(Path(__file__).parents[2] / "tests/helpers"))
import oracle

SIZES = 8, 1000, 32000, 50304, 128256, 151936, 152064, 262144
DISTRIBUTIONS = "sigma 1", "sigma 3", "sigma 10", "confident", "half at -inf", "times 1e4"
U = 2.0**-24  # fp32 unit roundoff
# probabilities below 2^-126 count as 0, times an upstream gradient of up to 8
FLUSHED = 8 * 2.0**-126
BLOCK = 1 << 24  # elements of the float64 reference at a time


def rows(kind: str, n: int, vocab_size: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    x, labels = (
        torch.randn(n, vocab_size, device=device),
        torch.randint(0, vocab_size, (n,), device=device),
    )
    at = torch.arange(n, device=device), labels
    if kind.startswith("sigma"):
        x *= float(kind.split()[1])
    elif kind == "confident":  # margins of 8 to 80 over the largest other logit
        x[at] = x.amax(1) + torch.linspace(8, 80, n, device=device)
    elif kind == "half at -inf":
        x[:, ::2] = -torch.inf
        x[at] = 0.5
    else:
        x *= 1e4
    return x, labels


def reference(x, labels, upstream):
    """Float64, the target kept out of the sum -> loss, its margin, d/dx, whether a column is the
    label's, |x - max|."""
    z = x.double()
    at = torch.zeros_like(z, dtype=torch.bool).scatter_(1, labels[:, None], True)
    top = z.amax(1, keepdim=True)
    terms = (z - top).exp()
    others = terms.masked_fill(at, 0.0).sum(1)
    u = top[:, 0] - z.gather(1, labels[:, None])[:, 0]
    loss = torch.where(u == 0, others.log1p(), u + (others + (-u).exp()).log())
    whole = others + (-u).exp()
    gradient = (
        torch.where(at, -(others / whole)[:, None], terms / whole[:, None])
        * upstream.double()[:, None]
    )
    return loss, oracle.margin(z, labels), gradient, at, (z - top).abs()


class Worst:
    """Of everything seen so far."""

    def __init__(self):
        self.numbers = dict.fromkeys(
            ("loss_share", "loss_ulp", "gradient_share", "gradient_ulp"), 0.0
        )
        self.elements = self.nearest = 0
        self.signed = self.squares = 0.0

    def see(self, name, values):
        if values.numel():
            self.numbers[name] = max(self.numbers[name], values.max().item())

    def add(self, stats, x, gradient, truth, dtype):
        loss, margin, expected, at, distance = truth
        cuda = gradient.is_cuda
        error = (-stats.log_prob.double() - loss).abs() / oracle.ulp(loss)
        self.see("loss_ulp", error)
        self.see(
            "loss_share",
            error / (8 + margin.clamp(0, 200) if cuda else 4 + (margin - 8).clamp(0, 200)),
        )
        error, unit = gradient.double() - expected, oracle.ulp(expected, dtype)
        slack = torch.where(at, distance + 40, 3 * distance + 16 if cuda else distance + 8)
        if dtype == torch.float32:
            allowed = slack.nan_to_num(posinf=0.0) * U * expected.abs() + FLUSHED
        elif dtype == torch.bfloat16:
            allowed = 0.505 * unit + FLUSHED
        else:  # below 2^-14 spacing does not shrink any more
            allowed = 0.55 * unit
        self.see("gradient_share", error.abs() / allowed)
        # what may be flushed to 0 is outside of any unit; fp16 ends long before
        normal = expected.abs() >= max(torch.finfo(dtype).tiny, 64 * 2.0**-126)
        self.see("gradient_ulp", (error / unit).abs()[normal])
        self.elements += int(normal.sum())
        self.nearest += int(((error.abs() <= 0.5 * unit) & normal).sum())
        self.signed += float((error / unit)[normal].sum())
        # logits of half precision take few values, and equal ones of a row have equal errors
        for row, counted in zip(x, normal) if dtype != torch.float32 else ():
            self.squares += float(
                row[counted].unique(return_counts=True)[1].double().square().sum()
            )

    def result(self, dtype) -> dict:
        out = {name: round(value, 4) for name, value in self.numbers.items()}
        if dtype != torch.float32:
            out["correctly_rounded"] = round(self.nearest / self.elements, 6)
            out["mean_signed_ulp"] = self.signed / self.elements
            # of unbiased rounding
            out["three_sigma_of_that"] = 3 * (self.squares / 12) ** 0.5 / self.elements
        return out | {"elements": self.elements}


def measure(dtype, n: int, device) -> dict:
    worst = Worst()
    options = Options(backend="triton" if device == "cuda" else "torch")
    for vocab_size in SIZES:
        for kind in DISTRIBUTIONS:
            x, labels = rows(kind, n, vocab_size, device)
            x = x.clamp(-6e4, 6e4) if dtype == torch.float16 and kind == "times 1e4" else x
            x, upstream = x.to(dtype).requires_grad_(), torch.randn(n, device=device) * 2
            stats = vocab_statistics(x, labels, options=options)
            stats.log_prob.backward(-upstream)
            step = max(1, BLOCK // vocab_size)
            for first in range(0, n, step):
                here = slice(first, first + step)
                part = stats._replace(log_prob=stats.log_prob[here].detach())
                truth = reference(x.detach()[here], labels[here], upstream[here])
                worst.add(part, x.detach()[here], x.grad[here], truth, dtype)
    return worst.result(dtype)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows", type=int, help="per vocabulary and distribution; default 12, on a GPU 64"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = args.rows or (64 if device == "cuda" else 12)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    out = {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": n,
    }
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out[str(dtype)] = measure(dtype, n, device)
        print(dtype, json.dumps(out[str(dtype)]))
    if args.json is not None:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
