"""Hypothesis strategies: one whole case of a head loss, as plain values that shrink, print and can
be typed again.

Tensors follow from the case and its seed (`generated_case.build`), so that parent and ranks make
the same ones.
"""

import ast
import functools
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from known import PLAIN

from tp_headloss.statistics import AT_IDS, FAMILIES, FULL_TEACHER, OVER_SETS, TOPK_TEACHER

# Hypothesis mixes in numbers from the source of whatever modules happen to be loaded. Without them,
# examples follow from the seed alone, whichever tests ran before. (No setting does this; a name
# that is gone would change nothing.)
# change nothing.)
providers._get_local_constants = providers.Constants

DRAWN = {*PLAIN, *FULL_TEACHER, *TOPK_TEACHER, *OVER_SETS, *AT_IDS, "rank"}
DIFFERENTIABLE = tuple(name for family in FAMILIES for name in family.gradients)
LAYOUTS = ("contiguous", "transposed", "columns", "sliced", "misaligned", "expanded")
DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jsd", "total_variation")
TOPK_DIVERGENCES = tuple(
    (d, o) for d in ("forward_kl", "reverse_kl", "jsd") for o in ("topk", "vocabulary", "tail")
)
OBJECTIVES = ("reinforce", "clip", "dual clip", "cispo", "sapo")
BOOLEANS = st.booleans()


class Case(NamedTuple):
    seed: int  # of all random numbers
    # a HeadLoss of `terms`; else the statistics `want` with upstream gradients of `upstream`
    head: bool
    backend: str
    dtype: str
    transport: str
    vocab_size: int
    rows: int
    shards: str  # how the VocabShard is made
    cuts: tuple  # of the padded vocabulary, one more than ranks
    order: tuple  # rank r owns the order[r]-th piece
    lead: str  # leading shape of the logits
    layout: str  # of a rank's logits in memory
    labels: str | None  # dtype
    ignore_index: int
    label_edits: tuple  # (row, label)
    edits: tuple  # (what, row, number): special values
    bias: bool
    scale: float
    softcap: float | None
    temperature: float | str  # "tokens": one each
    want: tuple
    upstream: tuple
    upstream_kind: str
    weighted_total: bool
    teacher: str | None
    teacher_temperature: float | str
    student_temperature: float | str | None
    renormalize: bool
    entries: int
    # how sets of ids are written; terms of policies and entropies are over them then
    sets: str | None
    given_ids: bool  # whether log-probs of given ids are asked for
    terms: tuple  # (name, weight, option)
    reduction: str
    token_weight: bool
    denominator: float | None


def parse_case(text: str) -> Case:
    """A case from its repr."""
    fields = ast.parse(text, mode="eval").body.keywords
    return Case(**{field.arg: ast.literal_eval(field.value) for field in fields})


@functools.lru_cache(maxsize=None, typed=True)
def _one_of(*values):
    return st.sampled_from(values)


def one_of(values):
    """A strategy of one of the values. Each is made once: making one takes longer than drawing."""
    return _one_of(*values)


@functools.cache
def integers(low, high):
    return st.integers(low, high)


@functools.cache
def _subsets(values, min_size):
    chosen = st.lists(one_of(values), unique=True, min_size=min_size)
    return chosen.map(lambda names: tuple(sorted(names)))


def subsets(values, min_size=0):
    return _subsets(tuple(values), min_size)


