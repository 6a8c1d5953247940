"""What a generated case (`strategies.Case`) is as tensors, how a rank runs it, and what must come out."""

import bounds
import oracle
import policy_oracle
import torch
import torch.nn.functional as F
from odd_inputs import lay_out
from strategies import FIXED, Case
from topk_oracle import BETA, definition

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    HeadLoss,
    KLToReference,
    Options,
    PolicyGradient,
    Teacher,
    TopKDistillation,
    TopKTeacher,
    Transform,
    VocabShard,
    ZLoss,
    vocab_statistics,
)

OFTEN = {"reinforce": {}, "clip": {}, "dual clip": {"dual_clip": 3.0}, "cispo": {}, "sapo": {}}
CLAMP, KINKS = 20.0, [torch.tensor(c).log().item() for c in (0.8, 1.2, 3.0)] + [-20.0, 20.0]


def edit(x, labels, case):
    """Special values into the logits."""
    for what, i, number in case.edits:
        if i >= len(x):
            continue
        label, column = labels[i], number % case.vocab_size
        if what == "-inf":
            x[i, column::3] = -torch.inf
        elif what == "-inf shard":
            r = number % (len(case.cuts) - 1)
            x[i, case.cuts[r] : case.cuts[r + 1]] = -torch.inf
        elif what == "-inf row":
            x[i] = -torch.inf
        elif what == "-inf others":
            x[i] = torch.where(torch.arange(case.vocab_size) == label, x[i], -torch.inf)
        elif what == "-inf target":
            x[i, label] = -torch.inf
        elif what in ("nan", "+inf"):
            x[i, column] = float(what)
        elif what == "x1e4":
            x[i] = (x[i] * 1e4).clamp(-6e4, 6e4)
        elif what == "confident":
            x[i, label] += 20.0 + number
        elif what == "shift":
            x[i] = (x[i] * 8).round() / 8 + 10.0 * (number - 30)
        elif what == "far":  # more than the transport "sum" promises to carry, less than float64's exponential can
            x[i] = (x[i] * 8).round() / 8 + (620.0 + number) * (1 - 2 * (number % 2))
        elif what == "tie":
            x[i] = x[i].round()


def build(case: Case) -> dict:
    """All tensors of a case on the CPU, of the whole vocabulary."""
    generator = torch.Generator().manual_seed(case.seed)
    n, v, dtype = case.rows + case.rows % 2 * (case.lead != "flat"), case.vocab_size, getattr(torch, case.dtype)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    spread = 4.0 ** (case.seed % 4 - 1)
    x, t = randn(n, v) * spread, randn(n, v) * 2
    of_tokens = {name: randn(n) for name in ("advantages",)}
    of_tokens |= {name: -5 * rand(n) for name in ("old_log_prob", "reference_log_prob")}
    labels = torch.randint(0, v, (n,), generator=generator)
    edit(x, labels, case)
    t = torch.where(x == -torch.inf, x, t)
    if case.layout == "expanded":
        x, t = (z[:1].expand(n, v).clone() for z in (x, t))
    for i, label in case.label_edits:
        if i < n:
            labels[i] = label
    per_token = {"rest": rand(n) + 0.5, "teacher": rand(n) + 0.7, "student": rand(n) + 0.7}
    ids = torch.randint(0, v, (n, case.entries), generator=generator)  # with duplicates
    mask = rand(n, case.entries) < 0.8
    x = x.to(dtype)
    mask &= case.scale * x.gather(1, ids) > -torch.inf  # a negative scale turns +inf into it
    log_probs = t.nan_to_num(posinf=0.0).log_softmax(-1).gather(1, ids) - 3.0  # of duplicates, too, less than 1
    # the mass of entries without renormalisation is at most e^-3 times their number of copies
    log_probs = log_probs - torch.tensor(float(case.entries)).log()

    def temperature(value, name):
        return per_token[name] if value == "tokens" else value

    upstream = {name: randn(n, 2)[:, 1] for name in case.upstream}
    ignored = labels == case.ignore_index if case.labels else torch.zeros(n, dtype=torch.bool)
    for name, g in upstream.items():
        if case.upstream_kind == "zero":
            upstream[name] = g * 0
        elif case.upstream_kind == "expanded":
            upstream[name] = torch.tensor(0.37).expand(n)
        elif case.upstream_kind == "nan where ignored":
            upstream[name] = torch.where(ignored, torch.nan, g)
    drawn = {
        "x": x,
        "t": t.to(dtype),
        "labels": labels.to(getattr(torch, case.labels)) if case.labels else None,
        "ignored": ignored,
        "bias": randn(v) if case.bias else None,
        "temperature": temperature(case.temperature, "rest"),
        "of_teacher": temperature(case.teacher_temperature, "teacher"),
        "of_student": temperature(case.student_temperature, "student"),
        "ids": torch.where(rand(n, case.entries) < 0.1, -1, ids),
        "log_probs": log_probs.to(torch.promote_types(dtype, torch.float32)),
        "mask": mask,
        "weight": rand(v) + 0.1,
        "upstream": upstream,
        "token_weight": torch.where(rand(n) < 0.2, 0.0, rand(n)) if case.token_weight else None,
        **of_tokens,
    }
    if case.head and case.token_weight:  # a weight of 0 ignores its token
        drawn["ignored"] = ignored | (drawn["token_weight"] == 0)
    return drawn


