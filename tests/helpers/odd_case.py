"""Cases, the form of every odd input, and the values that a case may ask for."""

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch

import tp_headloss as hl
from tp_headloss.arguments import id_sets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
V, N = 64, 4
INF, NAN = float("inf"), float("nan")


class Here(NamedTuple):
    """What a call has on this rank."""

    x: torch.Tensor  # this rank's logits
    labels: torch.Tensor
    shard: hl.VocabShard
    case: "Case"
    backend: str

    @property
    def options(self):
        return hl.Options(**{"backend": self.backend} | self.case.options)

    def to(self, x):
        return x.to(self.x.device) if isinstance(x, torch.Tensor) else x

    def part(self, x):
        return self.to(x[..., self.shard.start : self.shard.stop])


class Case(NamedTuple):
    x: torch.Tensor  # [N, columns] the whole rows, padding at their end included
    labels: torch.Tensor  # [N]
    nan: tuple = ()  # tokens that must be NaN, in value and gradient
    nan_columns: slice = slice(None)  # where their gradient is; it is 0 elsewhere
    zero: tuple = ()  # tokens that must be 0
    raises: str = ""  # or how the exception begins
    words: str = ""  # and something else that it says
    local: bool = False  # its message has numbers of this rank (bounds, a label)
    sizes: tuple = (1, 2, 4)  # of the group
    vocab: int = V
    ignore_index: int = -100
    layout: str = "contiguous"
    upstream: str = "random"
    backwards: int = 1
    # the statistics that are compared, the first one differentiated (all: "all upstream")
    want: tuple = ("log_prob",)
    transform: dict = {}  # noqa: RUF012 (of `Transform` and of `oracle.transform`)
    keywords: Callable = lambda here: {}  # of `vocab_statistics`
    loss: dict | None = None  # a HeadLoss instead: see `loss_of` and its definition `defined_loss`
    # or anything else: of `Here`, with `expected` of float64 rows and labels
    value: Callable | None = None
    expected: Callable | None = None
    cut: Callable | None = None  # of the group: a shard of its own
    labels_of: Callable | None = None  # of (labels, rank, size): labels that differ between ranks
    options: dict = {}  # noqa: RUF012


def statistics(here: Here):
    case, transform = here.case, dict(here.case.transform)
    if "bias" in transform:
        transform["bias"] = here.part(transform["bias"])
    transform = hl.Transform(**{name: here.to(x) for name, x in transform.items()})
    stats = hl.vocab_statistics(
        here.x, here.labels, shard=here.shard, ignore_index=case.ignore_index, options=here.options,
        **{"want": tuple(n for n in case.want if n in ("entropy", "total", "argmax")), "transform": transform}
        | case.keywords(here),
    )  # fmt: skip
    return [getattr(stats, name) for name in case.want]


def loss_of(here: Here):
    settings = {name: here.to(x) for name, x in here.case.loss.items()}
    terms = [
        hl.CrossEntropy(
            **{k: settings.pop(k) for k in ("label_smoothing", "class_weight") if k in settings}
        )
    ]
    head = hl.HeadLoss(terms, reduction=settings.pop("reduction", "mean"), options=here.options)
    return [head(here.x, here.labels, shard=here.shard, **settings).loss]


def defined_loss(
    x,
    labels,
    label_smoothing=0.0,
    class_weight=None,
    reduction="mean",
    token_weight=None,
    denominator=None,
):
    """-100 is ignored; columns at -inf take no part in the uniform share; 0 / 0 is 0."""
    valid = labels != -100
    labels = torch.where(valid, labels, 0)[:, None]
    classes = torch.ones(x.shape[1]).double() if class_weight is None else class_weight.double()
    spread = torch.where(x > -INF, classes * (x.logsumexp(-1, True) - x), 0.0).sum(-1) / x.shape[1]
    of_label = classes[labels[:, 0]]
    loss = (1 - label_smoothing) * of_label * -x.log_softmax(-1).gather(1, labels)[
        :, 0
    ] + label_smoothing * spread
    weight = (
        valid.double() if token_weight is None else torch.where(valid, token_weight.double(), 0.0)
    )
    loss = torch.where(weight != 0, loss, 0.0) * weight
    if reduction == "none":
        return loss
    total = (weight * of_label).sum() if denominator is None else torch.tensor(float(denominator))
    return loss.sum() / (total if total != 0 else INF) if reduction == "mean" else loss.sum()


def with_head(*terms, **settings):
    """A value: the loss of a HeadLoss whose call has `keywords` (as functions of `Here`, or
    constants)."""
    keywords = settings.pop("keywords", {})

    def value(here):
        head = hl.HeadLoss(
            [term() if callable(term) else term for term in terms] or None,
            options=here.options,
            **settings,
        )
        given = {name: x(here) if callable(x) else here.to(x) for name, x in keywords.items()}
        return head(here.x, given.pop("labels", here.labels), shard=here.shard, **given).loss

    return value


