"""Time and memory of head losses, ours and other people's, side by side in one process.

    python scripts/bench/bench.py --tokens 8192 --vocab 32064 128256 --json tp1.json
    torchrun --standalone --nproc-per-node 4 scripts/bench/bench.py --vocab 128256 --tasks ce --implementations 'ours*'
    python scripts/bench/bench.py --device cpu --tokens 64 --vocab 1000 --implementations ours torch  # a smoke test

One row per task, tokens, vocabulary, TP size (the number of processes) and implementation;
`scripts/bench/plot_bench.py` draws the JSON files of one or more runs.

Check: before it is timed, every implementation computes loss and logits gradient with all labels but those of 16 rows
ignored, and is compared with float64 on those rows. Too far off is status "wrong": listed and timed, but marked. Not
done with this first call, which may compile or tune, in `--limit` seconds is status "timed out" (one process). Every
row is printed, and the JSON written, as soon as it is measured.

Times, in microseconds, as 10 %, 50 % and 90 % points over the repeats; with several ranks, of the slowest one:
* forward in grad mode (it saves what its backward needs) and both, of the mean loss over all tokens; backward is their
  difference;
* graph: one replay of a CUDA graph between two events, the L2 cache flushed before. null, with the reason, for what
  cannot be captured;
* eager: up to 10 steps back to back between two events, divided by their number: as in training, the host may run
  ahead. host: what it needs to issue one step, measured apart.
* do_bench (`--do-bench`, one process): both, by `triton.testing.do_bench_cudagraph`, a second clock, without a flush.

Floor: what must move through memory, the logits read forward, read and written backward (6 bytes per logit in bf16),
and those of a teacher read in both (10 bytes), at the copy bandwidth measured in the same process. extra memory: the
peak above the inputs, after a warm-up.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from peers import CLIP, ENTROPY_WEIGHT, KL_WEIGHT, PEERS, SMOOTHING, Z_WEIGHT, Batch
from timing import Machine, is_wanted, measure, parser_of, reason, reported

import tp_headloss as hl
from tp_headloss.engine.transports import TRANSPORTS

IGNORED = -100
CHECKED_ROWS = 16
TOP_K = 64
SOFTCAP = 30.0
TEACHERS_TEMPERATURE = 2.0
# logits; our torch backend works in blocks of 2^19, thousands of launches on more
SMALL_ENOUGH_FOR_EAGER = 1 << 26
# Relative errors of the loss and (L2) of the gradient that still count as right. Ours may add
# nothing but float32 noise and a tenth to the error of rounding the true gradient once.
PEER_TOLERANCE = {"loss": 1e-2, "gradient": 2e-2}
OUR_TOLERANCE = {"loss": 1e-5, "gradient": 1e-5}


@dataclass(frozen=True)
class Task:
    """A loss, ours and its definition. To add one, append it to TASKS."""

    name: str
    ours: Callable[[hl.Options], Callable[[Batch], torch.Tensor]]
    # (logits of the whole vocabulary, labels, **extras) -> mean loss over the valid tokens, and
    # after it any metrics
    reference: Callable[..., tuple]
    # (tokens, vocab, draw) -> inputs besides logits and labels, [tokens] or [tokens, K]: the same
    # on all ranks
    extras: Callable[..., dict] = lambda tokens, vocab, draw: {}
    teacher: bool = False  # one more input of that name, like the logits
    plain_pytorch: bool = False  # it has some of its own that HeadLoss(compile=True) can fuse


def head(*terms, metrics=(), inputs=lambda extras: extras):
    def ours(options, compile=False):
        loss = hl.HeadLoss(terms, metrics=metrics, options=options, compile=compile)
        return lambda batch: (
            loss(batch.logits, batch.labels, shard=batch.shard, inputs=inputs(batch.extras)).loss
        )

    return ours


def distillation(*terms, temperature=1.0):
    def teacher(extras):
        return {"teacher": hl.Teacher(extras["teacher"], temperature)}

    return head(*terms, inputs=teacher)


def topk_distillation(support):
    def teacher(extras):
        return {
            "teacher": hl.TopKTeacher(
                extras["ids"], extras["log_probs"], renormalize=support != "tail"
            )
        }

    return head(hl.CrossEntropy(), hl.TopKDistillation(KL_WEIGHT, support=support), inputs=teacher)


def transformed(make):
    """The cross-entropy of logits to which make(extras) is done first."""

    def ours(options):
        loss = hl.HeadLoss(hl.CrossEntropy(), options=options)
        return lambda batch: (
            loss(batch.logits, batch.labels, shard=batch.shard, transform=make(batch.extras)).loss
        )

    return ours


def of_statistics(loss_of, want, labelled=True, given=lambda extras: {}):
    """A loss that its user writes from statistics, without HeadLoss."""

    def ours(options):
        def loss(batch):
            labels, how = (
                batch.labels if labelled else None,
                {"want": want, "options": options, **given(batch.extras)},
            )
            return loss_of(
                batch, hl.vocab_statistics(batch.logits, labels, shard=batch.shard, **how)
            )

        return loss

    return ours


def log_prob_and_entropy(batch, stats):
    """A gradient of its own for every token."""
    a, b = batch.extras["log_prob"], batch.extras["entropy"]
    return -(a * stats.log_prob + b * stats.entropy).sum() / batch.count


def policy_loss(log_prob, advantage, old):
    ratio = (log_prob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def grpo(batch, stats):
    """CE + z + clipped policy gradient with the entropy as a metric."""
    policy = policy_loss(stats.log_prob, batch.extras["advantage"], batch.extras["old"])
    batch.mean(stats.entropy.detach())
    return batch.mean(policy - stats.log_prob + Z_WEIGHT * stats.lse**2)


# Without labels, which a set would have to hold.
entropy_and_mass_of_sets = of_statistics(
    lambda batch, stats: -valid_mean(stats.set_entropy + stats.set_log_mass, batch.labels),
    ("set_entropy", "set_log_mass"), labelled=False, given=lambda extras: {"sets": hl.IdSets(extras["ids"])},
)  # fmt: skip
mean_log_prob_at_ids = of_statistics(
    lambda batch, stats: -valid_mean(stats.log_probs_at.mean(-1), batch.labels),
    ("log_probs_at",), labelled=False, given=lambda extras: {"ids": extras["ids"]},
)  # fmt: skip


def focal(log_prob):
    return -((1 - log_prob.exp()) ** 2) * log_prob


def valid_mean(per_token, labels):
    valid = labels != IGNORED
    return torch.where(valid, per_token, 0.0).sum() / valid.sum()


def definitions(z, labels):
    """Per token: lse, log-prob of the label, entropy, whether the label is the argmax, and the
    valid tokens' mean."""
    log_p = z.log_softmax(-1)
    log_prob = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy, hit = -(log_p.exp() * log_p).sum(-1), (z.argmax(-1) == labels).to(z.dtype)
    return z.logsumexp(-1), log_prob, entropy, hit, lambda per_token: valid_mean(per_token, labels)


