"""Checks what the ranks made of a generated case (`strategies.Case`) against the float64 truth."""

import bounds
import oracle
import policy_oracle
import torch
from generated_case import bits_equal, build
from generated_truth import Truth, close, fitted, student_side
from strategies import DIFFERENTIABLE, Case
from topk_oracle import definition

CLAMP, KINKS = 20.0, [torch.tensor(c).log().item() for c in (0.8, 1.2, 3.0)] + [-20.0, 20.0]


def not_a_number(case, p, z):
    """Rows [N] that are NaN by promise: no softmax, or a label that nobody owns."""
    out = z.isnan().any(-1) | (z == torch.inf).any(-1) | (z == -torch.inf).all(-1)
    labels = p["labels"]
    if labels is not None:
        labels = labels.long()
        out |= (labels < 0) | (labels >= case.vocab_size)
    return out & ~p["ignored"]


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
        value = (
            function(held, a, old, mask)
            if function
            else policy_oracle.dual_clip(held, a, old, mask, 0.2, 0.2, 3.0)
        )
        # sapo: a sigmoid of up to tau e^x, whose derivative is bounded by 1
        return value, 4 * a.abs() * (1 + (held - old).exp())
    x = (lp - given["reference_log_prob"]).clamp(-CLAMP, CLAMP)
    value = {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x}[option]
    return value, 1 + x.abs() + (-x).exp()


def term_parts(case, p, truth, stats, term):
    """Per-token value, differentiable in `stats`; sizes of its parts and of its slope's; rows at a
    kink of its."""
    name, _, option = term
    given = {
        key: p[key].double()[truth.keep]
        for key in ("advantages", "old_log_prob", "reference_log_prob")
    }
    none = torch.zeros(len(truth.z), dtype=torch.float64)
    far = torch.zeros(len(truth.z), dtype=torch.bool)
    over = "set_" if case.sets else ""
    lse, lp = stats["lse"], stats["log_prob"]
    if name == "cross_entropy":
        smoothing, formula, weighted = option
        alpha = (
            smoothing
            if formula == "torch"
            else smoothing * case.vocab_size / max(case.vocab_size - 1, 1)
        )
        nll = -lp * (p["weight"].double()[truth.labels] if weighted else 1.0)
        if not smoothing:
            return nll, nll.abs(), none, far
        mass, total = stats["mass"], stats["total"]
        value = (1 - alpha) * nll + alpha * (mass * lse - total) / case.vocab_size
        return value, (nll.abs() + (mass * lse).abs() + total.abs()), none, far
    if name in ("z_loss", "entropy"):
        value = lse**2 if name == "z_loss" else -stats[f"{over}entropy"]
        return value, value.abs(), none, far
    if name in ("policy", "kl"):
        other = given["old_log_prob" if name == "policy" else "reference_log_prob"]
        lp = stats[f"{over}log_prob"]
        value, slope = ratio_terms(name, option, lp, given)
        x, error = (lp - other).detach(), truth.errors[f"{over}log_prob"]
        near = torch.stack([(x - kink).abs() for kink in KINKS]).amin(0) <= 4 * error + 1e-5
        parts = value.abs() + slope * (1 + lp.abs().nan_to_num(posinf=0.0) + other.abs())
        return value, parts, slope, near
    of_student = p["of_student"] if p["of_student"] is not None else p["of_teacher"]
    of_student = torch.as_tensor(fitted(of_student, truth.keep), dtype=torch.float64)
    squared = of_student**2 if option[-1] else 1.0
    if name == "distillation":
        value = stats["forward_kl" if option[0] == "cross_entropy" else option[0]]
        value = value + stats["teacher_entropy"] if option[0] == "cross_entropy" else value
    else:
        value, rest = stats["composite"], (truth.tau == 0) & (truth.z > -torch.inf)
        far = ~rest.any(-1)  # the definition's tail of nothing has no slope
    return value * squared, value.abs() * squared, none, far


def add_composite(case, p, truth):
    """The top-K divergence of a head from its definition over the whole vocabulary, as one more
    statistic."""
    divergence, support, _ = next(option for name, _, option in case.terms if name == "topk")
    keep, side = truth.keep, truth.side
    value = definition(
        side, p["ids"][keep], p["log_probs"][keep], p["mask"][keep], divergence, support,
        of_teacher=fitted(p["of_teacher"], keep), of_student=1.0, renormalize=case.renormalize,
    )  # fmt: skip
    # up to four statistics; a log-prob of -100 for what the teacher does not know weighs the error
    # of its probability
    factor = 4.0 + 100.0 * ((divergence, support) == ("reverse_kl", "vocabulary"))
    truth.values["composite"] = value.detach()
    truth.errors["composite"] = factor * truth.errors["teacher_mass"]
    gradient = torch.autograd.grad(value.sum(), side)[0]
    truth.jacobian["composite"] = gradient, factor * truth.of_gradient