@st.composite
def shardings(draw, vocab_size, world_size):
    """-> how, cuts, order."""
    kind = draw(one_of(["even", "padded", "boundaries", "explicit"]))
    padded = vocab_size + (0 if kind == "even" else draw(integers(0, 9)))
    step = -(-padded // world_size)
    cuts = [min(r * step, padded) for r in range(world_size + 1)]
    order = list(range(world_size))
    if kind in ("boundaries", "explicit"):
        inner = draw(
            st.lists(integers(0, padded), min_size=world_size - 1, max_size=world_size - 1)
        )
        cuts = [0, *sorted(inner), padded]
    if kind == "explicit":
        order = draw(st.permutations(order))
    return kind, tuple(cuts), tuple(order)


@st.composite
def terms_of(draw, teacher, weighted):
    terms = []
    weights, of_penalties = one_of([1.0, 0.3, -0.5]), one_of([1.0, 0.3])
    if draw(BOOLEANS) or not (teacher or weighted):
        smoothing = draw(one_of([0.0, 0.0, 0.1, 1.0]))
        formula = draw(one_of(["torch", "megatron"]))
        terms.append(("cross_entropy", draw(weights), (smoothing, formula, weighted)))
    for name in draw(subsets(["z_loss", "entropy"])):
        terms.append((name, draw(weights if name == "entropy" else of_penalties), None))
    if draw(BOOLEANS):
        terms.append(("policy", draw(weights), draw(one_of(OBJECTIVES))))
    if draw(BOOLEANS):
        terms.append(("kl", draw(of_penalties), draw(one_of(["k1", "k2", "k3"]))))
    if teacher == "whole":
        terms.append(
            (
                "distillation",
                draw(of_penalties),
                (draw(one_of(DIVERGENCES)), draw(BOOLEANS)),
            )
        )
    if teacher == "topk":
        terms.append(
            ("topk", draw(of_penalties), (*draw(one_of(TOPK_DIVERGENCES)), draw(BOOLEANS)))
        )
    return tuple(terms or [("z_loss", 1.0, None)])


EDITS = (
    "-inf", "-inf shard", "-inf row", "-inf others", "-inf target", "nan", "+inf", "x1e4", "confident", "shift", "far",
    "tie",
)  # fmt: skip


@st.composite
def cases(draw, world_size, backend):
    head = draw(BOOLEANS)
    small = integers(1, 24)
    vocab_size = draw(small if backend == "triton" else small | integers(25, 300))
    rows = draw(one_of([1, 2, 3, 0] if backend == "triton" else [2, 3, 4, 6, 8, 1, 0]))
    dtype = draw(one_of(["float32", "bfloat16", "float16"] + ["float64"] * (backend == "torch")))
    shards, cuts, order = draw(shardings(vocab_size, world_size))
    transport = draw(one_of(["auto", "gather", "sum"]))
    teacher = draw(one_of([None, None, "whole", "topk"]))
    want = draw(subsets(PLAIN))
    if transport == "sum":
        want = tuple(name for name in want if name != "argmax")
    if teacher and not head:
        want += draw(subsets(FULL_TEACHER if teacher == "whole" else TOPK_TEACHER, min_size=1))
    labels = draw(one_of(["int64", "int32"])) if head or draw(integers(0, 3)) else None
    ids = [-100, -1, 0, vocab_size - 1, vocab_size, cuts[1], max(cuts[1] - 1, 0), 2**31 - 1]
    ignore_index = draw(one_of([*ids[:1] * 4, *ids, 1 << 40]))
    inside = 2**31 - 1 if labels == "int32" else 1 << 40
    bad = [ignore_index] * 3 + [vocab_size, -1, -inside, inside, vocab_size - 1, 0, cuts[1]]
    bad = [label for label in bad if labels != "int32" or abs(label) < 2**31]
    sets = draw(one_of([None, "padded", "ragged"]))
    given_ids = not head and draw(BOOLEANS)
    if given_ids:
        want += AT_IDS
    if sets and not head:
        want += draw(subsets(OVER_SETS if labels else OVER_SETS[1:], min_size=1))
    if labels and draw(BOOLEANS):
        want += ("rank",)
    at = integers(0, max(rows - 1, 0))
    softcap = draw(one_of([None, None, 3.0, 30.0]))
    numbers = one_of([1.0, 1.0, 0.6, 2.5, "tokens"])
    edits = [what for what in EDITS if not (teacher and what.startswith("-inf") and softcap)]
    renormalize = draw(BOOLEANS)
    weighted = draw(BOOLEANS)
    terms = draw(terms_of(teacher, weighted)) if head else ()
    if vocab_size == 1:  # Megatron's smoothing spreads over the others
        terms = tuple(
            (n, w, (o[0], "torch", o[2]) if n == "cross_entropy" else o) for n, w, o in terms
        )
    if any(name == "topk" for name, *_ in terms):
        renormalize = (
            next(option[1] for name, _, option in terms if name == "topk") != "tail" and renormalize
        )
    reduction = draw(one_of(["none", "sum", "mean"]))
    if head and not any(name in ("policy", "kl", "entropy") for name, *_ in terms):
        sets = None
    names = (
        ["lse"]
        + ["log_prob", "target_logit"] * (labels is not None)
        + [n for n in want if n in DIFFERENTIABLE]
    )
    return Case(
        seed=draw(integers(0, 999)), head=head, backend=backend, dtype=dtype, transport=transport,
        vocab_size=vocab_size, rows=rows, shards=shards, cuts=cuts, order=order,
        lead=draw(one_of(["flat", "batch", "sequence"])), layout=draw(one_of(LAYOUTS)), labels=labels,
        ignore_index=ignore_index, label_edits=tuple(draw(st.lists(st.tuples(at, one_of(bad)), max_size=2))),
        edits=tuple(draw(st.lists(st.tuples(one_of(edits), at, integers(0, 60)), max_size=3))),
        bias=draw(BOOLEANS), scale=draw(one_of([1.0, 1.0, 0.7, -1.3])), softcap=softcap,
        temperature=draw(numbers), want=want, upstream=draw(subsets(names, min_size=1)),
        upstream_kind=draw(one_of(["random", "strided", "expanded", "zero", "nan where ignored"])),
        weighted_total=draw(BOOLEANS) and "total" in want, teacher=teacher,
        teacher_temperature=draw(numbers) if renormalize or teacher != "topk" else 1.0,
        student_temperature=draw(st.none() | numbers), renormalize=renormalize,
        entries=draw(integers(1, vocab_size + 2)), sets=sets, given_ids=given_ids, terms=terms, reduction=reduction,
        token_weight=draw(BOOLEANS),
        denominator=draw(one_of([None, None, 7.0, 0.0])) if reduction == "mean" else None,
    )  # fmt: skip
