"""Float64 truth of a generated case, and the error that is allowed to each of its values."""

import bounds
import oracle
import torch
from known import TRAINED
from topk_oracle import BETA


def close(name, got, expected, error):
    """Equal where infinite or NaN, else within the error and one rounding to got's type."""
    same = (got.double() == expected) | (got.isnan() & expected.isnan())
    allowed = error + oracle.ulp(
        expected.nan_to_num(), torch.float64 if got.dtype == torch.float64 else torch.float32
    )
    apart = (got.double() - expected).abs()
    good = same | (apart <= allowed)
    assert good.all(), (
        f"{name}: {apart[~good][:3].tolist()} apart, allowed {allowed[~good][:3].tolist()}"
    )


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
        self.r = bounds.rounding(
            dtype, case.backend, gpu, self.x, p["bias"], case.scale, case.softcap, temperature
        )
        weighted = case.weighted_total and not case.head
        weighted |= any(n == "cross_entropy" and o[2] and o[0] for n, _, o in case.terms)
        self.weight = p["weight"].double() if weighted else None
        self.values = oracle.statistics(self.z, self.labels, self.weight)
        live = self.z > -torch.inf
        self.values["mass"] = (
            torch.where(live, 1.0 if self.weight is None else self.weight, 0.0).sum(-1).double()
        )
        self.errors = bounds.values(self.z, self.labels, self.weight, self.values, self.r)
        self.jacobian = {}  # of a teacher's statistics: name -> (d/dz' [N, V], error)
        if case.teacher:
            self._of_teacher()
        if case.given_ids:
            self._at_ids()
        if case.sets:
            self._over_sets()

    def _at_ids(self):
        """Log-probs at ids [N, K], and the gradient of their sum with weights."""
        ids, z, r = self.p["ids"][self.keep], self.z, self.r
        known = ids >= 0
        at = z.gather(1, ids.clamp(min=0))
        off = r.transform * r.unit * torch.where(at > -torch.inf, at, 0.0).abs() + 2 * r.unit
        self.values["log_probs_at"] = torch.where(
            known, at - self.values["lse"][:, None], 0.0
        ).clamp(max=0)
        self.errors["log_probs_at"] = torch.where(known, off + self.errors["lse"][:, None], 0.0)
        weight = known * torch.linspace(0.3, 1.5, ids.shape[1]).double()
        of_ids = torch.zeros_like(z).scatter_add(1, ids.clamp(min=0), weight)
        total = weight.sum(1)
        error = (
            bounds.gradient(z, None, None, {"lse": total}, {}, r)
            + (ids.shape[1] + 4) * r.unit * of_ids
        )
        self.jacobian["log_probs_at"] = of_ids - total[:, None] * z.softmax(-1), error

    def ranks(self):
        """Least and largest rank [N] that a label may have."""
        labels, columns = self.labels[:, None], torch.arange(self.z.shape[1])
        z, at = self.z, self.z.gather(1, labels)
        slack = self.r.transform * self.r.unit * (z.abs() + at.abs()).nan_to_num(posinf=0.0)
        # equal logits stay equal, but for a bias, and the lower id comes first
        same = columns == labels if self.case.bias else self.x == self.x.gather(1, labels)
        equal = (same & (columns <= labels)).sum(1)
        return ((z > at + slack) & ~same).sum(1) + equal, ((z >= at - slack) & ~same).sum(1) + equal

    def _over_sets(self):
        """Statistics of logits that are -inf outside of a set; those of the softmax have bounds."""
        members = torch.zeros_like(self.z, dtype=torch.bool).scatter(
            1, self.p["kept"][self.keep], True
        )
        z, r, one = torch.where(members, self.z, -torch.inf), self.r, torch.ones_like(self.z)
        truth = oracle.statistics(z, self.labels)
        errors = bounds.values(z, self.labels, None, truth, r)
        ones = torch.ones(len(z), dtype=torch.float64)
        for name in ("log_prob", "entropy", "lse"):
            if name in truth:
                dz = oracle.gradient(z, one, self.labels, {name: ones})
                error = bounds.gradient(z, self.labels, None, {name: ones}, {}, r)
                # of the mass: what is subtracted, and what is left of 1 - P, have its errors
                if name == "lse":
                    dz = dz - oracle.gradient(self.z, one, self.labels, {name: ones})
                    error = error + bounds.gradient(self.z, self.labels, None, {name: ones}, {}, r)
                    truth["lse"] = (truth["lse"] - self.values["lse"]).clamp(max=0)
                    errors["lse"] = errors["lse"] + self.errors["lse"]
                    error = error + z.softmax(-1) * (errors["lse"][:, None] + 4 * r.unit)
                key = "set_" + name.replace("lse", "log_mass")
                self.values[key], self.errors[key], self.jacobian[key] = (
                    truth[name],
                    errors[name],
                    (dz, error),
                )

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
                self.jacobian[name] = (
                    torch.autograd.grad(value.sum(), z, retain_graph=True)[0],
                    of_gradient,
                )
        if case.teacher == "whole":  # columns where rounding may choose the sign of p - q
            close_call = torch.where((masses[0] - masses[1]).abs() <= of_gradient, masses[0], 0.0)
            apart = close_call + masses[0] * close_call.sum(-1, keepdim=True)
            for name in ("total_variation", "overlap"):
                self.jacobian[name] = self.jacobian[name][0], of_gradient + apart
        self.of_gradient = of_gradient

    def _tau(self, of_teacher):
        p, keep = self.p, self.keep
        live = p["mask"][keep] & (p["ids"][keep] >= 0)
        dense = torch.zeros_like(self.x)
        dense.scatter_add_(
            1,
            p["ids"][keep].clamp(min=0),
            torch.where(live, p["log_probs"][keep].double().exp(), 0.0),
        )
        inside = dense > 0
        t = of_teacher.double()[:, None] if isinstance(of_teacher, torch.Tensor) else of_teacher
        dense = torch.where(inside, dense ** (1 / t), 0.0)
        return (
            dense / dense.sum(-1, keepdim=True).clamp(min=1e-300)
            if self.case.renormalize
            else dense
        )

    def gradient(self, grads, errors):
        """Upstream gradients {name: [N]} and their errors -> d/dx [N, V] and its error, before the
        last rounding."""
        own = {name: g for name, g in grads.items() if name in TRAINED}
        one = torch.ones_like(self.z)
        dz = oracle.gradient(self.z, one, self.labels, own, self.weight)
        error = bounds.gradient(self.z, self.labels, self.weight, own, errors, self.r)
        slope = self.slope if isinstance(self.slope, torch.Tensor) else one * self.slope
        dx, error = dz * slope, error * slope.abs() + 4 * bounds.FLUSHED * dz.abs()
        for name in grads.keys() - own.keys():
            of_z, of_error = self.jacobian[name]
            side = (
                self.slope
                if name.startswith("set_") or name == "log_probs_at"
                else self.student_slope
            )
            side = side if isinstance(side, torch.Tensor) else one * side
            g = grads[name][:, None]
            of_g = errors[name][:, None] if name in errors else 0 * g
            dx = dx + g * of_z * side
            flushed = 4 * bounds.FLUSHED * (g * of_z).abs()
            error = error + (g.abs() * of_error + of_g * of_z.abs()) * side.abs() + flushed
        rounded = (self.r.slope + 4) * self.r.unit
        return dx, error + dx.abs() * rounded