def linear(hidden=8, extra_rows=0, **keywords):
    """A value: the lse of a linear head, whose weight has this rank's rows and `extra_rows`
    more."""

    def value(here):
        rows = here.shard.width + extra_rows
        weight = torch.zeros(
            rows, hidden, dtype=here.x.dtype, device=here.x.device, requires_grad=True
        )
        states = torch.zeros(len(here.labels), 8, dtype=here.x.dtype, device=here.x.device)
        given = {name: x(here) if callable(x) else x for name, x in keywords.items()}
        return hl.linear_vocab_statistics(
            states, weight, here.labels, shard=here.shard, **given
        ).lse

    return value


def divergence(teacher, name="forward_kl"):
    """Fields of a case: KL to a teacher [N, V] of whole rows, where the student's or the teacher's
    0 log 0 is 0."""

    def keywords(here):
        return {"want": (name,), "teacher": hl.Teacher(here.part(teacher))}

    def expected(x, labels):
        log_p, log_q = x.log_softmax(-1), teacher.double().log_softmax(-1)
        log_p, log_q = (log_q, log_p) if name == "reverse_kl" else (log_p, log_q)
        kl = torch.where(
            log_q > -INF, log_q.exp() * (torch.where(log_q > -INF, log_q, 0.0) - log_p), 0.0
        ).sum(-1)
        return torch.where(labels == -100, 0.0, kl)

    return {"want": (name,), "keywords": keywords, "expected": expected}


def entries(ids, log_probs, mask=None, **fields):
    """Fields of a case: KL to K entries of a teacher, the same for all tokens, the student
    normalised over them."""
    ids, log_probs = torch.tensor(ids).expand(N, -1), torch.tensor(log_probs).expand(N, -1)
    kept = (ids >= 0) & (log_probs > -INF) if mask is None else torch.tensor(mask).expand(N, -1)

    def keywords(here):
        given = (
            here.to(ids),
            here.to(log_probs),
            None if mask is None else here.to(kept.contiguous()),
        )
        return {"want": ("topk_forward_kl",), "teacher": hl.TopKTeacher(*given)}

    def expected(x, labels):
        tau = torch.zeros(N, x.shape[1]).double()
        tau.scatter_add_(
            1, ids.clamp(0, x.shape[1] - 1), torch.where(kept, log_probs.double().exp(), 0.0)
        )
        live = tau > 0
        log_s = x.masked_fill(~live, -1e9).log_softmax(-1)
        tau = tau / tau.sum(-1, keepdim=True).clamp(min=1e-30)
        return torch.where(live, tau * (torch.where(live, tau, 1.0).log() - log_s), 0.0).sum(-1)

    return {"want": ("topk_forward_kl",), "keywords": keywords, "expected": expected} | fields


def kept(ids, mask=None, offsets=None, **fields):
    """Fields of a case: the log-prob over a set of ids, the same for all tokens, or [all] ids with
    offsets."""
    ids = torch.tensor(ids, dtype=torch.int64)

    def given(here):
        if offsets is not None:
            # CPUs refuse what GPUs, which nothing waits for, take for empty sets
            with mock.patch.object(id_sets, "expect_offsets"):
                return hl.IdSets.from_csr(here.to(ids), here.to(torch.tensor(offsets)))
        spread = None if mask is None else here.to(torch.tensor(mask).expand(N, -1))
        return hl.IdSets(here.to(ids.expand(N, -1)), spread)

    def expected(x, labels):
        real = ids[(ids >= 0) & (torch.tensor(True) if mask is None else torch.tensor(mask))]
        members = torch.zeros(x.shape[1], dtype=torch.bool).index_fill(
            0, real[real < x.shape[1]].unique(), True
        )
        log_s = x.masked_fill(~members, -INF).log_softmax(-1)
        return torch.where(labels == -100, 0.0, log_s.gather(1, labels.clamp(min=0)[:, None])[:, 0])

    def keywords(here):
        return {"want": ("set_log_prob",), "sets": given(here)}

    return {"want": ("set_log_prob",), "keywords": keywords, "expected": expected} | fields


def at(ids, **fields):
    """Fields of a case: the log-probs of these ids, the same for all tokens."""
    ids = torch.tensor(ids, dtype=torch.int64)

    def expected(x, labels):
        log_p = x.log_softmax(-1)[:, ids.clamp(0, x.shape[1] - 1)]
        return torch.where((ids >= 0) & (labels != -100)[:, None], log_p, 0.0)

    def keywords(here):
        return {"want": ("log_probs_at",), "ids": here.to(ids.expand(N, -1))}

    return {"want": ("log_probs_at",), "keywords": keywords, "expected": expected} | fields


def moved(change):
    """A cut: this rank's even share [start, stop), changed."""

    def cut(group):
        shard = hl.VocabShard.from_group(group, V)
        return hl.VocabShard(*change(shard.start, shard.stop), V, group)

    return cut


def bounds(by_size):
    return lambda group: hl.VocabShard.from_boundaries(
        by_size[1 if group is None else group.size()], V, group
    )


def mirrored(group):
    """Rank r owns what rank P - 1 - r does elsewhere."""
    shard = hl.VocabShard.from_group(group, V)
    return hl.VocabShard(V - shard.stop, V - shard.start, V, group)