def ce_z_reference(z, labels):
    return (F.cross_entropy(z, labels) + Z_WEIGHT * valid_mean(z.logsumexp(-1) ** 2, labels),)


def ce_z_entropy_accuracy_reference(z, labels):
    lse, log_prob, entropy, hit, mean = definitions(z, labels)
    return (
        mean(Z_WEIGHT * lse**2 - log_prob - ENTROPY_WEIGHT * entropy),
        mean(entropy.detach()),
        mean(hit),
    )


def smoothing_reference(z, labels):
    lse, _, entropy, hit, mean = definitions(z, labels)
    loss = F.cross_entropy(z, labels, label_smoothing=SMOOTHING) + mean(Z_WEIGHT * lse**2)
    return loss, mean(entropy.detach()), mean(hit)


def log_prob_and_entropy_reference(z, labels, log_prob, entropy):
    _, label_log_prob, row_entropy, _, mean = definitions(z, labels)
    return (-mean(log_prob * label_log_prob + entropy * row_entropy),)


def grpo_reference(z, labels, advantage, old):
    lse, log_prob, entropy, _, mean = definitions(z, labels)
    policy = policy_loss(log_prob, advantage, old)
    return mean(policy - log_prob + Z_WEIGHT * lse**2), mean(entropy.detach())


