"""Random calls of shared `HeadLoss`es, and what each gives: for tests of what one call leaves for
the next."""

import contextlib
import functools
import math
import random
import threading
from typing import Any, NamedTuple

import torch

import tp_headloss as hl

UPSTREAM = 1.0, 1.0, 0.0, -0.0, 1e-30, 0.25, 65536.0, math.inf, math.nan
WIDTH, HIDDEN = 40, 16


def moody(stats, mood):
    """A user's term that raises for some inputs."""
    if bool((mood > 1e6).any()):
        raise ArithmeticError("a user's term")
    return mood * stats.log_prob.exp()


POLICY = "advantages", "old_log_prob", "reference_log_prob"
LOSSES: dict[str, tuple] = {  # terms, metrics, inputs
    "cross-entropy": ([hl.CrossEntropy()], (), ()),
    "z-loss": ([hl.CrossEntropy(), hl.ZLoss(0.1)], ("accuracy",), ()),
    "entropy": ([hl.CrossEntropy(label_smoothing=0.1), hl.Entropy(0.2)], ("entropy",), ()),
    "policy": ([hl.PolicyGradient(), hl.KLToReference(0.1)], ("entropy",), POLICY),
    "its own weights": ([hl.PolicyGradient("positive-nll")], (), ("rewards",)),
    "own": (
        [hl.CrossEntropy(), hl.Term("moody", moody, 0.5, inputs=("mood",), pointwise=True)],
        (),
        ("mood",),
    ),
}


class Call(NamedTuple):
    """One call and its backward, all random choices made."""

    seed: int
    loss: str
    backend: str
    dtype: torch.dtype
    tokens: int
    upstream: float
    backwards: int  # 0: none comes
    mode: str  # "grad", "no_grad", "inference", "autocast", "thread", "stream"
    inplace: bool
    gradient: str  # of `Options`
    denominator: Any  # None, a number, or "tensor"
    weighted: bool
    transform: str | None  # None, "temperature", "temperatures", "softcap" or "bias"
    linear: str | None  # a mode of a linear head; None: logits
    raises: bool


def random_call(choices: random.Random, backends, modes) -> Call:
    return Call(
        seed=choices.randrange(4),
        loss=choices.choice(list(LOSSES)),
        backend=choices.choice(backends),
        dtype=choices.choice([torch.bfloat16, torch.float32]),
        tokens=choices.choice([6, 9, 1]),
        upstream=choices.choice(UPSTREAM),
        backwards=choices.choice([1, 1, 1, 2, 0]),
        mode=choices.choice(modes),
        inplace=choices.random() < 0.15,
        gradient=choices.choice(["auto", "forward", "forward", "backward"])
        if torch.cuda.is_available()
        else "auto",
        denominator=choices.choice([None, None, 4.0, 0, "tensor"]),
        weighted=choices.random() < 0.2,
        transform=choices.choice([None, None, "temperature", "temperatures", "softcap", "bias"]),
        linear=choices.choice([None, None, "auto", "recompute", "one_sweep"]),
        raises=choices.random() < 0.2,
    )


def random_calls(seed: int, count: int, backends, modes) -> list[Call]:
    """Calls of which most differ from the one before by little: a seed, or one of their choices."""
    choices = random.Random(seed)
    calls = [random_call(choices, backends, modes)]
    while len(calls) < count:
        other = random_call(choices, backends, modes)
        changed = choices.sample(
            Call._fields[1:], choices.choice([0, 0, 1, 1, 2, len(Call._fields) - 1])
        )
        calls.append(
            calls[-1]._replace(seed=other.seed, **{name: getattr(other, name) for name in changed})
        )
    return calls


