"""Tokens that are dropped before the GEMMs because their labels are ignored
(`Linear.max_valid_tokens`)."""

import torch

from ..engine.request import Request, TokenOrder
from ..ranks.comm import gather_from_ranks
from ..spec.checks import OTHER_BATCHES, hint_of_label, refuse_tokens
from ..statistics import IGNORED

# Outputs of ignored tokens and of valid ones that were not picked; all others are 0 and NaN.
NOT_PICKED = {
    "owners": (IGNORED, 1.0),
    "valid": (False, True),
    "hits": (False, False),
    "argmax": (-1, -1),
}


def check_range(labels: torch.Tensor, ignore_index: int, vocab_size: int, group):
    """Raise ValueError, with the first of them, if there are labels that are neither ignored nor
    ids on some rank, or that some ranks ignore alone. One small all-gather, so that all ranks
    raise."""
    if not labels.numel():
        return
    valid = labels != ignore_index
    unknown = valid & ((labels < 0) | (labels >= vocab_size))
    of_ranks = gather_from_ranks(torch.stack([valid, unknown]).to(torch.uint8), group).bool()
    differ = (of_ranks != of_ranks[0]).any(1).any(0)

    def message(token: int) -> str:
        said = ", which ranks do not agree on" * bool(differ.flatten()[token])
        return (
            f"label of token {token} (flat index) must be the ignore_index or in [0, "
            f"{vocab_size}), got {int(labels.flatten()[token])}{said}"
        )

    def what_to_do(token: int) -> str:
        others = OTHER_BATCHES if differ.flatten()[token] else ""
        return hint_of_label(int(labels.flatten()[token]), ignore_index) or others

    refuse_tokens(of_ranks[:, 1].any(0) | differ, message, what_to_do)


class ValidTokens(TokenOrder):
    """The rows of the tokens that are not ignored, at most `count` of them, in their order; then of
    ignored ones."""

    def __init__(self, order: TokenOrder, labels: torch.Tensor, ignore_index: int, count: int):
        self.permutation, self.shape, self.rows, self.is_plain = (
            order.permutation,
            order.shape,
            order.rows,
            False,
        )
        self.valid = labels != ignore_index
        self.picked = torch.sort((~self.valid).to(torch.uint8), stable=True).indices[:count]
        self.missing = self.valid.sum() > count  # tokens that should have been picked

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        """[.., *] -> [n, *] of the picked tokens."""
        return super().flatten(x).index_select(0, self.picked)

    def restored(self, outputs, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Spread statistics [n, *] over all tokens [.., *]: 0 at ignored ones, NaN at valid ones
        not picked."""
        spread = [
            self._spread_one(x, *NOT_PICKED.get(name, (0.0, torch.nan)))
            for x, name in zip(outputs, names)
        ]
        return super().restored(spread, names)

    def _spread_one(self, x: torch.Tensor, ignored, missing) -> torch.Tensor:
        rest = torch.full_like(self.valid, ignored, dtype=x.dtype).masked_fill(self.valid, missing)
        if x.dim() > 1:  # [n, K]
            rest = rest[:, None].repeat(1, x.shape[1])
        return rest.index_copy(0, self.picked, x)


def picked_rows(hidden, request: Request, count: int, check: bool) -> tuple[torch.Tensor, Request]:
    """Hidden states [N, H] and a request of all tokens -> those of the valid tokens, at most
    `count`."""
    tensors, facts, head = request.tensors, request.facts, request.teacher_head
    if tensors.labels is None:
        raise ValueError("max_valid_tokens drops tokens by their labels, got none")
    if tensors.teacher is not None:
        raise ValueError(
            "max_valid_tokens would copy the teacher's logits, got a Teacher: drop the tokens "
            "before"
        )
    if check:
        check_range(tensors.labels, facts.ignore_index, facts.vocab_size, request.shard.group)
        if (valid := int((tensors.labels != facts.ignore_index).sum())) > count:
            raise ValueError(
                f"max_valid_tokens must be at least the number of valid tokens, {valid}, got "
                f"{count}"
            )
    order = ValidTokens(request.order, tensors.labels, facts.ignore_index, count)
    if head.teacher_hidden is not None:
        head = head._replace(teacher_hidden=head.teacher_hidden.index_select(0, order.picked))
    request = request.rows(order.picked, tensors.logits[: len(order.picked)])
    return hidden.index_select(0, order.picked), request._replace(order=order, teacher_head=head)
