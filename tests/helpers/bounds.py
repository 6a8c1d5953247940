"""A-priori bounds of rounding errors, element by element, for logits in fp32 arithmetic (or
float64's).

Derivation, in units u of roundoff. A transformed logit z is off by k |z|: k counts the roundings of
`Transform`. A weight exp(z_j - M) then has the relative error eta_j = d_j + k (|z_j| + |M|) + 8,
d_j = M - z_j: the subtraction rounds d_j once, the exponential is good to two, the rest are
products. Sums of positive terms have the mean of their terms' errors and `sums` more: float64 sums
rounded to fp32 on the way (torch), or trees in fp32 (Triton). Everything else follows by the
product rule, with the absolute value of every term: nothing here was fitted. A GPU's exponential is
an ex2.approx of a rounded product, which costs 3 d_j + 16 in place of d_j + 8.

Whatever is smaller than 2^-126 of the row's maximum may be flushed to 0.
"""

from collections import defaultdict
from typing import NamedTuple

import torch


class Rounding(NamedTuple):
    unit: float
    transform: float  # k
    sums: float
    slope: torch.Tensor | float  # relative error of dz/dx, in units
    gpu: bool


def rounding(dtype, backend, gpu, x, bias, scale, softcap, temperature):
    """x [N, V] raw logits of float64."""
    plain = (
        bias is None
        and scale == 1
        and softcap is None
        and not isinstance(temperature, torch.Tensor)
    )
    k = 0.0 if plain and temperature == 1 else 4.0
    slope = 4.0
    # the argument of tanh 3, tanh 3, the product 2; cosh^-2 doubles its argument's error
    if softcap is not None:
        k = 8.0
        argument = ((x if bias is None else x + bias) * scale / softcap).abs()
        slope = 8 + 8 * argument.clamp(max=200)
    unit = 2.0**-50 if dtype == torch.float64 else 2.0**-24  # the oracle rounds in float64, too
    return Rounding(unit, (2 if gpu else 1) * k, 24.0 if backend == "triton" else 4.0, slope, gpu)


FLUSHED = 2.0**-126


class Row(NamedTuple):
    """What all bounds are made of: [N, V], 0 where p is, or [N, 1]."""

    p: torch.Tensor
    d: torch.Tensor
    eta: torch.Tensor  # absolute, no longer in units
    apart: torch.Tensor  # k (|z_j| + |M|)
    of_sum: torch.Tensor
    mean: torch.Tensor  # of d
    log_p: torch.Tensor
    entropy: torch.Tensor


def row(z, r: Rounding) -> Row:
    p, log_p = z.softmax(-1), z.log_softmax(-1)
    top = z.amax(-1, keepdim=True)
    live = p > 0
    d = torch.where(live, top - z, 0.0)
    apart = torch.where(live, r.transform * r.unit * (z.abs() + top.abs()), 0.0)
    eta = torch.where(live, ((3 * d + 16) if r.gpu else (d + 8)) * r.unit + apart, 0.0)
    log_p = torch.where(live, log_p, 0.0)
    of_sum = (p * eta).sum(-1, keepdim=True) + r.sums * r.unit
    return Row(
        p,
        d,
        eta,
        apart,
        of_sum,
        (p * d).sum(-1, keepdim=True),
        log_p,
        -(p * log_p).sum(-1, keepdim=True),
    )


def at_label(z, labels):
    return torch.zeros_like(z, dtype=torch.bool).scatter(1, labels[:, None], True)


def of_others(z, labels, w: Row, r: Rounding):
    """Absolute error of sum over j != y of p_j, and the sum itself [N]; z_y is off, too."""
    at = at_label(z, labels)
    z_y = torch.where(at & (z > -torch.inf), z, 0.0).sum(-1, keepdim=True)
    parts = torch.where(at, 0.0, w.p * (w.eta + r.transform * r.unit * z_y.abs()))
    others = torch.where(at, 0.0, w.p).sum(-1)
    return parts.sum(-1) + r.sums * r.unit * others + FLUSHED * z.shape[1], others, z_y[:, 0]


