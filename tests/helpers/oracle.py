"""Float64 truth for one row of logits at a time; imports nothing of the package.

The target column is kept out of the sum here too (reliability of confident tokens), but nothing is
chunked, merged, shifted by a common maximum of chunks or shared with the code under test. All
tensors are float64 on the CPU.
"""

import torch


def transform(x, bias=None, scale=1.0, softcap=None, temperature=1.0):
    """Raw logits [N, V] of any dtype -> z and dz/dx in float64."""
    x = x.double().cpu()
    if bias is not None:
        x = x + bias.double().cpu()
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().cpu().reshape(-1, 1)
    x = x * scale
    slope = torch.full_like(x, scale)
    if softcap is not None:
        slope = slope / torch.cosh(x / softcap) ** 2
        x = softcap * torch.tanh(x / softcap)
    return x / temperature, slope / temperature


def statistics(z, labels=None, weight=None):
    """z [N, V] float64, labels [N] (valid ids) -> dict of [N] float64 and "argmax"."""
    top = z.max(-1, keepdim=True).values
    shifted = z - top
    terms = shifted.exp()
    if labels is None:
        log_sum = terms.sum(-1).log()
    else:
        at = torch.zeros_like(z, dtype=torch.bool).scatter(1, labels[:, None], True)
        others = torch.where(at, 0.0, terms).sum(-1)
        z_y = z.gather(1, labels[:, None])[:, 0]
        u = top[:, 0] - z_y
        log_sum = torch.where(u == 0, others.log1p(), (others + (-u).exp()).log())
    p = terms / terms.sum(-1, keepdim=True)
    out = {"lse": top[:, 0] + log_sum}
    if labels is not None:
        out["log_prob"] = -torch.where(u == 0, log_sum, u + log_sum)
        out["target_logit"] = z_y
    log_p = shifted - log_sum[:, None]
    out["entropy"] = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    out["collision"] = (p * p).sum(-1)
    weighted = z if weight is None else z * weight.double().cpu()
    out["total"] = torch.where(z > -torch.inf, weighted, 0.0).sum(-1)
    out["argmax"] = z.argmax(-1)
    return out


def gradient(z, slope, labels, grads, weight=None):
    """Upstream gradients {name: [N]} -> d/dx [N, V], each element by its own formula, p_y - 1
    without cancellation."""
    top = z.max(-1, keepdim=True).values
    shifted = z - top
    terms = shifted.exp()
    whole = terms.sum(-1, keepdim=True)
    p = terms / whole
    g = {name: value.double().cpu()[:, None] for name, value in grads.items()}
    dz = torch.zeros_like(z)
    if "lse" in g:
        dz += g["lse"] * p
    if labels is not None:
        at = torch.zeros_like(z, dtype=torch.bool).scatter(1, labels[:, None], True)
        if "log_prob" in g:
            others = torch.where(at, 0.0, terms).sum(-1, keepdim=True) / whole
            dz += torch.where(at, others * g["log_prob"], -p * g["log_prob"])
        if "target_logit" in g:
            dz += torch.where(at, g["target_logit"], 0.0)
    if "entropy" in g:
        log_p = shifted - whole.log()
        entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1, keepdim=True)
        dz += torch.where(p > 0, -g["entropy"] * p * (log_p + entropy), 0.0)
    if "collision" in g:
        dz += 2 * g["collision"] * p * (p - (p * p).sum(-1, keepdim=True))
    if "total" in g:
        column = (
            torch.ones(z.shape[1], dtype=torch.float64) if weight is None else weight.double().cpu()
        )
        dz += torch.where(z > -torch.inf, g["total"] * column, 0.0)
    return dz * slope


def margin(z, labels):
    """z_y minus the largest other logit (inf for a vocabulary of one)."""
    others = z.scatter(1, labels[:, None], -torch.inf)
    return z.gather(1, labels[:, None])[:, 0] - others.max(-1).values


def ulp(value, dtype=torch.float32):
    """Spacing of `dtype` numbers at |value| (of its smallest normal number below that), in
    float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(value.double().abs().clamp(min=info.tiny))
    return info.eps * 2.0 ** (exponent - 1).double()


def times(mass, value):
    """mass * value, where no mass leaves nothing of any value, nor of its gradient."""
    return torch.where(mass == 0, 0.0, mass * torch.where(mass == 0, 0.0, value))


def log(x):
    return torch.where(x == 0, 1.0, x).log()


def mixture(p, q, beta):
    """beta KL(q || m) + (1 - beta) KL(p || m) by column."""
    log_m = log(beta * q + (1 - beta) * p)
    return beta * times(q, log(q) - log_m) + (1 - beta) * times(p, log(p) - log_m)


def divergences(z, u, beta):
    """Logits of student and teacher at their temperatures [N, V] -> statistics [N], differentiable
    by autograd."""
    log_p, log_q = z.log_softmax(-1), u.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    return {
        "forward_kl": times(q, log_q - log_p).sum(-1),
        "reverse_kl": times(p, log_p - log_q).sum(-1),
        "teacher_entropy": -times(q, log_q).sum(-1),
        "jsd": mixture(p, q, beta).sum(-1),
        "total_variation": (p - q).abs().sum(-1) / 2,
        "overlap": torch.minimum(p, q).sum(-1),
    }


def of_entries(z, tau, beta):
    """Of a teacher's probabilities tau [N, V], 0 where it has no entry. A row without entries is 0
    but for the tail."""
    inside = tau > 0
    some, rest = inside.any(-1), (~inside & (z > -torch.inf)).any(-1)

    def log_sum(columns, filled):
        top = torch.where(columns, z, -torch.inf).amax(-1, keepdim=True).detach()
        top = torch.where(filled[:, None], top, 0.0)
        terms = torch.where(columns, z - top, -torch.inf).exp()
        return torch.where(filled, (top + log(terms.sum(-1, True)))[:, 0], 0)

    of_inside, of_rest, of_all = log_sum(inside, some), log_sum(~inside, rest), z.logsumexp(-1)
    log_s = torch.where(inside, z - of_inside[:, None], 0.0)
    s = torch.where(inside, log_s.exp(), 0.0)
    log_r = torch.where(~inside & rest[:, None], z - of_rest[:, None], -torch.inf)
    r = log_r.exp()
    nothing = torch.zeros_like(of_all)
    log_mass = torch.where(some, of_inside - of_all, -torch.inf)
    p = torch.where(inside, (z - of_all[:, None]).exp(), 0.0)
    return (
        {
            "teacher_mass": tau.sum(-1),
            "topk_forward_kl": torch.where(some, times(tau, log(tau) - log_s).sum(-1), nothing),
            "vocab_forward_kl": torch.where(
                some, times(tau, log(tau) - (log_s + log_mass[:, None])).sum(-1), nothing
            ),
            "topk_reverse_kl": torch.where(some, times(s, log_s - log(tau)).sum(-1), nothing),
            "topk_log_mass": log_mass,
            "tail_log_mass": torch.where(rest, of_rest - of_all, -torch.inf),
            "tail_entropy": -times(r, log_r).sum(-1),
            "topk_jsd": mixture(s, tau, beta).sum(-1),
            "vocab_jsd": mixture(p, tau, beta).sum(-1),
        },
        s,
        r,
    )
