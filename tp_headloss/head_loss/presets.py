"""Whole losses of policy optimisation under the names of their papers; each returns a `HeadLoss`.

Inputs of a call: "advantages" and "old_log_prob"; "sequences" for all but `PPO`, `DAPO` and
`CISPO`; "reference_log_prob" with a KL. Pass `denominator` for a mean over the global batch: its
tokens, or its sequences.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from ..arguments.sequences import SequenceReduction
from ..losses.policy import CLIP
from ..losses.ratio import Clip, ClipOfConvention, SequenceClip
from ..spec import FP32_MAX, CheckedBy, NotNegativeFp32, NumberLine, Positive, checked, lines_within
from .definition import Reduction
from .loss import HeadLoss
from .policy_terms import KLToReference, PolicyGradient
from .terms import Entropy

OF_ESTIMATOR = (
    ": kl= is the weight of the KL, whose estimator is k3; another is that of KLToReference"
)
Kl: TypeAlias = Annotated[
    float,
    NumberLine(0, FP32_MAX, "at least 0 and finite in fp32", of_text=OF_ESTIMATOR),
    "Weight of the KL to the reference (k3 of `KLToReference`, at most 10 per token, with gradient 0 "
    "beyond); 0: none",
]
Bonus: TypeAlias = Annotated[NotNegativeFp32, "Weight of the entropy bonus; 0: none"]
Dual: TypeAlias = (
    Annotated[Positive, "At least 1 + high: the loss is at most -dual_clip A where A < 0"] | None
)
HANDED_ON = frozenset(lines_within(HeadLoss)) - {"terms", "reduction"}
GIVEN = "arguments of the `HeadLoss`, such as metrics, but its terms and reduction, which the preset sets itself"
Keywords: TypeAlias = Annotated[Any, CheckedBy(GIVEN, names=HANDED_ON)]
TOKENS: Reduction = "mean"
SEQUENCES: SequenceReduction = "seq-mean-token-mean"
AnyReduction: TypeAlias = Literal[Reduction, SequenceReduction]


def _loss(term, reduction: AnyReduction, kl: float, entropy: float, keywords) -> HeadLoss:
    terms = [term]
    if kl > 0:
        terms.append(KLToReference(kl))
    if entropy > 0:
        terms.append(Entropy(entropy))
    return HeadLoss(terms, reduction=reduction, **keywords)


@checked
def PPO(
    clip: Clip = CLIP,
    dual_clip: Dual = None,
    *,
    kl: Kl = 0.0,
    entropy: Bonus = 0.0,
    **keywords: Keywords,
) -> HeadLoss:
    """Return PPO's clipped objective (arXiv:1707.06347) as a mean over tokens; verl's defaults add
    dual_clip=3.0.

    Examples:
        >>> PPO(kl=0.001, metrics="entropy")
        HeadLoss(terms=[clip, 0.001 * kl], metrics=[entropy], reduction='mean')
    """
    return _loss(
        PolicyGradient("clip", clip=clip, dual_clip=dual_clip), TOKENS, kl, entropy, keywords
    )


@checked
def GRPO(
    clip: Clip = CLIP,
    dual_clip: Dual = None,
    *,
    kl: Kl = 0.0,
    entropy: Bonus = 0.0,
    **keywords: Keywords,
) -> HeadLoss:
    """Return PPO's objective as a mean over sequences of the means over their tokens
    (arXiv:2402.03300; kl 0.04 there).

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 4), torch.tensor([[0, 3]])  # [batch, sequence, V]
        >>> inputs = {
        ...     "advantages": torch.tensor([[2.0]]),
        ...     "sequences": Sequences.from_mask(labels != -100),
        ... }
        >>> inputs["old_log_prob"] = log_probs(logits, labels, differentiable=False).log_prob
        >>> GRPO()(logits, labels, inputs=inputs).loss
        tensor(-2.)
    """
    return _loss(
        PolicyGradient("clip", clip=clip, dual_clip=dual_clip), SEQUENCES, kl, entropy, keywords
    )


@checked
def DAPO(
    clip: Clip = (0.2, 0.28),
    dual_clip: Dual = None,
    *,
    kl: Kl = 0.0,
    entropy: Bonus = 0.0,
    **keywords: Keywords,
) -> HeadLoss:
    """Return PPO's objective with a higher upper clip as a mean over tokens, so that sequences
    count by their length (arXiv:2503.14476).

    Examples:
        >>> DAPO()
        HeadLoss(terms=[clip], metrics=[], reduction='mean')
    """
    return _loss(
        PolicyGradient("clip", clip=clip, dual_clip=dual_clip), TOKENS, kl, entropy, keywords
    )


@checked
def DrGRPO(
    clip: Clip = CLIP,
    dual_clip: Dual = None,
    *,
    kl: Kl = 0.0,
    entropy: Bonus = 0.0,
    **keywords: Keywords,
) -> HeadLoss:
    """Return PPO's objective summed over tokens, divided by the number of sequences and by a
    constant length L, the horizon of the input "sequences" (arXiv:2503.20783):
    ``Sequences.from_mask(.., horizon=L)``. Its advantages are not
    divided by their deviation.

    Examples:
        >>> DrGRPO()
        HeadLoss(terms=[clip], metrics=[], reduction='seq-mean-token-sum-norm')
    """
    term = PolicyGradient("clip", clip=clip, dual_clip=dual_clip)
    return _loss(term, "seq-mean-token-sum-norm", kl, entropy, keywords)


@checked
def GSPO(
    clip: SequenceClip = (3e-4, 4e-4),
    dual_clip: Dual = None,
    *,
    kl: Kl = 0.0,
    entropy: Bonus = 0.0,
    **keywords: Keywords,
) -> HeadLoss:
    """Return the clipped objective of the sequence's ratio as a mean over sequences
    (arXiv:2507.18071).

    Examples:
        >>> GSPO()
        HeadLoss(terms=[gspo], metrics=[], reduction='seq-mean-token-mean')
    """
    return _loss(
        PolicyGradient("gspo", clip=clip, dual_clip=dual_clip), SEQUENCES, kl, entropy, keywords
    )


@checked
def CISPO(
    clip: ClipOfConvention = CLIP,
    convention: Literal["offset", "bound"] = "offset",
    *,
    kl: Kl = 0.0,
    entropy: Bonus = 0.0,
    **keywords: Keywords,
) -> HeadLoss:
    """Return REINFORCE weighted by the clipped ratio as a mean over tokens, of which none loses its
    gradient (arXiv:2506.13585).

    Args:
        convention: as in `cispo`.

    Examples:
        >>> CISPO((0.0, 5.0), "bound")  # of TRL
        HeadLoss(terms=[cispo], metrics=[], reduction='mean')
    """
    return _loss(
        PolicyGradient("cispo", clip=clip, convention=convention), TOKENS, kl, entropy, keywords
    )