def policy_reference(entropy_weight):
    """Without the metrics but the entropy, which nobody would fuse by hand."""

    def reference(z, labels, advantages, old_log_prob, reference_log_prob, generator_log_prob=None):
        _, log_prob, entropy, _, mean = definitions(z, labels)
        policy = policy_loss(log_prob, advantages, old_log_prob)
        k3 = (reference_log_prob - log_prob).exp() + log_prob - reference_log_prob - 1
        return mean(policy + KL_WEIGHT * k3 - entropy_weight * entropy), mean(entropy.detach())

    return reference


def policy_extras(tokens, vocab, draw, names=("old", "reference")):
    log_probs = {f"{name}_log_prob": 0.5 * draw(tokens) - 15 for name in names}
    return {"advantages": draw(tokens), **log_probs}


def forward_kl(log_p, log_q):
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def reverse_kl(log_p, log_q):
    return forward_kl(log_q, log_p)


def jsd(log_p, log_q):
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return (forward_kl(log_m, log_q) + forward_kl(log_m, log_p)) / 2


def divergence_reference(divergence):
    def reference(z, labels, teacher):
        return (
            valid_mean(divergence(z.log_softmax(-1), teacher.to(z.dtype).log_softmax(-1)), labels),
        )

    return reference


def ce_kl_reference(z, labels, teacher, temperature=1.0):
    log_p = (z / temperature).log_softmax(-1)
    log_q = (teacher.to(z.dtype) / temperature).log_softmax(-1)
    divergence = temperature**2 * valid_mean(forward_kl(log_p, log_q), labels)
    return (F.nll_loss(z.log_softmax(-1), labels) + KL_WEIGHT * divergence,)


def tail(log_probs):
    """With the log-prob of all other ids behind."""
    return torch.cat([log_probs, torch.log1p(-log_probs.exp().sum(-1, keepdim=True))], -1)


def topk_reference(support):
    def reference(z, labels, ids, log_probs):
        all_log_p, log_q = z.log_softmax(-1), log_probs.to(z.dtype)
        log_p = all_log_p.gather(-1, ids)
        if support == "tail":
            log_p, log_q = tail(log_p), tail(log_q)
        else:
            log_p, log_q = (
                log_p.log_softmax(-1) if support == "topk" else log_p,
                log_q.log_softmax(-1),
            )
        return (
            F.nll_loss(all_log_p, labels)
            + KL_WEIGHT * valid_mean(forward_kl(log_p, log_q), labels),
        )

    return reference


def entropy_and_mass_of_sets_reference(z, labels, ids, log_probs):
    log_p = z.log_softmax(-1).gather(-1, ids)
    log_mass = log_p.logsumexp(-1)
    log_s = log_p - log_mass.unsqueeze(-1)
    return (valid_mean((log_s.exp() * log_s).sum(-1) - log_mass, labels),)


def log_probs_at_ids_reference(z, labels, ids, log_probs):
    return (-valid_mean(z.log_softmax(-1).gather(-1, ids).mean(-1), labels),)


def rank_reference(z, labels):
    label = z.gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return F.cross_entropy(z, labels), valid_mean((z > label).sum(-1) + 1.0, labels)


def topk_extras(tokens, vocab, draw, k=TOP_K):
    """What a teacher would have left on disk."""
    log_probs, ids = draw(tokens, vocab).mul_(2).log_softmax(-1).topk(min(k, vocab))
    return {"ids": ids, "log_probs": log_probs}


def set_extras(tokens, vocab, draw, k=TOP_K, ascending=True):
    """As engines export the ids that they kept, from a mask; or by probability."""
    extras = topk_extras(tokens, vocab, draw, k)
    return {**extras, "ids": extras["ids"].sort(-1).values} if ascending else extras


def user_reference(z, labels):
    _, log_prob, _, _, mean = definitions(z, labels)
    return (mean(0.5 * focal(log_prob) - log_prob),)


