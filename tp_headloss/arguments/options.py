"""Arguments that callers write: transforms of the logits, and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch

from ..engine.backend import Backend
from ..engine.transports import TRANSPORTS, TransportName
from ..spec import TINY, Bias, NumberLine, OneOf, PositiveFp32, Temperature, checked
from ..spec.checks import expect_number
from .made_whole import MadeWhole

GradientWay: TypeAlias = Literal["auto", "forward", "backward"]


@checked
@dataclass(frozen=True)
class Transform(MadeWhole):
    """z = softcap * tanh((x + bias) * scale / softcap) / temperature, computed inside the kernels
    in fp32.

    Args:
        bias: of this rank's shard, differentiable.
        softcap: by default none (Gemma 2, arXiv:2408.00118, section 2).
        temperature: one, or one per token (the logits' leading shape); a token whose own is not
            positive is NaN. Logits that are divided by it already need none.

    Examples:
        >>> stats = vocab_statistics(
        ...     torch.tensor([[4.0, 0.0]]), transform=Transform(softcap=2.0, temperature=0.5)
        ... )
        >>> stats.lse  # log(exp(2 tanh(4 / 2) / 0.5) + 1)
        tensor([3.8770])
    """

    made_anew = "Transform(temperature=temperature[..])"
    of_int = of_float = ": write Transform(temperature={})"  # in its place
    bias: Bias | None = None
    scale: Annotated[float, NumberLine(-1 / TINY, 1 / TINY, "other than 0 and finite in fp32")] = (
        1.0
    )
    softcap: PositiveFp32 | None = None
    temperature: Temperature = 1.0

    def __post_init__(self):
        expect_number("scale", self.scale, positive=False)
        if self.softcap is not None:
            expect_number("scale / softcap", self.scale / self.softcap, positive=False)
        if not isinstance(self.temperature, torch.Tensor):
            expect_number("scale / temperature", self.scale / self.temperature, positive=False)
            expect_number("softcap / temperature", (self.softcap or 1.0) / self.temperature)


@checked
@dataclass(frozen=True)
class Options:
    """Options of the computation; none changes a result by more than rounding. ValueError or
    TypeError for bad ones.

    Args:
        backend: "triton", "torch" or None (triton on CUDA, torch elsewhere).
        transport: "gather" (an all-gather), "symm_mem" (symmetric memory), "sum" (all-reduces; no
            "argmax") or "auto". The same on all ranks of the group, as ``check`` and ``validate``
            are: one rank's own ends a rank, or lets it wait.
        inplace: the backward writes the gradient over the logits (eager only). Whoever reads the
            logits after it finds the gradient there; logits that are a leaf share its memory with
            their ``.grad``. The logits of a `Teacher` must be exactly these or share no memory with
            them. torch's own errors for other operations that saved the logits need their saved
            tensors to come without hooks (`torch.autograd.graph.saved_tensors_hooks`).
        gradient: "forward" has the forward of a `HeadLoss` write the gradient of its logits, in one
            launch that reads each logit once and exchanges packets with the group's other ranks,
            and the backward hand it over. That is for the upstream gradient of the loss that came
            the last time, at first 1. If another one comes, the backward writes the gradient, and
            after two such steps the forward waits until one has come repeatedly. So what differs
            from step to step belongs into ``denominator`` or ``token_weight``. With ``inplace`` the
            gradient is for 1, and multiplied for others, which rounds it a second time. For logits
            on GPUs of compute capability 9.0, whose rows begin at multiples of 16 bytes; equal
            shards on at most 8 ranks with symmetric memory; a positive scale; no bias; terms that
            are statistics or `Term.pointwise` (class weights: of one cross-entropy without
            smoothing and without another term), and at most six sums of lse, log_prob, entropy,
            total, forward_kl, reverse_kl, teacher_entropy, jsd or total_variation and overlap,
            topk_forward_kl, vocab_forward_kl, tail_log_mass, the accuracy and such terms; no
            teacher, a `Teacher` whose logits have the student's dtype, or fp32, and such rows, or a
            `TopKTeacher` of at most 128 entries at whose temperature the student is, too, without
            tail_log_prob; a reduction over tokens; no sets, ids or rank, and no weights or inputs
            that require a gradient; ValueError for other calls that need a gradient. "backward" has
            a launch of the backward write it. "auto" takes "forward" where it can and was measured
            to be faster, else "backward", also for the blocks of one sweep; the two may differ in
            the last bit. From the forward on the gradient takes memory, unless ``inplace`` has the
            forward write it over the logits. A rank that does not come within its group's timeout
            makes its peers' results NaN, and their next call raises.
        check: raise a ValueError that names the first token with a bad label, set, given id or
            entry of a `TopKTeacher` (an unknown id, or log-probs whose probabilities add up to more
            than 1, as those of logits mostly do, or with a tail's to another sum), an input of log-probs
            that holds probabilities, or a rollout weight below 0, as log-weights are. Or that
            logits (beside hidden states, the teacher's alone) are probabilities, or were normalised
            over one rank's columns. Or that names token, column, rank and count of a NaN (or an
            infinity that makes one) in logits, hidden states, weight, bias, teacher, inputs or
            token weights, or the token of a temperature that is not positive or of logits that are
            all -inf. Or that names a term that is NaN where its statistics are not, or one that
            promises to be tokenwise and is not. It is raised on every rank, after a host
            synchronisation, if all ranks of the group have the same ``check``.
            Calls without labels check the rest. `sample`, `kept_ids` and `topk_log_probs` take one
            more pass over the logits for it, and look at the values of a `SamplingRule`'s tensors.
            Recorded log-probs of 0 at tokens that count, and those in half precision, are a warning.
        validate: "metadata" looks at what this rank can see, "full" has the ranks of the group
            compare their calls first, so that a mistake on one is the same exception on all (eager
            only; for debugging); "checksums" is "full" and compares the bits of replicated hidden
            states, too. With ``check``, calls without a shard compare over all ranks of the job:
            equal labels with other logits are a forgotten shard. That waits at most 60 s for ranks
            that make no such call (other pipeline stages, say), once, and then compares no more. A
            rank that alone forgot its ``shard=`` so waits, is warned and goes on with a number of
            its own columns that looks right, while the others wait for it until their timeout.
            The same on all ranks of the group.

    Examples:
        >>> try:
        ...     vocab_statistics(torch.zeros(2, 4), torch.tensor([1, 9]), options=Options(check=True))
        ... except ValueError as error:
        ...     print(str(error)[:66])
        label of token 1 (flat index) must be the ignore_index or in [0, 4
    """

    backend: Backend | None = None
    transport: Annotated[TransportName, OneOf(TRANSPORTS)] = "auto"
    inplace: bool = False
    check: bool = False
    validate: Literal["metadata", "full", "checksums"] = "metadata"
    gradient: GradientWay = "auto"


NO_TRANSFORM, DEFAULTS = Transform(), Options()