def check_head(case, p, truth, nan, first):
    """Loss, sums and count; -> upstream gradients of the statistics, their errors, and rows not to
    be compared."""
    keep, unit = truth.keep, truth.r.unit
    if any(name == "topk" for name, *_ in case.terms):
        add_composite(case, p, truth)
    trained = (*DIFFERENTIABLE, "composite")
    leaves = {
        n: v.double().clone().requires_grad_(n in trained)
        for n, v in truth.values.items()
        if n != "argmax"
    }
    valid = ~p["ignored"]
    weight = (
        torch.ones(len(valid), dtype=torch.float64)
        if p["token_weight"] is None
        else p["token_weight"].double()
    )
    count = (weight * valid).sum()
    # in fp32, whatever the logits
    close("count", first["count"][0], count, (len(valid) + 4) * 2.0**-24 * count)
    rows = weight[keep]
    upstream = (
        torch.linspace(-1, 2, len(valid)).double()[keep]
        if case.reduction == "none"
        else torch.ones_like(rows)
    )
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
        found = torch.autograd.grad(
            value.sum(), [leaves[n] for n in needed], create_graph=True, allow_unused=True
        )
        # a divisor that is a sum of weights is a sum in fp32, whatever the logits
        of_divisor = (len(valid) + 4) * 2.0**-24 if isinstance(divisor, torch.Tensor) else 0.0
        error = 16 * unit * (size.detach() + slope)
        for n, g in zip(needed, found):
            if g is None:
                continue
            error = error + (g.detach().abs() * truth.errors[n]).nan_to_num(posinf=0.0)
            of_g = 16 * unit * (g.detach().abs() + slope) + of_divisor * g.detach().abs()
            if g.requires_grad:
                second = torch.autograd.grad(
                    g.sum(), [leaves[m] for m in needed], retain_graph=True, allow_unused=True
                )
                for m, h in zip(needed, second):
                    if h is not None:
                        of_g = of_g + (h.abs() * truth.errors[m]).nan_to_num(posinf=0.0)
            grads[n] = grads.get(n, 0.0) + g.detach() * c * upstream
            errors[n] = errors.get(n, 0.0) + of_g * c.abs() * upstream.abs()
        value, error = value.detach(), error.nan_to_num(posinf=0.0)
        size = value.abs().nan_to_num(posinf=0.0)
        loss, of_loss = (
            loss + c * value,
            of_loss + c.abs() * (error + (16 * unit + of_divisor) * size),
        )
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
            assert bits_equal(result[name], first[name]), (
                f"{name} of rank {r} differs from rank 0's"
            )
    grad = joined(case, [result["grad"] for result in results])
    z, _ = student_side(p["x"], p["bias"], case, p["temperature"])
    z = z if case.dtype == "float64" else torch.where(z.abs() > 3.4e38, z * torch.inf, z)
    nan, ignored = not_a_number(case, p, z), p["ignored"]
    keep = ~nan & ~ignored
    truth = Truth(case, p, keep, gpu)
    names = [name for name in first if name in truth.values]
    assert case.head or {*case.want} <= {*names, "rank"}, (
        "a statistic without a formula in the oracle"
    )
    for name in set(names) - {"argmax"}:
        got, undefined = first[name], nan
        if name == "log_probs_at":  # 0 for none
            got, undefined = got.view(p["ids"].shape), nan[:, None] & (p["ids"] >= 0)
        assert got[undefined].isnan().all(), (
            f"{name} of rows {nan.nonzero()[:, 0].tolist()} must be NaN"
        )
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
    if "rank" in first:
        got, (least, most) = first["rank"], truth.ranks()
        assert got[nan].isnan().all() and not got[ignored].any()
        assert ((got[keep] >= least) & (got[keep] <= most)).all(), (got[keep], least, most)
    if case.head:
        grads, errors, skip = check_head(case, p, truth, nan, first)
    else:
        grads = {name: g.double()[keep] for name, g in p["upstream"].items()}
        errors, skip = {}, torch.zeros(int(keep.sum()), dtype=torch.bool)
    for name in grads.keys() & truth.jacobian.keys():
        infinite = truth.values[name].isinf()  # what is infinite has no gradient
        skip = skip | (infinite.any(-1) if infinite.dim() > 1 else infinite)
    dx, error = truth.gradient(grads, errors)
    check_gradient(grad, dx, error, nan, ignored, keep, skip, truth)
    if case.bias:
        check_bias(case, grad, joined(case, [r["bias grad"][None] for r in results])[0])


def joined(case, parts):
    """Ranks' columns -> [.., V] in the order of the vocabulary; what lies beyond is padding and
    must be 0."""
    ordered = sorted(range(len(parts)), key=lambda r: case.order[r])
    whole = torch.cat([parts[r] for r in ordered], -1)
    assert not whole[..., case.vocab_size :].any(), "the gradient of padding must be 0"
    return whole[..., : case.vocab_size]


def check_gradient(grad, dx, error, nan, ignored, keep, skip, truth):
    assert grad[nan].isnan().all(), (
        f"the gradient of rows {nan.nonzero()[:, 0].tolist()} must be NaN"
    )
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
    overflow = (got.double() == dx.sign() * torch.inf) & (
        dx.abs() + error > 0.99 * torch.finfo(dtype).max
    )
    good = ((got.double() - dx).abs() <= allowed) | overflow
    assert good.all(), (
        f"gradient: {got[~good][:3].tolist()} for {dx[~good][:3].tolist()}, allowed "
        f"{allowed[~good][:3].tolist()}"
    )


def check_bias(case, grad, of_bias):
    """The sum over tokens of what was stored."""
    stored = grad.double()
    expected = stored.sum(0)
    unit = 2.0**-52 if case.dtype == "float64" else 2.0**-23
    error = stored.abs().sum(0) * unit * (len(grad) + 1)
    close("bias gradient", of_bias, expected, error.nan_to_num(posinf=0.0))
