"""Runs odd inputs on ranks and checks what comes out."""

import os
import re
import traceback

import oracle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from odd_case import DTYPES, INF, NAN, Case, Here, N, V, defined_loss, loss_of, statistics
from odd_inputs import CASES, case_of
from ranks import Failure, on_ranks

from tp_headloss import VocabShard


def lay_out(x, layout):
    """[N, w] -> the same numbers, the leading shape and strides of the layout."""
    width = x.shape[1]
    if layout == "transposed":
        return x.T.contiguous().T
    if layout == "column-strided":
        return torch.repeat_interleave(x, 3, 1)[:, 1::3]
    if layout == "sliced":
        return F.pad(x, (3, 5), value=9.0)[:, 3 : 3 + width]
    if layout == "misaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "expanded":
        return x[:1].clone().expand(x.shape)
    if layout == "[S, B, V] transposed":
        return x.view(2, 2, width).transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "no one row stride":
        return F.pad(x.view(2, 2, width), (0, 0, 1, 1), value=9.0)[:, 1:3]
    if layout == "[V]":
        return x.view(width)
    return x.view(2, 0, 3, width) if layout == "[2, 0, 3]" else x.contiguous()


def upstream_of(kind, shape, i):
    """The gradient that arrives at statistic number i; None: none does."""
    n = shape.numel()
    drawn = torch.randn(max(n, N), 2, generator=torch.Generator().manual_seed(5 + i))[:n]
    one = torch.arange(n) == 2
    if i and kind not in ("all", "0.37 of the sum"):
        return None
    kinds = {
        "zero": torch.zeros(n), "-1": torch.full((n,), -1.0), "0.37 of the sum": torch.tensor(0.37).expand(n),
        "expanded": torch.tensor(0.37).expand(n), "strided": drawn[:, 1], "1e6": torch.full((n,), 1e6),
        "1e38": torch.full((n,), 1e38).copysign(drawn[:, 0]), "inf at 2": torch.where(one, INF, drawn[:, 0]),
        "NaN at 2": torch.where(one, NAN, drawn[:, 0]),
    }  # fmt: skip
    return kinds.get(kind, drawn[:, 0].contiguous()).view(shape)


def values_of(here: Here):
    if here.case.value is not None:
        values = here.case.value(here)
        return list(values) if isinstance(values, (list, tuple)) else [values]
    return statistics(here) if here.case.loss is None else loss_of(here)