POLICY = (
    hl.PolicyGradient("clip", clip=(CLIP, CLIP)),
    hl.KLToReference(KL_WEIGHT, "k3", output_clamp=None),
)
TASKS = [
    Task("ce", head(hl.CrossEntropy()), lambda z, labels: (F.cross_entropy(z, labels),)),
    Task(
        "ce, temperatures",
        transformed(lambda extras: hl.Transform(temperature=extras["temperature"])),
        lambda z, labels, temperature: (
            F.cross_entropy(z / temperature.unsqueeze(-1).to(z.dtype), labels),
        ),
        lambda tokens, vocab, draw: {"temperature": draw(tokens).abs() + 0.5},
    ),
    Task(
        "ce, softcap",
        transformed(lambda extras: hl.Transform(softcap=SOFTCAP)),
        lambda z, labels: (F.cross_entropy(SOFTCAP * (z / SOFTCAP).tanh(), labels),),
    ),
    Task(
        "ce, softcap, temperatures",
        transformed(
            lambda extras: hl.Transform(softcap=SOFTCAP, temperature=extras["temperature"])
        ),
        lambda z, labels, temperature: (
            F.cross_entropy(
                SOFTCAP * (z / SOFTCAP).tanh() / temperature.unsqueeze(-1).to(z.dtype), labels
            ),
        ),
        lambda tokens, vocab, draw: {"temperature": draw(tokens).abs() + 0.5},
    ),
    Task("ce+z", head(hl.CrossEntropy(), hl.ZLoss(Z_WEIGHT)), ce_z_reference),
    Task(
        "ce+z+entropy+accuracy",
        head(
            hl.CrossEntropy(),
            hl.ZLoss(Z_WEIGHT),
            hl.Entropy(ENTROPY_WEIGHT),
            metrics=("entropy", "accuracy"),
        ),
        ce_z_entropy_accuracy_reference,
    ),
    Task(
        "ce+z+smoothing+metrics",
        head(
            hl.CrossEntropy(label_smoothing=SMOOTHING),
            hl.ZLoss(Z_WEIGHT),
            metrics=("entropy", "accuracy"),
        ),
        smoothing_reference,
    ),
    Task(
        "log_prob+entropy",
        of_statistics(log_prob_and_entropy, ("entropy",)),
        log_prob_and_entropy_reference,
        lambda tokens, vocab, draw: {
            "log_prob": draw(tokens).abs(),
            "entropy": -draw(tokens).abs(),
        },
    ),
    Task(
        "grpo",
        of_statistics(grpo, ("entropy",)),
        grpo_reference,
        lambda tokens, vocab, draw: {"advantage": draw(tokens), "old": draw(tokens) - 14},
    ),
    Task("clip+kl+entropy", head(*POLICY, metrics="entropy"), policy_reference(0.0), policy_extras),
    Task(
        "user",
        head(hl.CrossEntropy(), hl.Term("focal", lambda stats: focal(stats.log_prob), weight=0.5)),
        user_reference,
        plain_pytorch=True,
    ),
    Task(
        "ce+kl",
        distillation(hl.CrossEntropy(), hl.Distillation(KL_WEIGHT)),
        ce_kl_reference,
        teacher=True,
    ),
    Task(
        "ce+kl, temperature",
        distillation(
            hl.CrossEntropy(),
            hl.Distillation(KL_WEIGHT, temperature_squared=True),
            temperature=TEACHERS_TEMPERATURE,
        ),
        functools.partial(ce_kl_reference, temperature=TEACHERS_TEMPERATURE),
        teacher=True,
    ),
    Task("kl", distillation(hl.Distillation()), divergence_reference(forward_kl), teacher=True),
    Task(
        "reverse_kl",
        distillation(hl.Distillation(1.0, "reverse_kl")),
        divergence_reference(reverse_kl),
        teacher=True,
    ),
    Task("jsd", distillation(hl.Distillation(1.0, "jsd")), divergence_reference(jsd), teacher=True),
    Task(
        "ce+topk",
        topk_distillation("vocabulary"),
        topk_reference("vocabulary"),
        topk_extras,
        plain_pytorch=True,
    ),
    Task("ce+topk, renorm", topk_distillation("topk"), topk_reference("topk"), topk_extras),
    Task(
        "ce+topk, tail",
        topk_distillation("tail"),
        topk_reference("tail"),
        topk_extras,
        plain_pytorch=True,
    ),
    Task("sets", entropy_and_mass_of_sets, entropy_and_mass_of_sets_reference, set_extras),
    Task(
        "sets of 1024",
        entropy_and_mass_of_sets,
        entropy_and_mass_of_sets_reference,
        partial(set_extras, k=1024),
    ),
    Task(
        "sets of 1024, by probability",
        entropy_and_mass_of_sets,
        entropy_and_mass_of_sets_reference,
        partial(set_extras, k=1024, ascending=False),
    ),
    Task("log_probs_at", mean_log_prob_at_ids, log_probs_at_ids_reference, topk_extras),
    Task("ce+rank", head(hl.CrossEntropy(), metrics="rank"), rank_reference),
    # the clipped policy gradient, KL to a reference, an entropy bonus, and every metric there is
    Task(
        "rl",
        head(
            *POLICY,
            hl.Entropy(ENTROPY_WEIGHT),
            metrics=(
                "entropy",
                hl.PolicyMetrics((CLIP, CLIP), reference=True),
                hl.GeneratorMetrics(),
            ),
        ),
        policy_reference(ENTROPY_WEIGHT),
        partial(policy_extras, names=("old", "reference", "generator")),
        plain_pytorch=True,
    ),
]


