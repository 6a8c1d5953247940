"""Makes the tensors of a generated case (`strategies.Case`) and runs it on a rank."""

import torch
import torch.nn.functional as F
from odd_outcome import lay_out
from strategies import Case
from topk_oracle import BETA
from torch_defaults import torch_defaults

import tp_headloss as hl

OFTEN = {"reinforce": {}, "clip": {}, "dual clip": {"dual_clip": 3.0}, "cispo": {}, "sapo": {}}


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
        elif what == "far":  # about where float64's exponential ends
            x[i] = (x[i] * 8).round() / 8 + (620.0 + number) * (1 - 2 * (number % 2))
        elif what == "tie":
            x[i] = x[i].round()


def build(case: Case) -> dict:
    """All tensors of a case on the CPU, of the whole vocabulary."""
    generator = torch.Generator().manual_seed(case.seed)
    n, v, dtype = (
        case.rows + case.rows % 2 * (case.lead != "flat"),
        case.vocab_size,
        getattr(torch, case.dtype),
    )

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
    x, bias = x.to(dtype), randn(v) if case.bias else None
    mask &= case.scale * x.gather(1, ids) > -torch.inf  # a negative scale turns +inf into it
    # the largest logit, or a set might have none
    largest = (case.scale * (x if bias is None else x + bias)).nan_to_num(nan=0.0).argmax(-1)
    kept = torch.cat([ids, labels.clamp(0, v - 1)[:, None], largest[:, None]], 1)
    # of duplicates, too, less than 1
    log_probs = t.nan_to_num(posinf=0.0).log_softmax(-1).gather(1, ids) - 3.0
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
        "x": x, "t": t.to(dtype), "labels": labels.to(getattr(torch, case.labels)) if case.labels else None,
        "ignored": ignored, "bias": bias, "temperature": temperature(case.temperature, "rest"),
        "of_teacher": temperature(case.teacher_temperature, "teacher"),
        "of_student": temperature(case.student_temperature, "student"), "kept": kept,
        "ids": torch.where(rand(n, case.entries) < 0.1, -1, ids),
        "log_probs": log_probs.to(torch.promote_types(dtype, torch.float32)), "mask": mask, "weight": rand(v) + 0.1,
        "upstream": upstream, "token_weight": torch.where(rand(n) < 0.2, 0.0, rand(n)) if case.token_weight else None,
        **of_tokens,
    }  # fmt: skip
    if case.head and case.token_weight:  # a weight of 0 ignores its token
        drawn["ignored"] = ignored | (drawn["token_weight"] == 0)
    return drawn


def make_shard(case, group, rank):
    v, padded = case.vocab_size, case.cuts[-1]
    if case.shards in ("even", "padded"):
        return hl.VocabShard.from_group(group, v, padded)
    if case.shards == "boundaries":
        return hl.VocabShard.from_boundaries(list(case.cuts), v, group)
    return hl.VocabShard(*piece(case, rank), v, group)


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


def make_sets(case, p, moved):
    """The sets: with a rotated order for each token, padded, or without the ids that occur
    before."""
    kept = p["kept"]
    if case.sets == "padded":
        return hl.IdSets(moved(kept), moved(torch.ones_like(kept, dtype=torch.bool)))
    rows = [torch.unique(row.roll(i)) for i, row in enumerate(kept)]
    sizes = torch.tensor([0, *map(len, rows)])
    flat = torch.cat([*rows, kept.new_empty(0)]).int()
    device = moved(kept).device
    return hl.IdSets.from_csr(flat.to(device), sizes.cumsum(0).to(device))


def make_terms(case, p, device):
    terms, over = [], "sets" if case.sets else "vocabulary"
    for name, weight, option in case.terms:
        if name == "cross_entropy":
            smoothing, formula, weighted = option
            terms.append(
                hl.CrossEntropy(
                    weight, smoothing, formula, p["weight"].to(device) if weighted else None
                )
            )
        elif name == "policy":
            objective = "clip" if option == "dual clip" else option
            terms.append(
                hl.PolicyGradient(objective, weight, name="policy", over=over, **OFTEN[option])
            )
        elif name == "kl":
            terms.append(hl.KLToReference(weight, option, output_clamp=None, over=over))
        elif name == "distillation":
            terms.append(
                hl.Distillation(
                    weight, option[0], temperature_squared=option[1], name="distillation"
                )
            )
        elif name == "topk":
            terms.append(
                hl.TopKDistillation(weight, *option[:2], temperature_squared=option[2], name="topk")
            )
        else:
            terms.append(hl.Entropy(weight, over) if name == "entropy" else hl.ZLoss(weight))
    return terms


def scalar(name, x):
    """A number per token: log-probs at several ids, weighted."""
    return (
        (x * torch.linspace(0.3, 1.5, x.shape[-1], device=x.device)).sum(-1)
        if name == "log_probs_at"
        else x
    )