class Caller:
    """Heads that all calls share, so that what one leaves is there for the next."""

    def __init__(self, group, device):
        self.device = device
        self.shard = None if group is None else hl.VocabShard.from_group(group, WIDTH)
        self.head = functools.cache(self._head)

    def _head(self, loss: str, backend: str, inplace: bool, gradient: str):
        terms, metrics, _ = LOSSES[loss]
        options = hl.Options(backend=backend, inplace=inplace, gradient=gradient)
        return hl.HeadLoss(terms, metrics=metrics, options=options)

    def take(self, call: Call):
        """What a call gives: the numbers of its results, or its error."""
        if call.mode != "thread":
            return self._taken(call)
        found: list = []
        thread = threading.Thread(target=lambda: found.append(self._taken(call)))
        thread.start()
        thread.join()
        return found[0]

    def _taken(self, call: Call):
        try:
            with self._context(call.mode):
                return self._results(call)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"[:200]

    def _context(self, mode: str):
        if mode == "no_grad":
            return torch.no_grad()
        if mode == "inference":
            return torch.inference_mode()
        if mode == "autocast":
            return torch.autocast(self.device.type, torch.bfloat16)
        if mode == "stream" and self.device.type == "cuda":
            return torch.cuda.stream(torch.cuda.Stream())
        return contextlib.nullcontext()

    def _transform(self, call: Call, draw) -> hl.Transform | None:
        if call.transform is None:
            return None
        if call.transform == "temperature":
            return hl.Transform(temperature=0.5 + call.seed)
        if call.transform == "temperatures":
            return hl.Transform(temperature=draw(call.tokens).abs() + 0.5)
        if call.transform == "softcap":
            return hl.Transform(softcap=2.0 + call.seed)
        whole = draw(WIDTH)
        bias = whole if self.shard is None else whole[self.shard.start : self.shard.stop]
        return None if call.linear else hl.Transform(bias=bias.contiguous())

    def _results(self, call: Call):
        generator = torch.Generator().manual_seed(call.seed)
        draw = lambda *shape: torch.randn(shape, generator=generator).to(self.device)  # noqa: E731
        labels = torch.randint(WIDTH, (call.tokens,), generator=generator).to(self.device)
        labels[call.seed % call.tokens] = -100
        inputs = {name: draw(call.tokens) - 2 for name in LOSSES[call.loss][2]}
        if "mood" in inputs and call.raises:
            inputs["mood"][0] = 1e9
        given = {
            "shard": self.shard,
            "inputs": inputs or None,
            "denominator": torch.tensor(5.0, device=self.device)
            if call.denominator == "tensor"
            else call.denominator,
            "token_weight": draw(call.tokens).abs() if call.weighted else None,
        }
        given["transform"] = self._transform(call, draw)
        columns = slice(None) if self.shard is None else slice(self.shard.start, self.shard.stop)
        inplace = call.inplace and call.linear is None
        # when a gradient is written can be asked of the kernels for logits alone
        asked = call.gradient if call.backend == "triton" and call.linear is None else "auto"
        head = self.head(call.loss, call.backend, inplace, asked)
        if call.linear is None:
            leaves = [
                (3 * draw(call.tokens, WIDTH))[:, columns]
                .to(call.dtype)
                .contiguous()
                .requires_grad_()
            ]
            out = head(leaves[0] * 1.0, labels, **given)
        else:
            hidden, weight = draw(call.tokens, HIDDEN), draw(WIDTH, HIDDEN)[columns]
            leaves = [x.to(call.dtype).contiguous().requires_grad_() for x in (hidden, weight)]
            out = head.linear(*leaves, labels, linear=hl.Linear(call.linear), **given)
        results = [out.loss, out.stats.log_prob, *out.metrics.values()]
        results = [x.detach().clone() for x in results]
        for i in range(call.backwards if out.loss.requires_grad else 0):
            loss = (call.upstream if i == 0 else 0.5) * out.loss
            results += [x.clone() for x in torch.autograd.grad(loss, leaves, retain_graph=True)]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return [x.float().cpu() for x in results]


def in_order(group, device, calls: list[Call], order: list[int]) -> list:
    """What the calls give, taken in this order, in the calls' own."""
    caller, found = Caller(group, device), {}
    for i in order:
        found[i] = caller.take(calls[i])
    return [found[i] for i in range(len(calls))]


def alike(one, two, tolerance: float = 0.0) -> bool:
    """Whether two results are the same numbers, NaN included, or the same error."""
    if isinstance(one, str) or isinstance(two, str):
        return one == two
    return len(one) == len(two) and all(
        torch.allclose(a, b, rtol=tolerance, atol=0.0, equal_nan=True) for a, b in zip(one, two)
    )