@dataclass(frozen=True)
class Implementation:
    name: str
    build: Callable[[], Callable[[Batch], torch.Tensor]]
    ours: bool = False
    note: str = ""


def implementations(task, shard, device) -> list[Implementation]:
    options = {"ours": hl.Options(), "ours, in place": hl.Options(inplace=True)}
    if device.type == "cuda":
        options["ours, torch backend"] = hl.Options(backend="torch")
    if shard.world_size > 1:
        others = [
            t for t in ("gather", "symm_mem") if t in TRANSPORTS and t != hl.Options().transport
        ]
        options |= {f"ours, {transport}": hl.Options(transport=transport) for transport in others}
    if device.type == "cuda" and task.name in (
        *[task.name for task in TASKS[:7]],
        "clip+kl+entropy",
        "rl",
        "kl",
        "ce+kl",
        "ce+kl, temperature",
        "reverse_kl",
        *[task.name for task in TASKS if task.extras is topk_extras and "topk" in task.name],
    ):
        options["ours, two launches"] = hl.Options(gradient="backward")
        options["ours, one read"] = hl.Options(gradient="forward")
        options["ours, one read in place"] = hl.Options(gradient="forward", inplace=True)
    out = [Implementation(name, lambda o=o: task.ours(o), ours=True) for name, o in options.items()]
    if task.plain_pytorch:
        out.append(
            Implementation(
                "ours, compiled terms", lambda: task.ours(hl.Options(), compile=True), ours=True
            )
        )
    if shard.world_size == 1:
        out.append(
            Implementation("torch, x.float()", lambda: in_torch(task, lambda function: function))
        )
        out.append(Implementation("torch.compile", lambda: in_torch(task, torch.compile)))
    return out + [
        Implementation(p.name, lambda p=p: p.build(task.name, shard), note=p.note)
        for p in PEERS
        if task.name in p.tasks and (p.sharded or shard.world_size == 1)
    ]


def in_torch(task, wrap):
    """The task's definition in float32, as a user of plain torch writes it; its metrics are
    computed, too."""
    function = wrap(
        lambda logits, labels, **extras: task.reference(logits.float(), labels, **extras)
    )
    return lambda batch: function(batch.logits, batch.labels, **batch.extras)[0]