def run_case(group, device, case, linear=None, defaults=(None, None)):
    """One rank: statistics or head, backward, inputs unmodified. -> values [N] by name, gradients,
    flat.

    linear: a mode of `Linear`: the same of the logits of random hidden states and weights
    instead.
    defaults: of torch, for the calls alone."""
    p = build(case)
    rank = 0 if group is None else torch.distributed.get_rank(group)
    shard = make_shard(case, group, rank)
    start, stop = piece(case, rank)
    assert (shard.start, shard.stop) == (start, stop)
    n, pad = len(p["x"]), (0, case.cuts[-1] - case.vocab_size)

    def spread(x):
        """As it is, or with gaps in memory."""
        return x.repeat_interleave(2, 0)[::2] if case.layout in ("sliced", "columns") else x

    def local(x, rubbish=torch.nan):
        return spread(F.pad(x, pad, value=rubbish)[..., start:stop].to(device))

    def moved(x):
        return shaped(spread(x.to(device)), case) if isinstance(x, torch.Tensor) else x

    logits = lay_out(local(p["x"]), case.layout)
    lead = shaped(p["ignored"], case).shape
    logits = shaped(logits, case) if case.lead == "sequence" else logits.view(*lead, stop - start)
    teacher = None
    # a loss refuses one that nothing reads
    terms = make_terms(case, p, device) if case.head else []
    reads_beta = not case.head or any("jsd" in name for term in terms for name in term.want)
    beta = BETA if reads_beta else None
    if case.teacher == "whole":
        teacher = hl.Teacher(
            shaped(local(p["t"]), case), moved(p["of_teacher"]), moved(p["of_student"]), beta
        )
    elif case.teacher == "topk":
        teacher = hl.TopKTeacher(
            moved(p["ids"]), moved(p["log_probs"]), moved(p["mask"]), None,
            moved(p["of_teacher"]), moved(p["of_student"]), case.renormalize, beta,
        )  # fmt: skip
    sets = make_sets(case, p, moved) if case.sets else None
    bias = None if p["bias"] is None else local(p["bias"], 0.0).requires_grad_()
    transform = hl.Transform(bias, case.scale, case.softcap, moved(p["temperature"]))
    labels, options = moved(p["labels"]), hl.Options(backend=case.backend, transport=case.transport)
    weight = local(p["weight"]) if case.weighted_total else None
    inputs = {name: moved(p[name]) for name in ("advantages", "old_log_prob", "reference_log_prob")}
    token_weight = moved(p["token_weight"])
    upstream = {name: moved(p["upstream"][name]) for name in case.upstream}
    given = (
        logits,
        bias,
        labels,
        transform.temperature,
        weight,
        token_weight,
        *inputs.values(),
        *upstream.values(),
    )
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if teacher is not None:
        tensors += [x for x in vars(teacher).values() if isinstance(x, torch.Tensor)]
    before = [(x, x.detach().clone(), x._version) for x in tensors]
    operands, more, out = [logits.requires_grad_()], {}, {}
    if linear:
        generator, shapes = (
            torch.Generator().manual_seed(case.seed),
            ((*lead, 8), (stop - start, 8)),
        )
        operands = [
            torch.randn(shape, generator=generator).to(logits).requires_grad_() for shape in shapes
        ]
        transform = hl.Transform(None, case.scale, case.softcap, transform.temperature)
        more = {"bias": bias, "linear": hl.Linear(linear)}
    if case.head:
        head = hl.HeadLoss(
            terms,
            reduction=case.reduction,
            ignore_index=case.ignore_index,
            options=options,
        )
        needed = {name for term in head.terms for name in term.inputs}
        given = {name: inputs[name] for name in needed & set(inputs)}
        given |= {"teacher": teacher} if "teacher" in needed else {}
        given |= {"sets": sets} if sets is not None else {}
        with torch_defaults(*defaults):
            result = (head.linear if linear else head)(
                *operands, labels, shard=shard, token_weight=token_weight, denominator=case.denominator,
                transform=transform, inputs=given, **more,
            )  # fmt: skip
        stats, loss = result.stats, result.loss
        out = {
            "loss": loss,
            "count": result.count,
            **{f"term {k}": value for k, value in result.terms.items()},
        }
        losses, grads = (
            [loss],
            [torch.linspace(-1, 2, n, device=device).view(loss.shape) if loss.dim() else None],
        )
    else:
        with torch_defaults(*defaults):
            stats = (hl.linear_vocab_statistics if linear else hl.vocab_statistics)(
                *operands, labels, shard=shard, want=case.want, transform=transform, teacher=teacher, sets=sets,
                ids=moved(p["ids"]) if case.given_ids else None, total_weight=weight,
                ignore_index=case.ignore_index, options=options, **more,
            )  # fmt: skip
        losses = [scalar(name, getattr(stats, name)) for name in case.upstream]
        grads = list(upstream.values())
    with torch_defaults(*defaults):
        gradients = torch.autograd.grad(losses, operands + ([] if bias is None else [bias]), grads)
    for x, kept, version in before:
        assert bits_equal(x.detach(), kept) and x._version == version, "an input was written"
    names = [
        name
        for name in stats._fields
        if isinstance(getattr(stats, name), torch.Tensor) and name != "labels"
    ]
    out |= {name: getattr(stats, name) for name in names}
    flat = {name: x.detach().reshape(-1).cpu() for name, x in out.items()}
    flat |= {
        name: g.flatten(0, -2).cpu()
        for name, g in zip(("grad", "weight grad"), gradients[: len(operands)])
    }
    if bias is not None:
        flat["bias grad"] = gradients[-1].cpu()
    return flat


def bits_equal(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    same = a == b
    return bool((same | (a.isnan() & b.isnan()) if a.is_floating_point() else same).all())