def values(z, labels, weight, truth, r: Rounding) -> dict:
    """-> name: [N], for the statistics of one row of logits."""
    w, u = row(z, r), r.unit
    top = z.amax(-1).abs()
    out = {"lse": w.of_sum[:, 0] + r.transform * u * top + 2 * u * truth["lse"].abs()}
    if labels is not None:
        error, _, z_y = of_others(z, labels, w, r)
        out["log_prob"] = error + 3 * u * truth["log_prob"].abs().nan_to_num(posinf=0.0)
        out["target_logit"] = (r.transform + (r.transform > 0)) * u * z_y.abs()
    out["entropy"] = (w.p * w.eta * (2 + w.d)).sum(-1) + (w.of_sum * (1 + w.mean))[:, 0]
    out["entropy"] += 4 * u * (1 + w.mean[:, 0] + w.entropy[:, 0])
    squares = w.p.square()
    out["collision"] = (2 * squares * (w.eta + w.of_sum)).sum(-1) + (r.sums + 8) * u * squares.sum(
        -1
    )
    weight = torch.ones(z.shape[1], dtype=torch.float64) if weight is None else weight.double()
    parts = torch.where(z > -torch.inf, (weight * z).abs(), 0.0).sum(-1)
    out["total"] = parts * (r.transform + 2 + r.sums) * u
    out["mass"] = torch.where(z > -torch.inf, weight.abs(), 0.0).sum(-1) * (2 + r.sums) * u
    return out


def gradient(z, labels, weight, grads, errors, r: Rounding):
    """Upstream gradients and their own errors {name: [N]} -> error of d/dz [N, V]."""
    w, u = row(z, r), r.unit
    zero = torch.zeros(len(z), 1, dtype=torch.float64)
    g = defaultdict(lambda: zero, {name: x[:, None].abs() for name, x in grads.items()})
    dg = defaultdict(lambda: zero, {name: x[:, None] for name, x in errors.items()})
    eps = w.eta + w.of_sum + 4 * u
    if labels is not None:  # z_y = log_prob + lse
        for name in ("lse", "log_prob"):
            g[name], dg[name] = g[name] + g["target_logit"], dg[name] + dg["target_logit"]
    log_ratio = torch.where(w.p > 0, (w.log_p + w.entropy).abs(), 0.0)
    of_mean = (w.p * w.eta * (1 + w.d)).sum(-1, keepdim=True) + (w.of_sum + 4 * u) * w.mean
    of_ratio = w.apart + 4 * u * (w.d + w.mean) + of_mean
    common = w.p * (
        g["lse"] * eps
        + dg["lse"]
        + g["entropy"] * (eps * log_ratio + of_ratio)
        + dg["entropy"] * log_ratio
    )
    collision = w.p.square().sum(-1, keepdim=True)
    of_collision = (2 * w.p.square() * (w.eta + w.of_sum)).sum(-1, keepdim=True) + (
        r.sums + 8
    ) * u * collision
    common = common + 2 * w.p * (
        g["collision"] * (eps * (w.p - collision).abs() + w.p * eps + of_collision)
        + dg["collision"] * (w.p - collision).abs()
    )
    away = common + w.p * (g["log_prob"] * eps + dg["log_prob"])
    if labels is not None:
        error, others, _ = of_others(z, labels, w, r)
        relative = w.of_sum[:, 0] + 8 * u
        of_target = (
            g["log_prob"][:, 0] * (error + others * relative) + dg["log_prob"][:, 0] * others
        )
        away = torch.where(at_label(z, labels), common + of_target[:, None], away)
    weight = (
        torch.ones(z.shape[1], dtype=torch.float64) if weight is None else weight.double().abs()
    )
    total = torch.where(z > -torch.inf, weight * (g["total"] * 4 * u + dg["total"]), 0.0)
    flushed = 8 * FLUSHED * sum(g.values()) * (1 + w.mean + 200 * (g["entropy"] > 0))
    return away + total + torch.where(z > -torch.inf, flushed, 0.0)


def divergence(z, u, masses, r: Rounding):
    """For all statistics of a teacher: -> error of a value [N] and of d/dz [N, V] for an upstream
    gradient of 1.

    masses: the distributions over which logits z and log-probs (or logits) u are weighed, [N, V]
    each. Values are means of differences of logarithms, gradients are products of a mass and such a
    difference less its mean; the masses have relative errors eta, the differences absolute ones of
    as much. L_j bounds the difference.
    """
    w, other = row(z, r), row(u, r)
    largest = sum(masses)
    live = largest > 0
    size = torch.where(live, w.log_p.abs() + other.log_p.abs(), 0.0)
    for mass in masses:
        size = size + torch.where(mass > 0, mass.clamp(min=1e-300).log().abs(), 0.0)
    logits = sum(torch.where(live & (x > -torch.inf), x.abs(), 0.0) for x in (z, u))
    logits = logits + logits.amax(-1, keepdim=True)
    eta = (2 * size * (3 if r.gpu else 1) + 16 + (2 + r.transform) * logits) * r.unit * live
    of_value = (largest * eta * (1 + size)).sum(-1) + (r.sums + 4) * r.unit * (
        1 + (largest * size).sum(-1)
    )
    mean = (largest * size).sum(-1, keepdim=True)
    of_gradient = (
        largest * (eta + (r.sums + 4) * r.unit) * (1 + size + mean) + largest * of_value[:, None]
    )
    return of_value, of_gradient + 64 * FLUSHED * live
