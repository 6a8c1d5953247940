"""The launches of a loss of statistics, prepared once for calls of one kind: see
`prepared_triton`."""

from __future__ import annotations

from ..backend import load_backend
from .way import Case, Way

# of tensors of a call that another launch than a prepared one reads
WORDS = {
    "teacher": "a teacher",
    "entries": "a top-K teacher",
    "bias": "a bias",
    "column_weight": "class weights",
    "sets": "sets",
    "ids": "given ids",
}


class Prepared(Way):
    """One launch for statistics and one for the gradient, 6 bytes for a logit of 2, worked out by
    an earlier call of the kind.

    For a loss that is a weighted sum of statistics.
    """

    name = "prepared"
    not_ready = "logits on the current device"

    @staticmethod
    def obstacle(case: Case) -> str | None:
        request, reduction = case.request, case.loss.of_statistics
        if reduction is None:
            return case.loss.needs_of_statistics()
        found = [word for name, word in WORDS.items() if getattr(request.tensors, name) is not None]
        if found:
            return f"a call without {' and '.join(found)}"
        if request.ways is None:
            return (
                "a kind of call that is remembered: plain tensors, no token_weight, "
                "validate='metadata', and no check=True of values"
            )
        if reduction.weight is not None:
            return "a loss without weights of tokens, or of their labels"
        if request.tensors.temperatures is not None:
            return "one temperature of all tokens"
        layout, gradients = request.layout, reduction.plan.gradients
        if gradients is None or not all(name in layout.differentiable for name, *_ in gradients):
            return "terms of differentiable statistics, each of another one"
        if layout.second or layout.per_id or layout.needs_label_logits:
            return "statistics of one exchange, none of them of given ids"
        return None if len(request.tensors.logits) else "a token"

    @classmethod
    def of_kind(cls, case: Case) -> Way:
        backend = load_backend(case.request.facts.backend)
        return backend.PreparedLaunches(case.request, case.loss.of_statistics, case.inplace)
