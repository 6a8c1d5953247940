"""Policy-gradient objectives and aggregations in float64, sequence by sequence; imports nothing of
the package.

`lp` are differentiable log-probs [B, S], everything else constants. An objective returns a
per-token loss [B, S], or a per-sequence one [B] where the paper defines it so; `aggregate` does the
rest. Gradients are autograd's.
"""

import torch


def clip_loss(ratio, a, low, high):
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def reinforce(lp, a, old, mask):
    return -a * lp


def ppo(lp, a, old, mask, low=0.2, high=0.2):
    return clip_loss((lp - old).exp(), a, low, high)


def dual_clip(lp, a, old, mask, low, high, c):
    """verl's form: maxima of losses."""
    ratio = (lp - old).exp()
    first = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    return torch.where(a < 0, torch.minimum(first, -a * c), first)


def cispo(lp, a, old, mask, low, high):
    return -((lp - old).exp().clamp(1 - low, 1 + high)).detach() * a * lp


def cispo_bound(lp, a, old, mask, bound):
    return -((lp - old).exp().clamp(max=bound)).detach() * a * lp


def sapo(lp, a, old, mask):
    tau = torch.where(a > 0, torch.tensor(1.0).double(), torch.tensor(1.05, dtype=torch.float64))
    return -a * torch.sigmoid(tau * ((lp - old).exp() - 1)) * 4 / tau


def per_sequence(function, mask):
    """[function(i, tokens of sequence i)] stacked; 0 for sequences without tokens."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([function(i, mask[i]) if mask[i].any() else zero for i in range(len(mask))])


def gspo(lp, a, old, mask, low, high):
    """One loss per sequence, with the gradient through the sequence's own ratio; A is the
    sequence's."""
    return per_sequence(
        lambda i, t: clip_loss((lp[i] - old[i])[t].mean().exp(), a[i][t][0], low, high), mask
    )


def gspo_length_weighted(lp, a, old, mask, low, high):
    def loss(i, t):
        return t.sum() * clip_loss((lp[i] - old[i])[t].mean().exp(), a[i][t].mean(), low, high)

    return per_sequence(loss, mask)


def gmpo(lp, a, old, mask, low, high):
    def loss(i, t):
        x, sign = (lp[i] - old[i])[t], a[i][t].sign()
        held = sign * torch.minimum(sign * x, sign * x.clamp(-low, high))
        return -a[i][t].mean() * held.mean().exp()

    return per_sequence(loss, mask)


def vespo(lp, a, old, mask):
    def phi(i, t):
        w = (
            (lp[i] - old[i])[t]
            .sum()
            .clamp(torch.tensor(1e-8, dtype=torch.float64).log(), 20)
            .exp()
            .detach()
        )
        k, rate = (2.0, 3.0) if a[i][t][0] >= 0 else (3.0, 2.0)
        return torch.exp(torch.tensor(rate)) * w**k * torch.exp(-rate * w)

    return -per_sequence(phi, mask)[:, None] * a * lp


def covariance(lp, a, mask):
    return torch.where(mask, (a - a[mask].mean()) * (lp - lp[mask].mean()), -torch.inf).detach()


def clip_cov(lp, a, old, mask, noise, fraction, bounds):
    loss, cov = ppo(lp, a, old, mask), covariance(lp, a, mask)
    ratio = (lp - old).exp()
    moved = (-a * ratio.clamp(0.8, 1.2) > -a * ratio) | ~mask
    candidates = [
        i
        for i in range(lp.numel())
        if not moved.flatten()[i] and bounds[0] < cov.flatten()[i] < bounds[1]
    ]
    chosen = sorted(candidates, key=lambda i: -noise.flatten()[i])[
        : max(int(fraction * mask.sum()), 1)
    ]
    keep = torch.ones(lp.numel(), dtype=torch.float64)
    keep[chosen] = 0
    return loss * keep.view_as(loss)


def kl_cov(lp, a, old, mask, fraction, coefficient):
    x = lp - old
    k = max(int(fraction * mask.sum()), 1)
    chosen = covariance(lp, a, mask).flatten().topk(k).indices
    extra = torch.zeros(lp.numel(), dtype=torch.float64)
    extra[chosen] = coefficient
    return -a * x.exp() + extra.view_as(x) * x.abs()


def k3(lp, reference):
    return (reference - lp).exp() - (reference - lp) - 1


def aggregate(loss, mask, reduction, horizon=None):
    """[B, S] or [B] -> scalar."""
    filled = [i for i in range(len(mask)) if mask[i].any()]
    if loss.dim() == 1:
        return sum(loss[i] for i in filled) / len(filled)
    if reduction == "mean":
        return loss[mask].sum() / mask.sum()
    if reduction == "sum":
        return loss[mask].sum()
    if reduction == "seq-mean-token-sum":
        return sum(loss[i][mask[i]].sum() for i in filled) / len(filled)
    if reduction == "seq-mean-token-mean":
        return sum(loss[i][mask[i]].mean() for i in filled) / len(filled)
    return sum(loss[i][mask[i]].sum() / horizon for i in filled) / len(filled)
