"""The table of odd inputs: each line of docs/limits.md, with the named inputs that test it.

A case is right (float64 references: `oracle` for statistics, autograd for losses), NaN or 0 for exactly the tokens that
it names, or the same exception on every rank.
"""

import functools

import oracle
import torch
import torch.distributed as dist
from odd_case import (
    INF,
    NAN,
    Case,
    N,
    V,
    at,
    bounds,
    divergence,
    entries,
    kept,
    linear,
    mirrored,
    moved,
    with_head,
)

import tp_headloss as hl


@functools.cache
def lines(dtype) -> dict[str, dict[str, Case]]:
    """A line of the table -> its cases by name, for logits of this type."""
    largest = torch.finfo(dtype).max
    random = (torch.randn(N, V, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    teacher = (torch.randn(N, V, generator=torch.Generator().manual_seed(4)) * 2).to(dtype)
    plain = torch.tensor([1, 40, 31, 32])
    first, second, everywhere = slice(0, V // 2), slice(V // 2, V), slice(None)

    def rows(x=random, labels=plain, **fields):
        return Case(x.to(dtype) if x.dtype == torch.float32 else x, labels)._replace(**fields)

    def edited(row, columns, value, x=random, **fields):
        x = x.clone()
        x[row, columns] = value
        return rows(x, **fields)

    def relabelled(label, **fields):
        labels = plain.clone()
        labels[2] = label
        return rows(labels=labels, **fields)

    def padded(value, vocab=50, **fields):
        return edited(
            everywhere, slice(vocab, V), value, **{"vocab": vocab, "labels": plain % vocab} | fields
        )

    def refused(raises, value=None, **fields):
        return rows(raises=raises, value=value, **fields)

    def sized(vocab, n=N, **fields):
        x = torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
        labels = torch.tensor([0, vocab - 1, vocab // 2, vocab // 4])[:n]
        return rows(**{"x": x, "labels": labels, "vocab": vocab} | fields)

    def temperatures(value):
        return {"temperature": torch.tensor([1.0, 0.5, value, 2.0])}

    def on_teacher(row, column, value):
        t = teacher.clone()
        t[row, column] = value
        return t

    def wrong_teacher(**fields):
        fields = {"logits": lambda here: here.part(teacher)} | fields
        return lambda here: {
            "want": ("forward_kl",),
            "teacher": hl.Teacher(**{k: x(here) if callable(x) else x for k, x in fields.items()}),
        }

    def wrong_entries(ids=torch.zeros(N, 2).long(), log_probs=torch.zeros(N, 2), **fields):  # noqa: B008
        return lambda here: {
            "want": ("topk_forward_kl",),
            "teacher": hl.TopKTeacher(
                here.to(ids), here.to(log_probs), **{k: here.to(x) for k, x in fields.items()}
            ),
        }

    def wrong_sets(*given):
        return lambda here: {"want": ("set_entropy",), "sets": hl.IdSets(*map(here.to, given))}

    def wrong_ids(ids):
        return lambda here: {"want": ("log_probs_at",), "ids": here.to(ids)}

    def sampled(here):  # of the likeliest id alone, whose log-prob is 0
        rule, positions = hl.SamplingRule(top_k=1), here.to(torch.arange(N))
        draw = hl.sample(
            here.x, seed=0, positions=positions, rule=rule, shard=here.shard, options=here.options
        )
        assert torch.equal(draw.ids == -1, draw.log_probs.isnan())
        assert torch.equal(draw.sets.spans.diff(dim=1)[:, 0], (draw.ids >= 0).long())
        return draw.log_probs

    drawn = {
        "value": sampled,
        "expected": lambda x, labels: 0 * x.sum(-1),
        "backwards": 0,
        "nan": (3,),
    }
    zeros, ones = torch.zeros(N), torch.ones(N)
    one_owner = {"nan": (2,), "sizes": (2, 4), "local": True}
    return {
        "no tokens: `[0, V]`, `[2, 0, 3, V]`": {
            "no tokens": sized(V, n=0),
            "a leading dimension of 0": sized(V, n=0, layout="[2, 0, 3]"),
            "no tokens, mean": sized(V, n=0, loss={}),
        },
        "one token, `[1, V]` or `[V]`": {
            "one token": sized(V, n=1),
            "logits of one dimension": sized(V, n=1, layout="[V]"),
        },
        "any vocabulary and any cut: V = 1, fewer ids than ranks, uneven and empty shards, ranks in any order": {
            "V = 1": sized(1),
            "V = 3": sized(3),
            "V = 5": sized(5),
            "V = 17": sized(17),
            "V = 65": sized(65),
            "uneven shards": rows(cut=bounds({1: [0, V], 2: [0, 7, V], 4: [0, 7, 30, 32, V]})),
            "empty shards": rows(cut=bounds({1: [0, V], 2: [0, 0, V], 4: [0, 40, 40, V, V]})),
            "shards in reverse": rows(cut=mirrored),
            "targets on shard edges": rows(labels=torch.tensor([0, 31, 32, 63])),
            "targets on other edges": rows(labels=torch.tensor([15, 16, 47, 48])),
        },
        "padding columns, whatever they hold; a shard of nothing else": {
            "NaN in the padding": padded(NAN),
            "+inf in the padding": padded(INF),
            "-inf in the padding": padded(-INF),
            "the largest number in the padding": padded(largest),
            "shards of padding": padded(NAN, vocab=10),
            "padding and label smoothing": padded(largest, loss={"label_smoothing": 0.1}),
            "padding and a softcap": padded(NAN, transform={"softcap": 3.0}),
        },
        "no shard: the whole vocabulary on every rank": {"no shard": rows(cut=lambda group: None)},
        "label = `ignore_index`, which may be any int64, a valid id included": {
            "one ignored": relabelled(-100, zero=(2,)),
            "all ignored": rows(labels=torch.full((N,), -100), zero=tuple(range(N))),
            "ignore_index is a valid id": rows(ignore_index=31, zero=(2,)),
            "ignore_index is a shard's first id": rows(ignore_index=32, zero=(3,)),
            "ignore_index is the id before": rows(ignore_index=15, labels=torch.tensor([1, 15, 31, 16]), zero=(1,)),
            "ignore_index is -1": relabelled(-1, ignore_index=-1, zero=(2,)),
            "ignore_index is V": relabelled(V, ignore_index=V, zero=(2,)),
            "ignore_index is 2^31 - 1": relabelled(2**31 - 1, ignore_index=2**31 - 1, zero=(2,)),
            "ignore_index is -2^63": relabelled(-(2**63), ignore_index=-(2**63), zero=(2,)),
            "int32 labels, ignore_index beyond int32": rows(labels=plain.int(), ignore_index=1 << 40),
            "NaN in an ignored row": edited(2, 5, NAN, labels=relabelled(-100).labels, zero=(2,)),
            "an ignored row all -inf": edited(2, everywhere, -INF, labels=relabelled(-100).labels, zero=(2,)),
            "NaN upstream on an ignored token": relabelled(-100, upstream="NaN at 2", zero=(2,)),
            "NaN weight on an ignored token": relabelled(-100, loss={"token_weight": zeros.index_fill(0, torch.tensor(2), NAN) + 1}),
            "temperature 0 on an ignored token": relabelled(-100, transform=temperatures(0.0), zero=(2,)),
            "ignored, with check": relabelled(-100, options={"check": True}, zero=(2,)),
            "-inf and ignored tokens, sum": edited(1, first, -INF, labels=relabelled(-100).labels, zero=(2,), options={"transport": "sum"}),
            "argmax of an ignored token": relabelled(-100, want=("log_prob", "argmax"), zero=(2,)),
        },
        "any other label outside of [0, V)": {
            "label V": relabelled(V, nan=(2,)),
            "label of a padding column": padded(0.5, labels=torch.tensor([1, 40, 55, 32]), nan=(2,)),
            "label -1": relabelled(-1, nan=(2,)),
            "label 2^31 - 1": relabelled(2**31 - 1, nan=(2,)),
            "label -2^31": relabelled(-(2**31), nan=(2,)),
            "label 2^40": relabelled(1 << 40, nan=(2,)),
            "label -2^40": relabelled(-(1 << 40), nan=(2,)),
            "int32 label 2^31 - 1": rows(labels=relabelled(2**31 - 1).labels.int(), nan=(2,)),
            "int32 label -2^31": rows(labels=relabelled(-(2**31)).labels.int(), nan=(2,)),
            "label V, all statistics": relabelled(V, nan=(2,), want=("log_prob", "lse", "target_logit", "entropy", "total", "argmax")),
        },
        "the same with `Options(check=True)`": {
            "label V + 3, with check": relabelled(V + 3, options={"check": True}, raises="ValueError: label of token 2 (flat index) must be the ignore_index or in [0, 64), got 67"),
            "label -1, with check": relabelled(-1, options={"check": True}, raises="ValueError: label of token 2 (flat index) must be the ignore_index or in [0, 64), got -1"),
        },
        "a label that no shard owns, or two (gaps and overlaps of explicit bounds); labels that differ between ranks in who owns them, or in being ignored": {
            "a gap between shards": rows(cut=moved(lambda a, b: (a, 31 if a <= 31 < b else b)), **one_owner),
            "shards that overlap": rows(cut=moved(lambda a, b: (30 if a == 32 else a, b)), **one_owner),
            "a label that two ranks claim": rows(labels_of=lambda y, r, p: y.index_fill(0, torch.tensor(2), 0 if r == 0 else 63), **one_owner),
            "a label that no rank claims": rows(labels_of=lambda y, r, p: y.index_fill(0, torch.tensor(2), 63 if r == 0 else 0), **one_owner),
            "ignored on one rank": rows(labels_of=lambda y, r, p: y.index_fill(0, torch.tensor(2), 31 if r else -100), **one_owner),
            "out of range on one rank": rows(labels_of=lambda y, r, p: y.index_fill(0, torch.tensor(2), 0 if r else V), **one_owner),
        },
        "these with `Options(check=True)`": {
            f"{name}, with check": case._replace(nan=(), options={"check": True}, raises="ValueError: label of token 2")
            for name, case in {
                "a gap between shards": rows(cut=moved(lambda a, b: (a, 31 if a <= 31 < b else b)), **one_owner),
                "a label that two ranks claim": rows(labels_of=lambda y, r, p: y.index_fill(0, torch.tensor(2), 0 if r == 0 else 63), **one_owner),
                "ignored on one rank": rows(labels_of=lambda y, r, p: y.index_fill(0, torch.tensor(2), 31 if r else -100), **one_owner),
            }.items()
        },
        "int32 labels": {"int32 labels": rows(labels=plain.int())},
        "labels of any other type": {
            **{f"{t} labels": refused(f"TypeError: labels must be int64 or int32, got torch.{t}", labels=plain.to(getattr(torch, t)))
               for t in ("float32", "uint8", "int8", "bool")},
        },
        "labels or logits of a shape that does not fit; no labels for a loss": {
            "one label too few": refused("ValueError: labels must have shape [4] to fit logits, got [3]", labels=plain[1:]),
            "labels of another shape": refused("ValueError: labels must have shape [4] to fit logits, got [2, 2]", labels=plain.view(2, 2)),
            "a scalar": refused("ValueError: logits must have a vocabulary dimension, got a scalar", lambda here: hl.vocab_statistics(here.x.sum(), shard=here.shard)),
            "no labels": refused("ValueError: labels are needed, got None", with_head(keywords={"labels": None})),
            "no labels to shift": refused("ValueError: labels are needed, got None", lambda here: hl.CausalLMLoss()(here.x, None, shard=here.shard)),
        },
        "-inf in some columns, or in all of a shard": {
            "first half -inf": edited(1, first, -INF),
            "second half -inf": edited(0, second, -INF),
            "first half -inf, every row": edited(everywhere, first, -INF, labels=torch.tensor([33, 40, 50, 32])),
            "last quarter -inf, every row": edited(everywhere, slice(48, V), -INF, labels=torch.tensor([33, 40, 0, 32])),
            "all but the target -inf": edited(2, [c for c in range(V) if c != 31], -INF),
            "-inf, entropy and total": edited(1, first, -INF, want=("log_prob", "entropy", "total"), upstream="all"),
            "-inf and label smoothing": edited(1, first, -INF, loss={"label_smoothing": 0.1}),
            "-inf, label smoothing and a shift": edited(1, first, -INF, x=(random.float() * 8).round() / 8 + 100.0, loss={"label_smoothing": 0.1, "reduction": "none"}),
        },
        "the target at -inf": {"target -inf": edited(2, 31, -INF), "target -inf, mean": edited(2, 31, -INF, loss={"reduction": "sum"})},
        "NaN or +inf in a row, or nothing above -inf": {
            "row all -inf": edited(2, everywhere, -INF, nan=(2,)),
            "+inf": edited(3, 5, INF, nan=(3,)),
            "+inf at the target": edited(3, 32, INF, nan=(3,)),
            "NaN on the first rank": edited(3, 5, NAN, nan=(3,)),
            "NaN on the last rank": edited(3, 50, NAN, nan=(3,)),
            "NaN at the target": edited(2, 31, NAN, nan=(2,)),
            "NaN and -inf only": rows(torch.full((N, V), -INF).index_fill(1, torch.tensor(7), NAN), nan=tuple(range(N))),
            "NaN, entropy and total": edited(3, 50, NAN, nan=(3,), want=("log_prob", "entropy", "total", "argmax")),
        },
        "NaN, or an infinity that makes NaN, in logits, hidden states, weight, bias or teacher of a valid token, nothing above -inf there, or a temperature that is not positive; NaN or any infinity, but -inf as a log-prob of other than the sampler (`old_log_prob`, `generator_log_prob`), in its inputs or token weight, with `Options(check=True)`": {
            "a sampled token of log-prob -inf, with check": refused("ValueError: input 'old_log_prob' of token 2 (flat index) is -inf, which no sampled token has", with_head(hl.PolicyGradient(), keywords={"inputs": lambda here: {"advantages": here.to(ones), "old_log_prob": here.to((-ones).index_fill(0, torch.tensor(2), -INF))}}), options={"check": True}),
            "NaN on the last rank, with check": edited(3, 50, NAN, options={"check": True}, raises="ValueError: logits of token 3 hold NaN"),
            "+inf, with check": edited(3, 5, INF, options={"check": True}, raises="ValueError: logits of token 3 hold inf"),
            "row all -inf, with check": edited(3, everywhere, -INF, options={"check": True}, raises="ValueError: logits of token 3 are all -inf"),
            "a teacher's row all -inf, with check": rows(**divergence(on_teacher(3, everywhere, -INF)), options={"check": True}, raises="ValueError: logits of the teacher of token 3 are all -inf"),
            "NaN in a teacher's row, with check": rows(**divergence(on_teacher(3, 40, NAN)), options={"check": True}, raises="ValueError: logits of the teacher of token 3 hold NaN"),
        },
        "these in a row that is sampled": {
            "NaN in a row, sampled": edited(3, 50, NAN)._replace(**drawn),
            "+inf in a row, sampled": edited(3, 5, INF)._replace(**drawn),
            "a row all -inf, sampled": edited(3, everywhere, -INF)._replace(**drawn),
        },
        "infinities under a softcap": {
            "+inf under a softcap": edited(3, 5, INF, transform={"softcap": 3.0}),
            "-inf under a softcap": edited(3, everywhere, -INF, transform={"softcap": 3.0}),
        },
        "finite logits of any size: large, shifted, equal, -0.0, denormal": {
            "nothing odd": rows(),
            "label smoothing": rows(loss={"label_smoothing": 0.1, "reduction": "none"}),
            "logits x 1e4": rows((random.float() * 1e4).clamp(-largest, largest)),
            "the largest numbers": rows(random.float().sign() * largest),
            "the largest numbers, entropy": rows(random.float().sign() * largest, want=("entropy",)),
            "the largest numbers, no labels": rows(
                random.float().sign() * largest,
                options={"check": False},  # it wants labels
                value=lambda here: hl.vocab_statistics(here.x, want=("entropy",), shard=here.shard, options=here.options).entropy,
                expected=lambda x, labels: oracle.statistics(x)["entropy"],
            ),
            "shift of 1e4": rows((random.float() * 8).round() / 8 + 1e4),
            "shift of -1e4": rows((random.float() * 8).round() / 8 - 1e4),
            "logits of 700, sum": edited(2, 5, 700.0, options={"transport": "sum"}, sizes=(2, 4)),
            "margin of 40": edited(2, 31, 45.0),
            "constant rows": rows(torch.full((N, V), 2.5), want=("log_prob", "lse", "entropy", "argmax")),
            "ties": rows(random.float().round().clamp(max=2), want=("log_prob", "argmax")),
            "-0.0 and 0.0": rows(torch.zeros(N, V).copysign(random.float()), want=("log_prob", "argmax")),
            "denormal numbers": rows(random.float() * torch.finfo(dtype).tiny / 4),
        },
        "any upstream gradient: 0, negative, a number, stride 0 or 2; none for some statistics; twice": {
            **{f"{kind} upstream": rows(upstream=kind, want=("log_prob", "lse"))
               for kind in ("zero", "-1", "0.37 of the sum", "expanded", "strided")},
            "upstream of every statistic": rows(upstream="all", want=("log_prob", "lse", "target_logit", "entropy", "total")),
            "two backwards": rows(backwards=2),
        },
        "an upstream gradient that is inf or NaN, or whose product is beyond the logits' type": {
            "upstream of 1e6": rows(upstream="1e6"),
            "upstream of 1e38": rows(upstream="1e38"),
            "inf upstream": rows(upstream="inf at 2"),
            "NaN upstream": rows(upstream="NaN at 2"),
        },
        "logits of any layout": {
            f"{layout} logits": rows(layout=layout)
            for layout in ("transposed", "column-strided", "sliced", "misaligned", "[S, B, V] transposed", "no one row stride")
        } | {"expanded logits": rows(random[:1].expand(N, V), layout="expanded")},
        "`inplace=True` for logits without one row stride, or whose elements share memory": {
            f"{layout} logits, in place": refused("ValueError: inplace=True needs logits whose leading dimensions form one row stride", layout=layout, options={"inplace": True}, local=True)
            for layout in ("expanded", "no one row stride")
        },
        "float64 logits": {
            "float64, torch backend": rows(random.double(), options={"backend": "torch"}),
            "float64, Triton backend": rows(random.double(), options={"backend": "triton"}, raises="TypeError: logits must be one of"),
        },
        "logits that are integers, bool, complex or float8": {
            f"{t} logits": rows((random > 0).to(getattr(torch, t)), raises="TypeError: logits must be one of")
            for t in ("int64", "int8", "bool", "complex64", "float8_e4m3fn")
        },
        "no valid token; weights that sum to 0; a denominator of 0": {
            "all ignored, mean": rows(labels=torch.full((N,), -100), loss={}),
            "all ignored, token weights": rows(labels=torch.full((N,), -100), loss={"token_weight": ones}),
            "all ignored, smoothing and class weights": rows(labels=torch.full((N,), -100), loss={"label_smoothing": 0.1, "class_weight": torch.rand(V)}),
            "token weights of 0": rows(loss={"token_weight": zeros}),
            "class weights of 0": rows(loss={"class_weight": torch.zeros(V)}),
            "class weight 0 of some labels": rows(loss={"class_weight": torch.ones(V).index_fill(0, plain[:3], 0.0)}),
            "denominator 0": rows(loss={"denominator": 0}),
            "denominator 0.0, a tensor": rows(loss={"denominator": torch.tensor(0.0)}),
        },
        "token weights that are bool, integers, negative": {
            "bool token weights": rows(loss={"token_weight": plain > 31}),
            "integer token weights": rows(loss={"token_weight": plain % 3}),
            "a negative token weight": rows(loss={"token_weight": ones.index_fill(0, torch.tensor(1), -0.5)}, options={"check": False}),
        },
        "a token weight of 0": {
            **{f"weight 0 of a {what} row, {how}": edited(2, 3, value, zero=(2,), loss={"token_weight": ones.index_fill(0, torch.tensor(2), 0.0), "reduction": how}) for what, value, how in (("NaN", NAN, "none"), ("+inf", INF, "none"), ("finite", 1.0, "none"), ("finite", 1.0, "mean"))},
        },
        "a term whose values are not per token; a statistic that nothing wants": {
            "a term that averages": refused("ValueError: term 'mine' must return a value per token, [4], got []", with_head(hl.Term("mine", lambda s: s.lse.mean()))),
            "entropy without want": refused("ValueError: term 'mine' uses the statistics ['entropy']", with_head(hl.Term("mine", lambda s: -s.entropy))),
        },
        "sequences with bounds out of order or beyond the tokens, lengths in the place of bounds, or lengths that cannot be (with `check=True`; without it everything is NaN on GPUs)": {
            **{f"bounds {bounds}": refused("ValueError: cu_seqlens must be ascending in [0, 4]", lambda here, bounds=bounds: hl.Sequences.from_cu_seqlens(torch.tensor(bounds, device=here.x.device), here.labels >= 0).check()) for bounds in ((0, 2, 9), (-1, 4), (0, 3, 2), (1, 3))},
        },
        "tokens in the mask of sequences that belong to no sequence, or whose label is ignored (with `check=True`, and beside `cu_seqlens` on CPUs; without it the former are left out, the latter count in lengths with a loss of 0)": {
            "counted tokens of no sequence": refused("ValueError: every token in the mask must belong to a sequence, got 3", lambda here: hl.Sequences.from_cu_seqlens(torch.tensor([1, 2], device=here.x.device), here.to(ones > 0)).check()),
            "counted tokens that are ignored": refused("ValueError: the mask of sequences must leave out tokens whose label is ignored (-100), got 1", with_head(reduction="seq-mean-token-mean", keywords={"labels": torch.tensor([1, 40, -100, 32]), "inputs": lambda here: {"sequences": hl.Sequences.from_cu_seqlens(torch.tensor([0, 4], device=here.x.device), here.to(ones > 0))}}), options={"check": True}),
        },
        "sparse and nested logits": {
            "sparse logits": refused("TypeError: logits must be a dense tensor, got torch.sparse_coo", lambda here: hl.vocab_statistics(here.x.detach().to_sparse(), here.labels, shard=here.shard, options=here.options)),
            "nested logits": refused("TypeError: logits must be a dense tensor, got a nested one", lambda here: hl.vocab_statistics(torch.nested.nested_tensor([here.x.detach()], layout=torch.jagged), here.labels, shard=here.shard, options=here.options), local=True),
        },
        "transforms of torch.func": {
            "torch.func.grad": refused("RuntimeError: tp_headloss does not support transforms of torch.func", lambda here: torch.func.grad(lambda x: hl.vocab_statistics(x, here.labels, shard=here.shard, options=here.options).lse.sum())(here.x.detach())),
        },
        "a second derivative: `create_graph=True` and a penalty, hessian, hvp": {
            "a gradient penalty": refused("RuntimeError: tp_headloss has first derivatives only", lambda here: torch.autograd.grad(torch.autograd.grad(hl.vocab_statistics(here.x, here.labels, shard=here.shard, options=here.options).log_prob.sum(), here.x, create_graph=True)[0].square().sum(), here.x)),
        },
        "NaN as the weight of a valid token, or in a denominator that is a tensor": {
            "NaN token weight": rows(loss={"token_weight": ones.index_fill(0, torch.tensor(1), NAN)}),
            "NaN denominator": rows(loss={"denominator": torch.tensor(NAN)}),
        },
        "weights, denominators and inputs that do not fit, and a denominator of NaN, a tensor's with `Options(check=True)`": {
            "token weights of another shape": refused("ValueError: token_weight must have shape [4] to fit labels, got [3]", with_head(keywords={"token_weight": ones[1:]})),
            "a denominator per token": refused("ValueError: denominator must have shape [], got [4]", with_head(keywords={"denominator": ones})),
            "a denominator of NaN": refused("ValueError: denominator must be at least 0 and a number that fp32 holds, got nan", with_head(keywords={"denominator": NAN})),
            "a denominator of NaN in a tensor, with check": refused("ValueError: denominator must be at least 0 and a number that fp32 holds, got nan", with_head(keywords={"denominator": torch.tensor(NAN)}), options={"check": True}),
            "a denominator of a sum": refused("ValueError: a denominator goes with a mean, got reduction='sum'", with_head(reduction="sum", keywords={"denominator": 3})),
            "class weights of a shard": refused("ValueError: class_weight must have shape [64]", lambda here: with_head(hl.CrossEntropy(class_weight=here.to(torch.ones(V // 2))))(here), local=True),
            "column weights of the vocabulary": refused("ValueError: total_weight must have shape", keywords=lambda here: {"want": ("total",), "total_weight": torch.ones(V + 1)}, local=True),
            "an input missing": refused("ValueError: inputs must be ['advantages', 'old_log_prob'] for these terms and metrics, got ['advantages']: missing ['old_log_prob']", with_head(hl.PolicyGradient("clip"), keywords={"inputs": lambda here: {"advantages": here.to(ones)}})),
            "an input too many": refused("ValueError: inputs must be [] for these terms and metrics, got ['advantages']", with_head(keywords={"inputs": lambda here: {"advantages": here.to(ones)}})),
            "an input of another shape": refused("ValueError: input 'advantages' must broadcast to the tokens [4] with as many dimensions, got [3]: a value for all tokens is []", with_head(hl.PolicyGradient("reinforce"), keywords={"inputs": lambda here: {"advantages": here.to(ones[:3])}})),
            "a denominator without a value": refused("ValueError: denominator must be on", with_head(keywords={"denominator": lambda here: torch.tensor(3.0, device="meta")})),
            "a reduction by sequence without sequences": refused("ValueError: reduction 'seq-mean-token-sum' needs the input 'sequences'", with_head(reduction="seq-mean-token-sum")),
            "sequences of other tokens": refused("ValueError: the input 'sequences' must be of tokens [4] like labels, got [2, 2]", with_head(reduction="seq-mean-token-sum", keywords={"inputs": lambda here: {"sequences": hl.Sequences.from_mask(here.to(ones > 0).view(2, 2))}})),
        },
        "inputs that are no tensors, or no `Sequences`; weights and denominators that are complex or no numbers": {
            "complex token weights": refused("TypeError: token_weight must be real numbers or bool, got torch.complex64", with_head(keywords={"token_weight": ones + 0j})),
            "a complex denominator": refused("TypeError: denominator must be real numbers, got torch.complex64", with_head(keywords={"denominator": torch.tensor(1j)})),
            "a denominator that is a string": refused("TypeError: denominator must be a number or a scalar tensor, got '3'", with_head(keywords={"denominator": "3"})),
            "an input that is a number": refused("TypeError: input 'advantages' must be a tensor, got float", with_head(hl.PolicyGradient("reinforce"), keywords={"inputs": {"advantages": 1.0}}), local=True),
            "sequences that are a mask": refused("TypeError: the input 'sequences' must be a Sequences, got Tensor", with_head(reduction="seq-mean-token-sum", keywords={"inputs": {"sequences": ones > 0}})),
        },
        "a temperature or softcap that is 0, negative, NaN, inf or beyond fp32; a scale that is 0, NaN, inf or beyond fp32": {
            **{f"temperature {t}": refused(f"ValueError: temperature must be positive and finite in fp32, got {t}", transform={"temperature": t}) for t in (0.0, -1.0, NAN, INF, 1e-38, 1e39)},
            **{f"softcap {t}": refused(f"ValueError: softcap must be positive and finite in fp32, got {t}", transform={"softcap": t}) for t in (0.0, -1.0, NAN, INF, 1e39)},
            **{f"scale {t}": refused(f"ValueError: scale must be other than 0 and finite in fp32, got {t}", transform={"scale": t}) for t in (0.0, NAN, INF, -1e39)},
        },
        "temperatures or a bias of another shape; a temperature that wants a gradient": {
            "too few temperatures": refused("ValueError: temperature must have shape [4] to fit logits, got [3]", transform={"temperature": ones[1:]}),
            "a scalar tensor as temperature": refused("ValueError: temperature must have shape [4] to fit logits, got []", transform={"temperature": torch.tensor(2.0)}),
            "a differentiable temperature": refused("ValueError: temperature gets no gradient: pass temperature.detach()", transform={"temperature": torch.ones(N, requires_grad=True)}),
            "bias too long": refused("ValueError: bias must have shape", keywords=lambda here: {"transform": hl.Transform(bias=here.to(torch.ones(V + 1)))}, local=True),
        },
        "a temperature of 0, below 0 or NaN for one token": {
            "temperature -1 for a token": rows(transform=temperatures(-1.0), nan=(2,)),
            "temperature 0 for a token": rows(transform=temperatures(0.0), nan=(2,)),
            "temperature NaN for a token": rows(transform=temperatures(NAN), nan=(2,)),
        },
        "a negative scale": {
            "scale -1": rows(transform={"scale": -1.0}),
        },
        "NaN, +inf or -inf in the bias": {
            "NaN in the bias": rows(transform={"bias": torch.zeros(V).index_fill(0, torch.tensor(40), NAN)}, nan=tuple(range(N))),
            "+inf in the bias": rows(transform={"bias": torch.zeros(V).index_fill(0, torch.tensor(3), INF)}, nan=tuple(range(N))),
            "-inf in the bias": rows(transform={"bias": torch.zeros(V).index_fill(0, torch.tensor([3, 45]), -INF)}),
        },
        "logits or weights whose width does not fit the shard (gathered ones, say)": {
            "gathered logits": refused("ValueError: logits must have the shard's", lambda here: hl.vocab_statistics(here.to(random), here.labels, shard=here.shard), words="(these look like gathered columns; if they are one rank's, vocab_size is that of all ranks,", sizes=(2, 4), local=True),
            "a gathered weight": refused("ValueError: weight must have the shard's", lambda here: hl.HeadLoss().linear(here.to(torch.ones(N, 8)), here.to(torch.ones(V, 8)), here.labels, shard=here.shard), words="(these look like gathered rows; if they are one rank's, vocab_size is that of all ranks,", sizes=(2, 4), local=True),
            "a column too few": refused("ValueError: logits must have the shard's", lambda here: hl.vocab_statistics(here.x[:, 1:], here.labels, shard=here.shard), local=True),
            "no columns": refused("ValueError: logits must have the shard's", lambda here: hl.vocab_statistics(here.x[:, :0], here.labels, shard=here.shard), local=True),
            "a row too many": refused("ValueError: weight must have the shard's", linear(extra_rows=1), words="(a padded vocabulary? VocabShard.from_group(group, 64, padded_size=", local=True),
            "hidden states of another width": refused("ValueError: weight must have shape [", linear(hidden=9)),
        },
        "bounds that cannot be a shard's; a group that this rank is not in": {
            "a part at one rank": refused("ValueError: one rank alone must own the whole vocabulary", lambda here: hl.VocabShard(0, 32, V)),
            "stop before start": refused("ValueError: a shard needs 0 <= start <= stop, got [5, 3)", lambda here: hl.VocabShard(5, 3, V)),
            "a negative start": refused("ValueError: start must be at least 0, got -1", lambda here: hl.VocabShard(-1, V, V)),
            "no vocabulary": refused("ValueError: vocab_size must be at least 1, got 0", lambda here: hl.VocabShard(0, 0, 0)),
            "fewer rows than ids": refused("ValueError: padded_size must be at least vocab_size = 64, got 60", lambda here: hl.VocabShard.from_group(None, V, 60)),
            "boundaries that descend": refused("ValueError: boundaries must be 2 ascending ids from 0 to at least 64, got [64, 0]", lambda here: hl.VocabShard.from_boundaries([64, 0], V)),
            "a foreign group": refused("ValueError: this rank must be a member of group, got torch's GroupMember.NON_GROUP_MEMBER", cut=lambda group: hl.VocabShard.from_group(dist.GroupMember.NON_GROUP_MEMBER, V)),
        },
        "options, statistics, terms, metrics and reductions that do not exist, or not together; more entries than ids (`topk_log_probs`, `TopKAccuracy`)": {
            "unknown backend": refused("ValueError: backend must be one of ('torch', 'triton'), got 'cuda'", options={"backend": "cuda"}),
            "unknown transport": refused("ValueError: transport must be one of", options={"transport": "nvlink"}),
            "symmetric memory without Triton": refused("ValueError: transport='symm_mem' needs the triton backend on CUDA, got 'torch'", options={"transport": "symm_mem", "backend": "torch"}, local=True),
            "the sum of argmax": refused("ValueError: argmax, which the metric 'accuracy' reads, is not a sum", want=("argmax",), options={"transport": "sum"}),
            "unknown statistic": refused("ValueError: want must be of", keywords=lambda here: {"want": ("perplexity",)}),
            "weights of a total that nobody wants": refused('ValueError: total_weight weights the statistic "total", which is not in want', keywords=lambda here: {"total_weight": here.part(torch.ones(V))}),
            "no terms": refused("ValueError: terms must be at least one, with distinct names, got []", lambda here: hl.HeadLoss([])),
            "terms of one name": refused("ValueError: terms must be at least one, with distinct names, got ['z_loss', 'z_loss']", lambda here: hl.HeadLoss([hl.ZLoss(1.0), hl.ZLoss(2.0)])),
            "unknown metric": refused("ValueError: metrics must be of", lambda here: hl.HeadLoss(metrics=("unknown",))),
            "unknown reduction": refused("ValueError: reduction must be one of", lambda here: hl.HeadLoss(reduction="avg")),
            "label smoothing NaN": refused("ValueError: label_smoothing must be in [0, 1], got nan", lambda here: hl.CrossEntropy(label_smoothing=NAN)),
            "k = 0": refused("ValueError: k must be at least 1, got 0", lambda here: hl.topk_log_probs(here.x, 0, shard=here.shard)),
            "k = V + 1": refused("ValueError: k must be in [1, 64], got 65", lambda here: hl.topk_log_probs(here.x, V + 1, shard=here.shard)),
            "a top_k of 0 of a rule": refused("ValueError: top_k must be at least 1, got 0", lambda here: hl.SamplingRule(top_k=0)),
            "top_p NaN": refused("ValueError: top_p must be in (0, 1], got nan", lambda here: hl.topk_log_probs(here.x, 3, top_p=NAN, shard=here.shard)),
        },
        "settings of another type: text for a number, a size for a shard, a layer for a weight; logits and labels that are swapped": {
            "label smoothing that is text": refused("TypeError: label_smoothing must be a number, got '0.1'", lambda here: hl.CrossEntropy(label_smoothing="0.1")),
            "a budget that is text": refused("TypeError: budget must be a number, got '64MB'", lambda here: hl.Linear(budget="64MB")),
            "a flag that is text": refused("TypeError: main_grad must be True or False, got 'yes'", lambda here: hl.Linear(main_grad="yes")),
            "a k that is text": refused("TypeError: k must be an int, got '3'", lambda here: hl.topk_log_probs(here.x, "3", shard=here.shard)),
            "a vocabulary size for a shard": refused("TypeError: shard must be a VocabShard, got int", lambda here: hl.VocabParallelHead(8, V)),
            "a layer for a weight": refused("TypeError: weight must be a tensor, got Linear: pass its .weight", lambda here: hl.HeadLoss().linear(here.x, torch.nn.Linear(8, V), here.labels, shard=here.shard)),
            "a class for a term": refused("TypeError: terms must be Terms, got CrossEntropy: call it, CrossEntropy(..)", lambda here: hl.HeadLoss(hl.CrossEntropy)),
            "a string as want": refused("TypeError: want must be a tuple of names", keywords=lambda here: {"want": "entropy"}),
            "logits and labels swapped": refused("TypeError: labels must be int64 or int32, got torch.", lambda here: hl.HeadLoss()(here.labels, here.x), words="(are logits and labels swapped?)"),
        },
        "an `ignore_index` beyond int64": {"ignore_index 2^63": refused(f"ValueError: ignore_index must be in the range of int64, got {1 << 63}", ignore_index=1 << 63)},
        "a temperature that is no number; a complex temperature, bias or column weight": {
            "temperature None": refused("TypeError: temperature must be positive and finite in fp32, or a tensor of real numbers, got None", transform={"temperature": None}),
            "a temperature that is a string": refused("TypeError: temperature must be positive and finite in fp32, or a tensor of real numbers, got '1'", transform={"temperature": "1"}),

            "complex temperatures": refused("TypeError: temperature must be real numbers, got torch.complex64", transform={"temperature": ones.cfloat()}),
            "a complex bias": refused("TypeError: bias must be floating point, got torch.complex64", transform={"bias": torch.ones(V).cfloat()}),
            "complex column weights": refused("TypeError: total_weight must be real numbers, got torch.complex64", keywords=lambda here: {"want": ("total",), "total_weight": here.part(torch.ones(V).cfloat())}),
        },
        "an `ignore_index` that is no integer": {
            f"ignore_index {i}": refused(f"TypeError: ignore_index must be an int, got {i}", ignore_index=i) for i in (None, -100.0)
        },
        "NaN or +inf in a teacher's row, or nothing above -inf": {
            "NaN in a teacher's row": rows(**divergence(on_teacher(3, 40, NAN)), nan=(3,)),
            "+inf in a teacher's row": rows(**divergence(on_teacher(3, 5, INF)), nan=(3,)),
            "a teacher's row all -inf": rows(**divergence(on_teacher(3, everywhere, -INF)), nan=(3,)),
            "a teacher's row all -inf, reverse KL": rows(**divergence(on_teacher(3, everywhere, -INF), "reverse_kl"), nan=(3,)),
            "a bad teacher of an ignored token": relabelled(-100, **divergence(on_teacher(2, 5, NAN)), zero=(2,)),
        },
        "a probability of 0 on either side of a KL": {
            "the teacher's is 0": rows(**divergence(on_teacher(3, first, -INF))),
            "the student's is 0, reverse KL": edited(3, first, -INF, **divergence(teacher, "reverse_kl")),
            "both are 0": edited(3, first, -INF, **divergence(on_teacher(3, first, -INF))),
            "the student's is 0": edited(3, 5, -INF, **divergence(teacher)),
        },
        "entries of a top-K teacher that are none (a negative id, a log-prob of -inf, False in the mask); one id in several": {
            "entries": rows(**entries([3, 40, 63], [-1.0, -2.0, -0.7])),
            "negative ids": rows(**entries([3, -1, 63, -5], [-1.0, -2.0, -0.7, NAN])),
            "log-probs of -inf": rows(**entries([3, 40, 63], [-1.0, -INF, -0.7])),
            "masked entries": rows(**entries([3, 40, 99], [-1.0, -2.0, NAN], [True, True, False])),
            "no entry": rows(**entries([-1, -1], [-1.0, -2.0])),
            "one id in several entries": rows(**entries([3, 40, 3], [-1.0, -2.0, -1.5])),
        },
        "probabilities in the place of an input of log-probs or of logits, a softmax or log-softmax of each rank's own columns in the place of the latter, logits in the place of the log-probs of a top-K teacher, a tail that is not that of its entries, or an entry as in the next row, with `Options(check=True)`": {
            "a teacher's probabilities, with check": refused("ValueError: teacher.logits must be logits or log-probs, got probabilities, not negative and with a sum of at most 1 at each of 4 valid tokens", keywords=wrong_teacher(logits=lambda here: here.part(teacher.softmax(-1))), options={"check": True}),
            "probabilities for log-probs, with check": refused("ValueError: input 'old_log_prob' of token 0 (flat index) holds 0.5", with_head(hl.PolicyGradient(), keywords={"inputs": lambda here: {"advantages": here.to(ones), "old_log_prob": here.to(ones) / 2}}), options={"check": True}),
            "logits for log-probs, with check": rows(**entries([3, 40], [2.0, -1.0]), options={"check": True}, raises="ValueError: teacher.log_probs of token 0 (flat index) must be log-probs"),
            "an entry's id is V, with check": rows(**entries([3, V], [-1.0, -2.0]), options={"check": True}, raises="ValueError: teacher.ids of token 0 (flat index) must be below 64, got [3, 64]"),
            "NaN in an entry, with check": rows(**entries([3, 40], [-1.0, NAN]), options={"check": True}, raises="ValueError: teacher.log_probs of token 0"),
        },
        "an entry with an id at or beyond the vocabulary, NaN or +inf": {
            "an entry's id is V": rows(**entries([3, V], [-1.0, -2.0], nan=tuple(range(N)), nan_columns=slice(0, 1))),
            "NaN in an entry": rows(**entries([3, 40], [-1.0, NAN], nan=tuple(range(N)), nan_columns=slice(0, 1))),
            "+inf in an entry": rows(**entries([3, 40], [-1.0, INF], nan=tuple(range(N)), nan_columns=slice(0, 1))),
        },
        "a set of ids with some that are none (negative, False in the mask), in another order, or several times": {
            "a set": rows(**kept([1, 3, 31, 32, 40])),
            "negative ids in a set": rows(**kept([-1, 40, 32, -9, 31, 1, 3])),
            "masked ids in a set": rows(**kept([40, 32, V + 5, 1, 3, 31], [True, True, False, True, True, True])),
            "one id several times in a set": rows(**kept([40, 3, 32, 1, 3, 3, 31, 40])),
            "a set of the whole vocabulary": rows(**kept(list(range(V)))),
            "a bad set of an ignored token": relabelled(-100, zero=(2,), **kept([1, 40, V, 32], offsets=[0, 1, 2, 3, 4], expected=lambda x, labels: 0 * x.sum(-1))),
        },
        "a set that is empty, lacks the label, or holds an id at or beyond the vocabulary; on GPUs, offsets that descend or leave the ids": {
            "an empty set": rows(**kept([-1, -2], nan=tuple(range(N)))),
            "sets of no ids": rows(**kept([[]] * N, nan=tuple(range(N)), expected=lambda x, labels: x.sum(-1))),
            "a set without the label": rows(**kept([1, 3, 32, 40], nan=(2,), nan_columns=everywhere)),
            "an id of a set is V": rows(**kept([1, 31, 32, 40, V], nan=tuple(range(N)))),
            "offsets that descend or leave the ids": rows(**kept([1, 40, 31, 32], offsets=[0, 9, 2, 1, 0], nan=tuple(range(N)))),
            "a set without the label, with check": refused("ValueError: the set of token 2 (flat index) must hold ids below 64 and its label 31, got [1, 3, 32, 40]; 1 such tokens", options={"check": True}, **kept([1, 3, 32, 40])),
        },
        "a negative id, and one at or beyond the vocabulary, among those whose log-probs are asked for": {
            "log-probs at ids, one several times": rows(**at([3, 40, 3, 31])),
            "log-probs at negative ids": rows(**at([3, -1, 40, -9])),
            "a log-prob at id V": rows(**at([V], nan=tuple(range(N)))),
            "a log-prob at id V, with check": refused("ValueError: ids of token 0 (flat index) must be below 64, got [64]; 4 such tokens", options={"check": True}, **at([V])),
        },
        "sets of other tokens or another type, not wanted or missing; on CPUs, offsets that do not ascend from 0 to the number of ids": {
            "sets of other tokens": refused("ValueError: sets.ids must have shape [4, K] to fit logits, got [3, 2]", keywords=wrong_sets(torch.zeros(3, 2).long())),
            "sets of one dimension": refused("ValueError: sets.ids must have shape [4, K] to fit logits, got [4]", keywords=wrong_sets(torch.zeros(4).long())),
            "offsets of other tokens": refused("ValueError: sets must be of tokens [4], or these flat, got [2]", keywords=lambda here: {"want": ("set_entropy",), "sets": hl.IdSets.from_csr(here.labels, here.to(torch.tensor([0, 2, N])))}),
            "offsets on a CPU that descend": refused("ValueError: offsets must be ascending from 0 to 4, so that each id is in one set, got [0, 3, 2, 4]", keywords=lambda here: {"want": ("set_entropy",), "sets": hl.IdSets.from_csr(torch.zeros(4).long(), torch.tensor([0, 3, 2, 4]))}),
            "float ids in a set": refused("TypeError: sets.ids must be int64 or int32, got torch.float32", keywords=wrong_sets(torch.zeros(N, 2))),
            "a mask of numbers": refused("TypeError: sets.mask must be bool, got torch.int64", keywords=wrong_sets(torch.zeros(N, 2).long(), torch.ones(N, 2).long())),
            "a tensor as sets": refused("TypeError: sets must be an IdSets, got Tensor", keywords=lambda here: {"want": ("set_entropy",), "sets": here.labels}),
            "sets that nobody wants": refused("ValueError: sets serve the statistics", keywords=lambda here: {"sets": hl.IdSets(here.labels[:, None])}),
            "a rank without labels": refused("ValueError: rank is that of a label, got no labels", value=lambda here: hl.vocab_statistics(here.x, shard=here.shard, want=("rank",), options=here.options).lse),
            "no sets": refused("ValueError: ['set_entropy'] need sets of ids, got none", keywords=lambda here: {"want": ("set_entropy",)}),
        },
        "ids whose log-probs are asked for: of other tokens or another type, not wanted or missing": {
            "ids of other tokens": refused("ValueError: ids must have shape [4, K] to fit logits, got [3, 2]", keywords=wrong_ids(torch.zeros(3, 2).long())),
            "one id per token without a dimension of its own": refused("ValueError: ids must have shape [4, K] to fit logits, got [4]", keywords=wrong_ids(torch.zeros(4).long())),
            "float ids to be asked for": refused("TypeError: ids must be int64 or int32, got torch.float32", keywords=wrong_ids(torch.zeros(N, 2))),
            "sets as ids": refused("TypeError: ids must be a tensor, got IdSets", keywords=lambda here: {"want": ("log_probs_at",), "ids": hl.IdSets(here.labels[:, None])}),
            "ids that nobody wants": refused("ValueError: ids serve the statistics ('log_probs_at',), got none of them in want", keywords=lambda here: {"ids": here.labels[:, None]}),
            "no ids": refused("ValueError: ['log_probs_at'] need ids [.., K], got none", keywords=lambda here: {"want": ("log_probs_at",)}),
        },
        "a teacher of another shape, without entries, at a temperature or beta that cannot be, not wanted or missing; for a `HeadLoss` a beta that nothing reads": {
            "a beta and no jsd": refused("ValueError: teacher.beta is read by Distillation(divergence='jsd')", with_head(hl.Distillation(), keywords={"inputs": lambda here: {"teacher": hl.Teacher(here.x, beta=0.1)}})),
            "a teacher of other tokens": refused("ValueError: teacher.logits must have shape", keywords=wrong_teacher(logits=lambda here: here.part(teacher[1:])), local=True),
            "a gathered teacher": refused("ValueError: teacher.logits must have shape", keywords=wrong_teacher(logits=lambda here: here.to(teacher)), sizes=(2, 4), local=True),
            "a teacher's temperature 0": refused("ValueError: teacher.temperature must be positive and finite in fp32, got 0", keywords=wrong_teacher(temperature=0)),
            "a student's temperature NaN": refused("ValueError: teacher.student_temperature must be positive and finite in fp32, got nan", keywords=wrong_teacher(student_temperature=NAN)),
            "beta 1": refused("ValueError: teacher.beta must be in (0, 1), got 1.0", keywords=wrong_teacher(beta=1.0)),
            "a teacher and no divergence": refused("ValueError: a Teacher serves the statistics", keywords=lambda here: {"teacher": hl.Teacher(here.x)}),
            "a divergence and no teacher": refused("ValueError: ['forward_kl'] need a teacher, got none", keywords=lambda here: {"want": ("forward_kl",)}),
            "a distillation term and no teacher": refused("ValueError: inputs must be ['teacher'] for these terms and metrics, got []", with_head(hl.Distillation())),
            "K = 0": refused("ValueError: teacher.ids must be [.., K] with K > 0, got [4, 0]", keywords=wrong_entries(torch.zeros(N, 0).long(), torch.zeros(N, 0))),
            "other log-probs than ids": refused("ValueError: teacher.log_probs must have shape [4, 2] to fit teacher.ids, got [4, 3]", keywords=wrong_entries(log_probs=torch.zeros(N, 3))),
            "a tail that was renormalised away": refused("ValueError: renormalize=True leaves no tail, got a tail_log_prob", keywords=wrong_entries(tail_log_prob=zeros)),
            "a temperature of the entries with a tail": refused("ValueError: a temperature of 2.0 needs renormalize=True", keywords=wrong_entries(temperature=2.0, renormalize=False)),
        },
        "a teacher of another type": {
            "a tensor as teacher": refused("TypeError: teacher must be `Teacher`, or `TopKTeacher`, or `TeacherHead`, or None, got Tensor", keywords=lambda here: {"want": ("forward_kl",), "teacher": here.x}),
            "an integer teacher": refused("TypeError: teacher.logits must be floating point, got torch.int64", keywords=wrong_teacher(logits=lambda here: here.part(teacher).long())),
            "float ids": refused("TypeError: teacher.ids must be int64 or int32, got torch.float32", keywords=wrong_entries(ids=torch.zeros(N, 2))),
            "an integer mask": refused("TypeError: teacher.mask must be bool, got torch.int64", keywords=wrong_entries(mask=torch.ones(N, 2).long())),
        },
        "a linear head without `main_grad`, with two biases, without room, in place": {
            "no main_grad": refused("ValueError: main_grad=True needs weight.main_grad, fp32, contiguous", linear(linear=hl.Linear(main_grad=True)), local=True),
            "two biases": refused("ValueError: bias was given twice", linear(bias=lambda here: here.part(torch.ones(V)), transform=lambda here: hl.Transform(bias=here.part(torch.ones(V))))),
            "a budget of 0": refused("ValueError: budget must be a positive number of bytes, got 0", lambda here: hl.Linear(budget=0)),
            "in place, without logits": refused("ValueError: inplace=True overwrites logits", linear(options=hl.Options(inplace=True))),
            "one sweep of statistics": refused("ValueError: mode='one_sweep' computes the gradient of a HeadLoss", linear(linear=hl.Linear("one_sweep"))),
        },
    }  # fmt: skip


CASES = {
    name: line for line, cases in lines(torch.float32).items() for name in cases
}  # case -> line


def case_of(name, dtype) -> Case:
    return lines(dtype)[CASES[name]][name]