class Problem:
    """The inputs of one shape, shared by all tasks and implementations, with a few rows that every
    rank knows whole."""

    def __init__(
        self, tokens: int, vocab: int, dtype: torch.dtype, machine: Machine, padding: int = 0
    ):
        self.shard = shard = hl.VocabShard.from_group(machine.group, vocab, vocab + padding)
        self.columns, self.tokens, self.device, self.dtype = (
            shard.width,
            tokens,
            machine.device,
            dtype,
        )
        self.rows = torch.linspace(
            0, tokens - 1, min(CHECKED_ROWS, tokens), device=self.device
        ).long()
        self.whole, self.logits = self.wide(1)
        # some implementations write their gradient over the logits
        self.values = self.logits.clone()
        self.logits.requires_grad_()
        self.labels = (self.generator(2)(tokens).abs() * 1e6).long() % vocab
        self.few = torch.full_like(self.labels, IGNORED)
        self.few[self.rows] = self.labels[self.rows]
        self.few[self.rows[len(self.rows) // 2]] = IGNORED

    def generator(self, seed: int):
        """randn that draws the same numbers on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return lambda *shape: torch.randn(shape, device=self.device, generator=generator)

    def wide(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits: of the checked rows whole, and of all tokens on this rank."""
        whole = self.generator(seed)(len(self.rows), self.shard.vocab_size).mul_(2).to(self.dtype)
        local = torch.randn(self.tokens, self.columns, device=self.device, dtype=self.dtype).mul_(2)
        local[self.rows] = self.mine(whole)
        return whole, local

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a tensor over the whole vocabulary."""
        part = whole[:, self.shard.start : self.shard.start + self.columns]
        return F.pad(part, (0, self.columns - part.shape[1]))

    def extras(self, task: Task) -> tuple[dict, dict]:
        """The task's further inputs for all tokens on this rank, and for the checked rows whole."""
        local = task.extras(self.tokens, self.shard.vocab_size, self.generator(3))
        whole = {name: value[self.rows] for name, value in local.items()}
        if task.teacher:
            whole["teacher"], local["teacher"] = self.wide(4)
        return local, whole

    def batch(self, labels, extras) -> Batch:
        mask = labels != IGNORED
        return Batch(self.logits, labels, mask.float(), int(mask.sum()), self.shard, extras)

    def refill(self):
        with torch.no_grad():
            self.logits.copy_(self.values)


class Truth:
    """float64 loss and gradient of the checked rows."""

    def __init__(self, task: Task, problem: Problem, whole_extras: dict, machine: Machine):
        self.problem, self.machine = problem, machine
        z = problem.whole.double().requires_grad_()
        extras = {
            name: x.double() if x.is_floating_point() else x for name, x in whole_extras.items()
        }
        loss = task.reference(z, problem.few[problem.rows], **extras)[0]
        self.loss, self.gradient = loss.item(), problem.mine(torch.autograd.grad(loss, z)[0])
        rounded = self.gradient.to(problem.dtype).double()
        (self.rounding,) = machine.slowest([self.relative(rounded - self.gradient)]).tolist()

    def relative(self, difference, elsewhere=0.0) -> float:
        return math.hypot(difference.norm().item(), elsewhere) / max(
            self.gradient.norm().item(), 1e-300
        )

    def errors(self, function, extras) -> list[float]:
        """Relative errors of loss and gradient, the largest of any rank; a gradient at an ignored
        row is an error."""
        batch = self.problem.batch(self.problem.few, extras)
        loss = function(batch)
        gradient = torch.autograd.grad(loss, batch.logits)[0]
        with torch.no_grad():  # the gradient may be the leaf itself, overwritten
            rows = gradient[self.problem.rows].double()
            gradient.index_fill_(0, self.problem.rows, 0.0)
            elsewhere = torch.linalg.vector_norm(gradient, dtype=torch.float32).item()
        errors = abs(loss.item() / self.loss - 1), self.relative(rows - self.gradient, elsewhere)
        self.problem.refill()
        return self.machine.slowest(
            [math.inf if math.isnan(error) else error for error in errors]
        ).tolist()

    def accepts(self, errors, ours: bool) -> bool:
        if not ours:
            return errors[0] <= PEER_TOLERANCE["loss"] and errors[1] <= PEER_TOLERANCE["gradient"]
        return (
            errors[0] <= OUR_TOLERANCE["loss"]
            and errors[1] <= 1.1 * self.rounding + OUR_TOLERANCE["gradient"]
        )


def against_floor(row, nbytes, elements, bandwidth):
    floor = 1e6 * nbytes / bandwidth
    row["floor_us"] = round(floor, 1)
    for mode in ("graph", "eager"):
        if row.get(f"{mode}_us"):
            row[f"{mode}_over_floor"] = round(row[f"{mode}_us"]["both"][1] / floor, 3)
    best = row.get("graph_over_floor") or row["eager_over_floor"]
    row["copy_share"] = round(1 / best, 3)
    row["bytes_per_logit"] = round(best * nbytes / elements, 2)


def run_task(task, problem, report, args, bandwidth, absent):
    machine = report.machine
    extras, whole = problem.extras(task)
    truth = Truth(task, problem, whole, machine)
    batch = problem.batch(problem.labels, extras)
    logits = problem.logits
    nbytes = (5 if task.teacher else 3) * logits.nbytes
    for implementation in implementations(task, problem.shard, machine.device):
        name = implementation.name
        if name in absent or not is_wanted(name, args.implementations):
            continue
        if name == "ours, torch backend" and logits.numel() > SMALL_ENOUGH_FOR_EAGER:
            continue
        row = {
            "task": task.name,
            "implementation": name,
            "tokens": problem.tokens,
            "vocab": problem.shard.vocab_size,
        }
        row |= {
            "tp": problem.shard.world_size,
            "columns": problem.columns,
            "status": "ok",
            "note": implementation.note,
        }
        with report.row(f"{heading(row)}, {name}", row):
            with report.set_up(row):
                try:
                    function = implementation.build()
                except Exception as error:
                    absent.add(name)
                    row["status"] = f"absent: {reason(error)}"
                    continue
                errors = truth.errors(function, extras)
            row["loss_error"], row["gradient_error"] = (
                float(f"{e:.3g}") if math.isfinite(e) else None for e in errors
            )
            if not truth.accepts(errors, implementation.ours):
                row["status"] = "wrong"
            row |= measure(function, batch, problem, machine, args.do_bench)
            against_floor(row, nbytes, logits.numel(), bandwidth)
        function = None
        machine.release()
        problem.refill()


def heading(row):
    return f"{row['task']}, {row['tokens']} x {row['vocab']}, TP {row['tp']}"


def print_table(rows):
    for name, group in itertools.groupby(rows, heading):
        rows = list(group)
        floor = next((row["floor_us"] for row in rows if "floor_us" in row), None)
        print(f"\n{name}" + ("" if floor is None else f", floor {floor:.0f} us"))
        print(
            f"{'':29}{'fwd':>6}{'bwd':>7}{'both':>7}{'/floor':>7}{'eager':>7}{'host':>7}{'MiB':>7}"
        )
        for row in rows:
            print(f"{row['implementation']:28} {cells(row)}")


def cells(row):
    """Medians: the graph's three and their ratio to the floor, then those of eager steps. Or why
    there are none."""
    if "eager_us" not in row:
        return row["status"]
    graph = row["graph_us"] or {key: [None] * 3 for key in ("forward", "backward", "both")}
    numbers = [graph[key][1] for key in ("forward", "backward", "both")]
    numbers += [
        row.get("graph_over_floor"),
        row["eager_us"]["both"][1],
        row["host_us"],
        row["extra_memory_mib"],
    ]
    widths, digits = (6, 7, 7, 7, 7, 7, 7), (0, 0, 0, 2, 0, 0, 0)
    texts = ["-" if n is None else f"{n:.{d}f}" for n, d in zip(numbers, digits)]
    status = "" if row["status"] == "ok" else f" {row['status']}"
    return "".join(text.rjust(width) for text, width in zip(texts, widths)) + status


def main(argv=None):
    parser = parser_of(__doc__, tokens=[8192], vocab=32064, seconds=0.1)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=[task.name for task in TASKS],
        default=None,
        help="default: all",
    )
    parser.add_argument("--repeats", type=int, default=50, help="at most this many; at least 5")
    parser.add_argument("--padding", type=int, default=0, help="columns after the vocabulary")
    parser.add_argument(
        "--one-thread",
        action="store_true",
        help="run backward in the caller's thread, not in autograd's own",
    )
    parser.add_argument(
        "--do-bench", action="store_true", help="time graphs by Triton's own benchmark, too"
    )
    args = parser.parse_args(argv)
    torch.autograd.set_multithreading_enabled(not args.one_thread)
    packages = {peer.package for peer in PEERS}
    with reported(args, __file__, argv, cells, print_table, packages, args.repeats) as report:
        bandwidth = -report.machine.slowest([-report.machine.copy_bandwidth()]).item()
        report.facts["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
        report.facts["tolerances"] = {"ours": OUR_TOLERANCE, "peers": PEER_TOLERANCE}
        run_shapes(args, report, bandwidth)


def run_shapes(args, report, bandwidth):
    machine, absent = report.machine, set()
    for vocab, tokens in itertools.product(args.vocab, args.tokens):
        begin = time.perf_counter()
        problem = Problem(tokens, vocab, getattr(torch, args.dtype), machine, args.padding)
        for task in TASKS:
            if args.tasks is not None and task.name not in args.tasks:
                continue
            # Each is compiled for itself: no dynamic shapes, and no limit on the number of
            # recompilations.
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()
            run_task(task, problem, report, args, bandwidth, absent)
        del problem
        machine.release()
        report.print(f"{tokens} x {vocab}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
