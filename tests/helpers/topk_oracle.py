"""The divergence from K entries of a teacher in float64, from dense distributions over the whole
vocabulary."""

import torch

BETA = 0.3  # the weight of the teacher in the mixture of a JSD


def column(temperature):
    return temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature


def times(mass, value):
    return torch.where(mass == 0, 0.0, mass * torch.where(mass == 0, 0.0, value))


def definition(z, ids, log_probs, mask, divergence, support, **settings):
    """The divergence [N] in float64; a token without entries is 0, unless there is a tail, which is
    all of it then."""
    value = dense(z, ids, log_probs, mask, divergence, support, **settings)
    live = (mask & (ids >= 0) & (log_probs > -torch.inf)).any(-1)
    return value if support == "tail" else torch.where(live, value, 0.0)


def dense(
    z,
    ids,
    log_probs,
    mask,
    divergence,
    support,
    *,
    of_teacher=1.0,
    of_student=None,
    renormalize=True,
    tail=None,
):
    """The same from dense distributions of all V ids, and one more for the tail, of tokens with
    entries."""
    live = mask & (ids >= 0) & (log_probs > -torch.inf)
    tau = torch.zeros_like(z).scatter_add(
        1, ids.clamp(min=0), torch.where(live, log_probs.double().exp(), 0.0)
    )
    inside = tau > 0
    tau = tau ** (1 / column(of_teacher))
    if renormalize:
        tau = tau / torch.where(inside.any(-1, keepdim=True), tau.sum(-1, keepdim=True), 1.0)
    z = z / column(of_teacher if of_student is None else of_student)
    if support == "topk":
        z = torch.where(inside, z, -1e9)
    log_p = z.log_softmax(-1)
    outside = torch.where(inside, -torch.inf, log_p)
    if support == "tail":
        rest = 1 - tau.sum(-1, keepdim=True)
        rest = torch.where(rest < 1e-6, 0.0, rest) if tail is None else tail.double().exp()[:, None]
        tau, log_p = (
            torch.cat([tau, rest], 1),
            torch.cat([log_p, outside.logsumexp(-1, keepdim=True)], 1),
        )
        inside = torch.cat([inside, torch.ones_like(rest, dtype=torch.bool)], 1)
    p, log_tau = log_p.exp(), torch.where(tau == 0, 1.0, tau).log()
    if divergence == "forward_kl":
        return times(tau, log_tau - log_p).sum(-1)
    if divergence == "reverse_kl":
        if support == "vocabulary":
            return times(p, log_p - torch.where(inside, log_tau, -100.0)).sum(-1)
        return torch.where(inside, times(p, log_p - log_tau), 0.0).sum(-1)
    m = BETA * tau + (1 - BETA) * p
    log_m = torch.where(m == 0, 1.0, m).log()
    value = BETA * times(tau, log_tau - log_m) + (1 - BETA) * times(p, log_p - log_m)
    return (value if support == "vocabulary" else torch.where(inside, value, 0.0)).sum(-1)