def make_shard(case, group, rank):
    v, padded = case.vocab_size, case.cuts[-1]
    if case.shards in ("even", "padded"):
        return VocabShard.from_group(group, v, padded)
    if case.shards == "boundaries":
        return VocabShard.from_boundaries(list(case.cuts), v, group)
    return VocabShard(*piece(case, rank), v, group)


def piece(case, rank):
    """[start, stop) of a rank."""
    r = case.order[rank]
    return case.cuts[r], case.cuts[r + 1]


def shaped(x, case):
    """[N, ..] -> the leading shape; "sequence": the second dimension comes first in memory."""
    if case.lead == "flat":
        return x
    x = x.view(2, len(x) // 2, *x.shape[1:])
    return x.transpose(0, 1).contiguous().transpose(0, 1) if case.lead == "sequence" else x


def make_terms(case, p, device):
    terms = []
    for name, weight, option in case.terms:
        if name == "cross_entropy":
            smoothing, formula, weighted = option
            terms.append(CrossEntropy(weight, smoothing, formula, p["weight"].to(device) if weighted else None))
        elif name == "policy":
            objective = "clip" if option == "dual clip" else option
            terms.append(PolicyGradient(objective, weight, name="policy", **OFTEN[option]))
        elif name == "kl":
            terms.append(KLToReference(weight, option, output_clamp=None))
        elif name == "distillation":
            terms.append(Distillation(weight, option[0], temperature_squared=option[1], name="distillation"))
        elif name == "topk":
            terms.append(TopKDistillation(weight, *option[:2], temperature_squared=option[2], name="topk"))
        else:
            terms.append({"z_loss": ZLoss, "entropy": Entropy}[name](weight))
    return terms


def run_case(group, device, case):
    """One rank: statistics or head, backward, inputs unmodified. -> values [N] by name, gradients, flat."""
    p = build(case)
    rank = 0 if group is None else torch.distributed.get_rank(group)
    shard = make_shard(case, group, rank)
    start, stop = piece(case, rank)
    assert (shard.start, shard.stop) == (start, stop)
    n, pad = len(p["x"]), (0, case.cuts[-1] - case.vocab_size)

    def local(x, rubbish=torch.nan):
        x = F.pad(x, pad, value=rubbish)[..., start:stop]
        return x.to(device)

    def moved(x):
        return shaped(x.to(device), case) if isinstance(x, torch.Tensor) else x

    logits = lay_out(local(p["x"]), case.layout)
    lead = shaped(p["ignored"], case).shape
    logits = shaped(logits, case) if case.lead == "sequence" else logits.view(*lead, stop - start)
    teacher = None
    if case.teacher == "whole":
        teacher = Teacher(shaped(local(p["t"]), case), moved(p["of_teacher"]), moved(p["of_student"]), BETA)
    elif case.teacher == "topk":
        teacher = TopKTeacher(
            moved(p["ids"]), moved(p["log_probs"]), moved(p["mask"]), None,
            moved(p["of_teacher"]), moved(p["of_student"]), case.renormalize, BETA,
        )  # fmt: skip
    bias = None if p["bias"] is None else local(p["bias"], 0.0).requires_grad_()
    transform = Transform(bias, case.scale, case.softcap, moved(p["temperature"]))
    labels, options = moved(p["labels"]), Options(backend=case.backend, transport=case.transport)
    weight = local(p["weight"]) if case.weighted_total else None
    inputs = {name: moved(p[name]) for name in ("advantages", "old_log_prob", "reference_log_prob")}
    token_weight = moved(p["token_weight"])
    tensors = [x for x in (logits, bias, labels, weight, token_weight, *inputs.values()) if x is not None]
    if teacher is not None:
        tensors += [x for x in vars(teacher).values() if isinstance(x, torch.Tensor)]
    before = [(x, x.detach().clone(), x._version) for x in tensors]
    logits.requires_grad_()
    out = {}
    if case.head:
        head = HeadLoss(
            make_terms(case, p, device), reduction=case.reduction, ignore_index=case.ignore_index, options=options
        )
        needed = {name for term in head.terms for name in term.inputs}
        given = {name: inputs[name] for name in needed & set(inputs)}
        given |= {"teacher": teacher} if "teacher" in needed else {}
        result = head(
            logits, labels, shard=shard, token_weight=token_weight, denominator=case.denominator, transform=transform,
            inputs=given,
        )  # fmt: skip
        stats, loss = result.stats, result.loss
        out = {"loss": loss, "count": result.count, **{f"term {k}": value for k, value in result.terms.items()}}
        losses, grads = [loss], [torch.linspace(-1, 2, n, device=device).view(loss.shape) if loss.dim() else None]
    else:
        stats = vocab_statistics(
            logits, labels, shard=shard, want=case.want, transform=transform, teacher=teacher, total_weight=weight,
            ignore_index=case.ignore_index, options=options,
        )  # fmt: skip
        losses = [getattr(stats, name) for name in case.upstream]
        grads = [moved(p["upstream"][name]) for name in case.upstream]
    leaves = [logits] + ([] if bias is None else [bias])
    gradients = torch.autograd.grad(losses, leaves, grads)
    for x, kept, version in before:
        assert bits_equal(x.detach(), kept) and x._version == version, "an input was written"
    names = [name for name in stats._fields if isinstance(getattr(stats, name), torch.Tensor) and name != "labels"]
    out |= {name: getattr(stats, name) for name in names}
    flat = {name: x.detach().reshape(-1).cpu() for name, x in out.items()}
    flat["grad"] = gradients[0].reshape(n, stop - start).cpu()
    if bias is not None:
        flat["bias grad"] = gradients[1].cpu()
    return flat


def bits_equal(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    same = a == b
    return bool((same | (a.isnan() & b.isnan()) if a.is_floating_point() else same).all())


def not_a_number(case, p, z):
    """Rows [N] that are NaN by promise: no softmax, a label that nobody owns, or beyond what sums can carry."""
    out = z.isnan().any(-1) | (z == torch.inf).any(-1) | (z == -torch.inf).all(-1)
    labels = p["labels"]
    if labels is not None:
        labels = labels.long()
        out |= (labels < 0) | (labels >= case.vocab_size)
    if case.transport == "sum":
        apart = z if labels is None else z.clone()
        if labels is not None:
            apart[bounds.at_label(z, labels.clamp(0, case.vocab_size - 1))] = -torch.inf
        for a, b in zip(case.cuts, case.cuts[1:]):
            part = apart[:, a:b].amax(-1) if a < min(b, case.vocab_size) else torch.zeros(len(z))
            out |= (part.abs() > 600) & part.isfinite()
    return out & ~p["ignored"]


def close(name, got, expected, error):
    """Equal where infinite or NaN, else within the error and one rounding to got's type."""
    same = (got.double() == expected) | (got.isnan() & expected.isnan())
    allowed = error + oracle.ulp(expected.nan_to_num(), torch.float64 if got.dtype == torch.float64 else torch.float32)
    apart = (got.double() - expected).abs()
    good = same | (apart <= allowed)
    assert good.all(), f"{name}: {apart[~good][:3].tolist()} apart, allowed {allowed[~good][:3].tolist()}"


def fitted(x, keep):
    return x[keep] if isinstance(x, torch.Tensor) else x


def student_side(x, bias, case, temperature):
    return oracle.transform(x, bias, case.scale, case.softcap, temperature)


class Truth:
    """Of the rows `keep` alone, whose values are defined: statistics, and errors."""

    def __init__(self, case, p, keep, gpu):
        self.case, self.p, self.keep = case, p, keep
        dtype = getattr(torch, case.dtype)
        self.labels = None if p["labels"] is None else p["labels"].long()[keep]
        self.x = p["x"].double()[keep]
        temperature = fitted(p["temperature"], keep)
        self.z, self.slope = student_side(self.x, p["bias"], case, temperature)
        self.r = bounds.rounding(dtype, case.backend, gpu, self.x, p["bias"], case.scale, case.softcap, temperature)
        weighted = case.weighted_total and not case.head
        weighted |= any(n == "cross_entropy" and o[2] and o[0] for n, _, o in case.terms)
        self.weight = p["weight"].double() if weighted else None
        self.values = oracle.statistics(self.z, self.labels, self.weight)
        live = self.z > -torch.inf
        self.values["mass"] = torch.where(live, 1.0 if self.weight is None else self.weight, 0.0).sum(-1).double()
        self.errors = bounds.values(self.z, self.labels, self.weight, self.values, self.r)
        self.jacobian = {}  # of a teacher's statistics: name -> (d/dz' [N, V], error)
        if case.teacher:
            self._of_teacher()

    def _of_teacher(self):
        case, p, keep = self.case, self.p, self.keep
        of_teacher = fitted(p["of_teacher"], keep)
        of_student = of_teacher if p["of_student"] is None else fitted(p["of_student"], keep)
        z, self.student_slope = student_side(self.x, p["bias"], case, of_student)
        self.side, z = z, z.requires_grad_()
        # a temperature of its own is three more roundings: z times the ratio of both
        r = self.r._replace(transform=self.r.transform + 4)
        if case.teacher == "whole":
            u = oracle.transform(p["t"][keep], temperature=of_teacher)[0]
            values = oracle.divergences(z, u, BETA)
            masses = [z.detach().softmax(-1), u.softmax(-1)]
        else:
            self.tau = self._tau(of_teacher)
            values, s, rest = oracle.of_entries(z, self.tau, BETA)
            u = self.tau.log()
            masses = [z.detach().softmax(-1), self.tau, s.detach(), rest.detach()]
        side = z.detach()
        of_value, of_gradient = bounds.divergence(side, u, masses, r)
        for name, value in values.items():
            self.values[name], self.errors[name] = value.detach(), of_value
            if value.requires_grad:
                self.jacobian[name] = torch.autograd.grad(value.sum(), z, retain_graph=True)[0], of_gradient
        if case.teacher == "whole":  # columns where rounding may choose the sign of p - q
            close_call = torch.where((masses[0] - masses[1]).abs() <= of_gradient, masses[0], 0.0)
            apart = close_call + masses[0] * close_call.sum(-1, keepdim=True)
            self.jacobian["total_variation"] = self.jacobian["total_variation"][0], of_gradient + apart
        self.of_gradient = of_gradient

    def _tau(self, of_teacher):
        p, keep = self.p, self.keep
        live = p["mask"][keep] & (p["ids"][keep] >= 0)
        dense = torch.zeros_like(self.x)
        dense.scatter_add_(1, p["ids"][keep].clamp(min=0), torch.where(live, p["log_probs"][keep].double().exp(), 0.0))
        inside = dense > 0
        t = of_teacher.double()[:, None] if isinstance(of_teacher, torch.Tensor) else of_teacher
        dense = torch.where(inside, dense ** (1 / t), 0.0)
        return dense / dense.sum(-1, keepdim=True).clamp(min=1e-300) if self.case.renormalize else dense

    def gradient(self, grads, errors):
        """Upstream gradients {name: [N]} and their errors -> d/dx [N, V] and its error, before the last rounding."""
        own = {name: g for name, g in grads.items() if name in oracle.NAMES}
        one = torch.ones_like(self.z)
        dz = oracle.gradient(self.z, one, self.labels, own, self.weight)
        error = bounds.gradient(self.z, self.labels, self.weight, own, errors, self.r)
        slope = self.slope if isinstance(self.slope, torch.Tensor) else one * self.slope
        dx, error = dz * slope, error * slope.abs() + 4 * bounds.FLUSHED * dz.abs()
        for name in grads.keys() - own.keys():
            of_z, of_error = self.jacobian[name]
            side = self.student_slope if isinstance(self.student_slope, torch.Tensor) else one * self.student_slope
            g = grads[name][:, None]
            of_g = errors[name][:, None] if name in errors else 0 * g
            dx = dx + g * of_z * side
            flushed = 4 * bounds.FLUSHED * (g * of_z).abs()
            error = error + (g.abs() * of_error + of_g * of_z.abs()) * side.abs() + flushed
        rounded = (self.r.slope + 4) * self.r.unit
        return dx, error + dx.abs() * rounded


def ratio_terms(name, option, lp, given):
    """Of a policy-gradient or KL term: value, and the size of its slope's parts."""
    if name == "policy":
        a, old, mask = given["advantages"], given["old_log_prob"], None
        held = old + (lp - old).clamp(-CLAMP, CLAMP)  # zero gradient beyond
        if option == "reinforce":
            return policy_oracle.reinforce(lp, a, old, mask), 0 * a
        if option == "cispo":
            ratio = (held - old).exp().clamp(0.8, 1.2).detach()
            return -ratio * a * lp, a.abs()
        function = {"clip": policy_oracle.ppo, "sapo": policy_oracle.sapo}.get(option)
        value = function(held, a, old, mask) if function else policy_oracle.dual_clip(held, a, old, mask, 0.2, 0.2, 3.0)
        # sapo: a sigmoid of up to tau e^x, whose derivative is bounded by 1
        return value, 4 * a.abs() * (1 + (held - old).exp())
    x = (lp - given["reference_log_prob"]).clamp(-CLAMP, CLAMP)
    value = {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x}[option]
    return value, 1 + x.abs() + (-x).exp()


def term_parts(case, p, truth, stats, term):
    """Per-token value, differentiable in `stats`; sizes of its parts and of its slope's; rows at a kink of its."""
    name, _, option = term
    given = {key: p[key].double()[truth.keep] for key in ("advantages", "old_log_prob", "reference_log_prob")}
    none = torch.zeros(len(truth.z), dtype=torch.float64)
    far = torch.zeros(len(truth.z), dtype=torch.bool)
    lse, lp = stats["lse"], stats["log_prob"]
    if name == "cross_entropy":
        smoothing, formula, weighted = option
        alpha = smoothing if formula == "torch" else smoothing * case.vocab_size / max(case.vocab_size - 1, 1)
        nll = -lp * (p["weight"].double()[truth.labels] if weighted else 1.0)
        if not smoothing:
            return nll, nll.abs(), none, far
        mass, total = stats["mass"], stats["total"]
        value = (1 - alpha) * nll + alpha * (mass * lse - total) / case.vocab_size
        return value, (nll.abs() + (mass * lse).abs() + total.abs()), none, far
    if name in ("z_loss", "entropy"):
        value = lse**2 if name == "z_loss" else -stats["entropy"]
        return value, value.abs(), none, far
    if name in ("policy", "kl"):
        other = given["old_log_prob" if name == "policy" else "reference_log_prob"]
        value, slope = ratio_terms(name, option, lp, given)
        x, error = (lp - other).detach(), truth.errors["log_prob"]
        near = torch.stack([(x - kink).abs() for kink in KINKS]).amin(0) <= 4 * error + 1e-5
        parts = value.abs() + slope * (1 + lp.abs().nan_to_num(posinf=0.0) + other.abs())
        return value, parts, slope, near
    of_student = p["of_student"] if p["of_student"] is not None else p["of_teacher"]
    squared = fitted(of_student, truth.keep) ** 2 if option[-1] else 1.0
    if name == "distillation":
        value = stats["forward_kl" if option[0] == "cross_entropy" else option[0]]
        value = value + stats["teacher_entropy"] if option[0] == "cross_entropy" else value
    else:
        value, rest = stats["composite"], (truth.tau == 0) & (truth.z > -torch.inf)
        far = ~rest.any(-1)  # the definition's tail of nothing has no slope
    return value * squared, value.abs() * squared, none, far


def add_composite(case, p, truth):
    """The top-K divergence of a head from its definition over the whole vocabulary, as one more statistic."""
    divergence, over, _ = next(option for name, _, option in case.terms if name == "topk")
    keep, side = truth.keep, truth.side
    value = definition(
        side, p["ids"][keep], p["log_probs"][keep], p["mask"][keep], divergence, over,
        of_teacher=fitted(p["of_teacher"], keep), of_student=1.0, renormalize=case.renormalize,
    )  # fmt: skip
    # up to four statistics; a log-prob of -100 for what the teacher does not know weighs the error of its probability
    factor = 4.0 + 100.0 * ((divergence, over) == ("reverse_kl", "vocabulary"))
    truth.values["composite"] = value.detach()
    truth.errors["composite"] = factor * truth.errors["teacher_mass"]
    gradient = torch.autograd.grad(value.sum(), side)[0]
    truth.jacobian["composite"] = gradient, factor * truth.of_gradient


def check_head(case, p, truth, nan, first):
    """Loss, sums and count; -> upstream gradients of the statistics, their errors, and rows not to be compared."""
    keep, unit = truth.keep, truth.r.unit
    if any(name == "topk" for name, *_ in case.terms):
        add_composite(case, p, truth)
    fixed = (*FIXED, "target_logit")
    leaves = {n: v.double().clone().requires_grad_(n not in fixed) for n, v in truth.values.items() if n != "argmax"}
    valid = ~p["ignored"]
    weight = torch.ones(len(valid), dtype=torch.float64) if p["token_weight"] is None else p["token_weight"].double()
    count = (weight * valid).sum()
    close("count", first["count"][0], count, (len(valid) + 4) * 2.0**-24 * count)  # in fp32, whatever the logits
    rows = weight[keep]
    upstream = torch.linspace(-1, 2, len(valid)).double()[keep] if case.reduction == "none" else torch.ones_like(rows)
    loss, of_loss = torch.zeros_like(rows), torch.zeros_like(rows)
    grads, errors = {}, {}
    skip = torch.zeros(len(rows), dtype=torch.bool)
    for term in case.terms:
        value, size, slope, near = term_parts(case, p, truth, leaves, term)
        skip |= near
        divisor = 1.0
        if case.reduction == "mean":
            divisor = count if p["token_weight"] is not None else count.clamp(min=1)
            if term[0] == "cross_entropy" and term[2][2]:
                labels = p["labels"].long()
                known = valid & (labels >= 0) & (labels < case.vocab_size)
                own = torch.where(known, p["weight"].double()[torch.where(known, labels, 0)], 0.0)
                divisor = (own * weight).sum()
            divisor = divisor if case.denominator is None else case.denominator
        c = rows * term[1] / (divisor or torch.inf)
        needed = [n for n, leaf in leaves.items() if leaf.requires_grad]
        found = torch.autograd.grad(value.sum(), [leaves[n] for n in needed], create_graph=True, allow_unused=True)
        # a divisor that is a sum of weights is a sum in fp32, whatever the logits
        of_divisor = (len(valid) + 4) * 2.0**-24 if isinstance(divisor, torch.Tensor) else 0.0
        error = 16 * unit * (size.detach() + slope)
        for n, g in zip(needed, found):
            if g is None:
                continue
            error = error + (g.detach().abs() * truth.errors[n]).nan_to_num(posinf=0.0)
            of_g = 16 * unit * (g.detach().abs() + slope) + of_divisor * g.detach().abs()
            if g.requires_grad:
                second = torch.autograd.grad(g.sum(), [leaves[m] for m in needed], retain_graph=True, allow_unused=True)
                for m, h in zip(needed, second):
                    if h is not None:
                        of_g = of_g + (h.abs() * truth.errors[m]).nan_to_num(posinf=0.0)
            grads[n] = grads.get(n, 0.0) + g.detach() * c * upstream
            errors[n] = errors.get(n, 0.0) + of_g * c.abs() * upstream.abs()
        value, error = value.detach(), error.nan_to_num(posinf=0.0)
        size = value.abs().nan_to_num(posinf=0.0)
        loss, of_loss = loss + c * value, of_loss + c.abs() * (error + (16 * unit + of_divisor) * size)
        total = (rows * value).sum() + (torch.nan if nan.any() else 0.0)
        of_total = (rows * (error + (len(rows) + 4) * unit * size)).sum()
        close(f"term {term[0]}", first[f"term {term[0]}"][0], total, of_total)
    if case.reduction == "none":
        assert first["loss"][nan].isnan().all() and not first["loss"][p["ignored"]].any()
        close("loss", first["loss"][keep], loss, of_loss)
    else:
        whole = loss.sum() + (torch.nan if nan.any() else 0.0)
        sums = (len(rows) + 8) * unit * loss.abs().nan_to_num(posinf=0.0).sum()
        close("loss", first["loss"][0], whole, of_loss.sum() + sums)
    return grads, errors, skip


def check(case: Case, results: list) -> None:
    """All ranks' results of a case against the oracle."""
    gpu = torch.cuda.is_available()
    p = build(case)
    first = results[0]
    for r, result in enumerate(results):
        for name in first.keys() - {"grad", "bias grad"}:
            assert bits_equal(result[name], first[name]), f"{name} of rank {r} differs from rank 0's"
    grad = joined(case, [result["grad"] for result in results])
    z, _ = student_side(p["x"], p["bias"], case, p["temperature"])
    z = z if case.dtype == "float64" else torch.where(z.abs() > 3.4e38, z * torch.inf, z)
    nan, ignored = not_a_number(case, p, z), p["ignored"]
    keep = ~nan & ~ignored
    truth = Truth(case, p, keep, gpu)
    names = [name for name in first if name in truth.values]
    for name in set(names) - {"argmax"}:
        got = first[name]
        assert got[nan].isnan().all(), f"{name} of rows {nan.nonzero()[:, 0].tolist()} must be NaN"
        assert not got[ignored].any(), f"{name} of ignored rows must be 0"
        close(name, got[keep], truth.values[name], truth.errors[name])
    if "log_prob" in first:
        assert (first["log_prob"][keep] <= 0).all()
        assert torch.equal(first["valid"], ~ignored)
    if "argmax" in first:
        got = first["argmax"]
        assert (got[nan | ignored] == -1).all()
        best = truth.z.gather(1, got[keep][:, None])[:, 0]
        top = truth.z.amax(-1)
        assert (top - best <= 2 * truth.r.transform * truth.r.unit * top.abs()).all()
        if truth.r.transform == 0:
            assert torch.equal(got[keep], truth.values["argmax"])
        if "hits" in first:
            assert torch.equal(first["hits"], keep & (got == p["labels"].long()))
    if case.head:
        grads, errors, skip = check_head(case, p, truth, nan, first)
    else:
        grads = {name: g.double()[keep] for name, g in p["upstream"].items()}
        errors, skip = {}, torch.zeros(int(keep.sum()), dtype=torch.bool)
    for name in grads.keys() & truth.jacobian.keys():
        skip = skip | truth.values[name].isinf()  # what is infinite has no gradient
    dx, error = truth.gradient(grads, errors)
    check_gradient(case, grad, dx, error, nan, ignored, keep, skip, truth)
    if case.bias:
        check_bias(case, grad, joined(case, [r["bias grad"][None] for r in results])[0])


def joined(case, parts):
    """Ranks' columns -> [.., V] in the order of the vocabulary; what lies beyond is padding and must be 0."""
    ordered = sorted(range(len(parts)), key=lambda r: case.order[r])
    whole = torch.cat([parts[r] for r in ordered], -1)
    assert not whole[..., case.vocab_size :].any(), "the gradient of padding must be 0"
    return whole[..., : case.vocab_size]


def check_gradient(case, grad, dx, error, nan, ignored, keep, skip, truth):
    assert grad[nan].isnan().all(), f"the gradient of rows {nan.nonzero()[:, 0].tolist()} must be NaN"
    assert not grad[ignored].any(), "the gradient of ignored rows must be 0"
    got, dtype = grad[keep][~skip], grad.dtype
    dx, error, z = dx[~skip], error[~skip], truth.z[~skip]
    out = z == -torch.inf
    if truth.labels is not None:  # a target there has an infinite loss, whose slope is one
        out &= ~bounds.at_label(z, truth.labels[~skip])
    assert not got[out].any(), "the gradient of columns at -inf must be 0"
    allowed = error + 0.5 * oracle.ulp(dx.abs() + error, dtype)
    if dtype == torch.float16:  # denormals
        allowed = torch.maximum(allowed, error + 2.0**-25)
    overflow = (got.double() == dx.sign() * torch.inf) & (dx.abs() + error > 0.99 * torch.finfo(dtype).max)
    good = ((got.double() - dx).abs() <= allowed) | overflow
    assert good.all(), (
        f"gradient: {got[~good][:3].tolist()} for {dx[~good][:3].tolist()}, allowed {allowed[~good][:3].tolist()}"
    )


def check_bias(case, grad, of_bias):
    """The sum over tokens of what was stored."""
    stored = grad.double()
    expected = stored.sum(0)
    unit = 2.0**-52 if case.dtype == "float64" else 2.0**-23
    error = stored.abs().sum(0) * unit * (len(grad) + 1)
    close("bias gradient", of_bias, expected, error.nan_to_num(posinf=0.0))
