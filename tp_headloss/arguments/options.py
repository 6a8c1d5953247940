"""Arguments that callers write: transforms of the logits, and options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..engine.backend import BACKENDS
from ..engine.one_launch import GRADIENTS
from ..engine.transports import TRANSPORTS
from ..validation import (
    expect_bool,
    expect_floating,
    expect_number,
    expect_one_of,
    expect_real,
    expect_tensor,
    is_number,
)

VALIDATIONS = ("metadata", "full", "checksums")


@dataclass(frozen=True)
class Transform:
    """z = softcap * tanh((x + bias) * scale / softcap) / temperature, computed inside the kernels in fp32.

    Args:
        bias: [width] of this rank's shard, differentiable.
        scale: a number.
        softcap: None for none (Gemma 2, arXiv:2408.00118, section 2).
        temperature: a number, or one per token (the logits' leading shape, not differentiable); a token whose own is
            not positive is NaN.

    Raises:
        TypeError, ValueError: numbers that are not finite in fp32, or a temperature or softcap that is not positive.

    Examples:
        >>> stats = vocab_statistics(torch.tensor([[4.0, 0.0]]), transform=Transform(softcap=2.0, temperature=0.5))
        >>> stats.lse  # log(exp(2 tanh(4 / 2) / 0.5) + 1)
        tensor([3.8770])
    """

    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float | torch.Tensor = 1.0

    def __post_init__(self):
        if self.bias is not None:
            hint = ": a temperature is the argument temperature=" if is_number(self.bias) else ""
            expect_tensor("bias", self.bias, hint=hint)
            expect_floating("bias", self.bias)
        expect_number("scale", self.scale, positive=False)
        expect_temperature("temperature", self.temperature)
        if self.softcap is not None:
            expect_number("softcap", self.softcap)
            expect_number("scale / softcap", self.scale / self.softcap, positive=False)
        if not isinstance(self.temperature, torch.Tensor):
            expect_number("scale / temperature", self.scale / self.temperature, positive=False)
            expect_number("softcap / temperature", (self.softcap or 1.0) / self.temperature)


def expect_temperature(name, temperature):
    """Raise TypeError or ValueError unless it is a positive number, or a tensor that wants no gradient."""
    if isinstance(temperature, torch.Tensor):
        expect_tensor(name, temperature)
        if temperature.dtype == torch.bool:
            raise TypeError(f"{name} must be a number or a tensor of numbers, got {temperature.dtype}")
        if temperature.requires_grad:
            raise ValueError(f"{name} gets no gradient: pass {name}.detach()")
        return
    expect_real(name, temperature, "a number or a tensor")
    expect_number(name, temperature)


@dataclass(frozen=True)
class Options:
    """Options of the computation; none changes a result by more than rounding. ValueError or TypeError for bad ones.

    Args:
        backend: "triton", "torch" or None (triton on CUDA, torch elsewhere).
        transport: "gather" (an all-gather), "symm_mem" (symmetric memory), "sum" (an all_reduce) or "auto" (chooses).
        inplace: the backward writes the gradient over the logits (eager only). Whoever reads the logits after it finds
            the gradient there; logits that are a leaf share its memory with their ``.grad``. The logits of a `Teacher`
            must be exactly these or share no memory with them. torch's own errors for other operations that saved the
            logits need their saved tensors to come without hooks (`torch.autograd.graph.saved_tensors_hooks`).
        gradient: "forward" has the forward of a `HeadLoss` write the gradient of its logits, in the launch that reads
            them, and the backward hand it over (computed again if the upstream gradient of the loss is another than in
            the step before, at first 1). For the triton backend on one rank, at most one term of lse and one of
            log_prob (no smoothing or class weights), a reduction over tokens, no temperature, softcap, scale, teacher,
            sets, ids or rank, and no weights that require a gradient; ValueError for other calls that need one. All
            bits are those of "backward". Faster on some GPUs, see the benchmarks; the gradient takes memory from the
            forward on.
        check: raise a ValueError that names the first token with a bad label, set, given id or entry of a `TopKTeacher`
            (an unknown id, or log-probs whose probabilities add up to more than 1, as those of logits do), on every
            rank, after a host synchronisation.
        validate: "metadata" looks at what this rank can see, "full" has the ranks of the group compare their calls
            first, so that a mistake on one is the same exception on all (eager only; for debugging); "checksums" is
            "full" and compares the bits of replicated hidden states, too.

    Examples:
        >>> try:
        ...     vocab_statistics(torch.zeros(2, 4), torch.tensor([1, 9]), options=Options(check=True))
        ... except ValueError as error:
        ...     print(str(error)[:66])
        label of token 1 (flat index) must be the ignore_index or in [0, 4
    """

    backend: str | None = None
    transport: str = "auto"
    inplace: bool = False
    check: bool = False
    validate: str = "metadata"
    gradient: str = "backward"

    def __post_init__(self):
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS} or None (by device), got {self.backend!r}")
        choices = {"transport": tuple(TRANSPORTS), "validate": VALIDATIONS, "gradient": GRADIENTS}
        for name, known in choices.items():
            expect_one_of(name, getattr(self, name), known)
        for name in ("inplace", "check"):
            expect_bool(name, getattr(self, name))
        if self.inplace and self.gradient == "forward":
            raise ValueError("inplace=True overwrites logits in the backward, got gradient='forward'")


NO_TRANSFORM, DEFAULTS = Transform(), Options()