def outcome(group, device, case: Case, backend):
    """-> bounds of the shard, values and gradients on this rank."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    shard = (
        case.cut(group) if case.cut else VocabShard.from_group(group, case.vocab, case.x.shape[1])
    )
    start, stop = (0, V) if shard is None else (shard.start, shard.stop)
    x = lay_out(case.x[:, start:stop].clone().to(device), case.layout)
    labels = (
        case.labels if case.labels_of is None else case.labels_of(case.labels.clone(), rank, size)
    )
    labels = labels.to(device) if x.dim() == 2 else labels.to(device).view(x.shape[:-1])
    before, version = x.clone(), x._version
    x.requires_grad_(x.is_floating_point())
    values = values_of(Here(x, labels, shard, case, backend))
    if backend == "torch" and not (case.raises or any(value.isnan().any() for value in values)):
        checked = values_of(
            Here(x, labels, shard, case._replace(options={"check": True} | case.options), backend)
        )
        assert all(map(torch.equal, values, checked)), "check=True takes what is right as it is"
    upstream = [upstream_of(case.upstream, value.shape, i) for i, value in enumerate(values)]
    used = [
        (v, g.to(device)) for v, g in zip(values, upstream) if g is not None and v.requires_grad
    ]
    grads = []
    for i in range(case.backwards):
        outputs, given = [v for v, _ in used], [g * (i + 1) for _, g in used]
        if case.upstream == "0.37 of the sum":
            outputs, given = [sum(0.37 * (i + 1) * v.sum() for v in outputs)], None
        grads.append(torch.autograd.grad(outputs, x, given, retain_graph=True)[0])
    assert x._version == version and torch.equal(
        *(t.detach().nan_to_num(7.5) for t in (x, before))
    ), "logits written"
    grads = [grad.reshape(x.shape[:-1].numel(), stop - start).cpu() for grad in grads]
    return (start, stop), [v.detach().flatten().cpu() for v in values], grads


def run(group, device, name, backend, dtypes):
    """The outcome at each dtype, or the exception."""
    results = []
    for dtype in dtypes:
        case = case_of(name, dtype)
        try:
            results.append(outcome(group, device, case, backend))
        except Exception as error:
            results.append(Failure(type(error).__name__, str(error), traceback.format_exc()))
            if not case.raises:
                break  # perhaps on this rank alone: no more collectives
    return results


def definition(case: Case, bounds):
    """Values and gradients [N, columns of all ranks] in float64, from whole rows of the columns
    within these bounds."""
    ids = torch.cat([torch.arange(start, stop) for start, stop in bounds])
    real = ids < case.vocab
    x = case.x.double()[:, ids[real]]
    x = (x[:1].expand_as(x) if case.layout == "expanded" else x).clone()
    valid = torch.ones(len(case.labels), dtype=torch.bool)
    valid[[*case.nan, *case.zero]] = False
    labels = torch.where(valid, case.labels.long(), 0)
    grad = torch.zeros(len(x), len(ids)).double()
    if case.loss is not None or case.expected is not None:
        x.requires_grad_()
        if case.loss is not None:
            values = [defined_loss(x, case.labels.long(), **case.loss)]
        else:
            values = [case.expected(x, case.labels)]
        upstream = upstream_of(case.upstream, values[0].shape, 0).double()
        grad[:, real] = torch.autograd.grad(values, x, upstream)[0]
        values = [value.detach() for value in values]
    else:
        at = torch.tensor(
            [
                int((ids[real] == label).nonzero()[0]) if ok else 0
                for label, ok in zip(labels, valid)
            ]
        )
        transform = dict(case.transform)
        if "bias" in transform:
            transform["bias"] = transform["bias"][ids[real]]
        z, slope = oracle.transform(x, **transform)
        values = oracle.statistics(z, at.long())
        values["argmax"] = ids[real][values["argmax"]]
        values = [values[name] for name in case.want]
        upstream = [upstream_of(case.upstream, value.shape, i) for i, value in enumerate(values)]
        upstream = {
            name: g for name, g in zip(case.want, upstream) if g is not None and name != "argmax"
        }
        grad[:, real] = oracle.gradient(z, slope, at.long(), upstream)
    per_token = [value for value in values if value.dim()]
    for tokens, fill in ((case.nan, NAN), (case.zero, 0.0)):
        for value in per_token:
            value[list(tokens)] = fill if value.is_floating_point() else -1
        if per_token:
            grad[list(tokens)] = 0.0
            columns = torch.arange(len(ids))[real][case.nan_columns]
            grad[:, columns] = grad[:, columns].index_fill(
                0, torch.tensor(tokens, dtype=torch.long), fill
            )
    return values, grad


def check(case: Case, results):
    """What the ranks gave, against the case."""
    if case.raises:
        assert all(isinstance(r, Failure) for r in results), f"no exception, but {results}"
        found = [f"{r.kind}: {r.message}" for r in results]
        assert all(text.startswith(case.raises) for text in found), (
            f"{case.raises} expected, got {found}"
        )
        everywhere = {re.sub(r"-?\d+", "#", text) if case.local else text for text in found}
        assert len(everywhere) == 1 and case.words in found[0], found
        return
    for r in results:
        assert not isinstance(r, Failure), r.trace
    bounds, values, grads = zip(*results)
    for others in values[1:]:
        assert all(
            torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(values[0], others)
        ), "ranks differ"
    if bounds[0] == (0, V):  # every rank has all of it
        bounds, grads = bounds[:1], grads[:1]
    expected, grad = definition(case, bounds)
    for ours, truth in zip(values[0], expected):
        truth = truth.to(ours.dtype).flatten()
        torch.testing.assert_close(ours, truth, rtol=2e-6, atol=1e-6, equal_nan=True)
    rtol = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}.get(case.x.dtype, 2e-5)
    for i in range(case.backwards):
        ours = torch.cat([parts[i] for parts in grads], 1)
        truth = ((i + 1) * grad).to(ours.dtype)
        torch.testing.assert_close(ours, truth, rtol=rtol, atol=1e-6, equal_nan=True)


MATRIX = [(name, size) for name in CASES for size in case_of(name, DTYPES[0]).sizes]
FULL = bool(os.environ.get("TP_HEADLOSS_FULL"))


def dtypes_of(name, world_size):
    """All with FULL; else, where a name has as many sizes, one for each of them in turn."""
    sizes = case_of(name, DTYPES[0]).sizes
    turn = [*CASES].index(name) + sizes.index(world_size)
    return (DTYPES[turn % len(DTYPES)],) if len(sizes) == len(DTYPES) and not FULL else DTYPES


def holds(name, world_size, backend, dtypes=DTYPES):
    """One named input on so many ranks, at each of these dtypes."""
    results = on_ranks(world_size, run, name, backend, dtypes)
    for i, dtype in enumerate(dtypes):
        try:
            check(case_of(name, dtype), [r[i] for r in results])
        except AssertionError as error:
            raise AssertionError(
                f"{name}: {dtype}, {backend} backend, {world_size} ranks: {error}"
            ) from None
