"""The fused linear head, for callers: hidden states and a weight shard in place of the logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from . import sweeps
from .api import DEFAULTS, NO_TRANSFORM, Options, Teacher, TopKTeacher, Transform, assembled, flat_inputs, resolve_shard
from .autograd import (
    DIFFERENTIABLE,
    OUTPUTS,
    LinearSpec,
    LinearStatistics,
    MainGrad,
    OneSweep,
    kernel_grads,
    named,
)
from .comm import HIDDEN_GRADS
from .shard import VocabShard
from .stats import HeadSpec, Inputs, VocabStatistics

MODES = ("auto", "one_sweep", "recompute")
DEFAULT_BLOCK = 128 << 20
FEWEST = 512  # tokens of a block below which summing dW costs more than making the logits again
_log = logging.getLogger("tp_headloss")


@dataclass(frozen=True)
class Linear:
    """How a linear head works. The hidden states' gradient is, by ``hidden_grad``: "all_reduce" (default: hidden states
    replicated over the shard's group, their gradient summed over it and replicated), "reduce_scatter" (sequence
    parallelism: each rank passes its [S/P, ..] of the first dimension, gathered here, and gets that part of the sum;
    labels and statistics are of all S) or "none" (this rank's part alone: the caller adds them up).

    These collectives depend on nothing else: with a group, "all_reduce" and "reduce_scatter" compute and reduce dH in
    every backward, even where this rank's hidden states require no gradient; for frozen ones say "none" on every rank,
    and no dH is computed. dW is not computed for a weight that requires no gradient.

    mode: "recompute" makes the logits twice, for any loss and any use of the statistics (four GEMMs); "one_sweep"
    computes gradients in the forward (three; `HeadLoss.linear` only, where its conditions are; an exchange per block);
    "auto" (default): one sweep where it is possible and the budget has room for blocks of 512 tokens, else recompute.
    Which one it was is logged (logger "tp_headloss", INFO).

    budget: bytes beyond inputs, dH and dW: a block of logits and, where sums over blocks are not what is returned, fp32
    memory for them (of dH or dW if these are of half precision). None: 128 MiB for a block and, in half precision, fp32
    memory for the smaller of dH and dW ("one_sweep": for dW), or what is needed at least. A rank whose shard is larger
    than an even share takes accordingly more.

    main_grad: add dW to ``weight.main_grad`` (fp32, Megatron's) instead of returning it, and set Megatron's flags.
    upstream: the gradient that will arrive at the loss of a one-sweep head (a number or a scalar tensor), where that is
    known: then dW goes into main_grad during the forward, without memory in between; one backward must follow. Another
    gradient than the declared one makes dH NaN.

    max_valid_tokens: tokens that are not ignored, or a bound on them, where the caller knows it: all others are dropped
    before the GEMMs, without a host synchronisation. If there are more, the rest of them become NaN.
    """

    mode: str = "auto"
    budget: int | None = None
    hidden_grad: str = "all_reduce"
    main_grad: bool = False
    upstream: float | torch.Tensor | None = None
    max_valid_tokens: int | None = None

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}")
        if self.hidden_grad not in HIDDEN_GRADS:
            raise ValueError(f"hidden_grad must be one of {HIDDEN_GRADS}, got {self.hidden_grad!r}")
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget must be a positive number of bytes or None, got {self.budget}")
        if self.max_valid_tokens is not None and self.max_valid_tokens < 0:
            raise ValueError(f"max_valid_tokens must be at least 0, got {self.max_valid_tokens}")
        if self.max_valid_tokens is not None and self.hidden_grad == "reduce_scatter":
            raise ValueError(
                "max_valid_tokens picks from hidden states of all tokens, got hidden_grad='reduce_scatter', where each "
                "rank has its own: gather them first"
            )


def linear_vocab_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    shard: VocabShard | None = None,
    want: tuple[str, ...] = (),
    transform: Transform | None = None,
    teacher: Teacher | TopKTeacher | None = None,
    total_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    options: Options | None = None,
    linear: Linear | None = None,
) -> VocabStatistics:
    """`vocab_statistics` of the logits hidden @ weight^T + bias, which never exist as a whole: mode "recompute".

    hidden [.., H] replicated (or as `Linear.hidden_grad` says), weight [width, H] and bias [width] of this rank sharded
    on V, labels [..] replicated -> statistics [..] fp32 replicated. Forward: one GEMM, by blocks of tokens, and one
    collective for all of them. Backward, any upstream gradients, any number of times: the logits made again by blocks
    of the vocabulary, two more GEMMs, and the collective of dH, which the last block's dW hides.

    Several hidden states with one weight (multi-token prediction) are one call: stacked [D, .., H] with labels [D, ..].
    Logits have the operands' dtype, as torch.nn.functional.linear has it, autocast included; the bias is added in fp32.
    fp32 products are IEEE fp32 unless torch's own switch allows TF32. dH and dW are summed in fp32 and rounded once.
    Arguments otherwise as in `vocab_statistics`, errors, too; ValueError for a budget that is too small.
    """
    linear = linear or Linear()
    if linear.mode == "one_sweep":
        raise ValueError(
            "mode='one_sweep' computes the gradient of a HeadLoss: use HeadLoss.linear, or 'recompute' here"
        )
    if linear.upstream is not None:
        raise ValueError(f"upstream is of a one-sweep HeadLoss.linear, got {linear.upstream}")
    if linear.max_valid_tokens is not None:
        picked = Picked(labels, ignore_index, linear.max_valid_tokens)
        stats = linear_vocab_statistics(
            picked(hidden), weight, picked(labels), bias=bias, shard=shard, want=want,
            transform=picked.transform(transform), teacher=picked.teacher(teacher), total_weight=total_weight,
            ignore_index=ignore_index, options=options, linear=replace(linear, max_valid_tokens=None),
        )  # fmt: skip
        return picked.spread(stats, labels)
    head = Head.of(
        hidden, weight, labels, bias, shard, want, transform, teacher, total_weight, ignore_index, options, linear
    )
    return head.recompute(labels, options)


class Head(NamedTuple):
    """A validated call: what the sweeps take, in one order of the tokens."""

    hidden: torch.Tensor  # [N, H], or [N/P, H]
    weight: torch.Tensor
    inputs: Inputs  # its logits: an expanded scalar that has their shape and type
    rows: object  # the order
    shard: VocabShard
    spec: HeadSpec
    linear: Linear

    @classmethod
    def of(
        cls, hidden, weight, labels, bias, shard, want, transform, teacher, total_weight, ignore_index, options, linear
    ) -> Head:
        transform, options = transform or NO_TRANSFORM, options or DEFAULTS
        if options.inplace:
            raise ValueError("inplace=True overwrites logits, and a linear head has none of the caller's")
        dtype = _validate(hidden, weight, linear)
        if bias is not None:
            if transform.bias is not None:
                raise ValueError("bias was given twice, and in the transform")
            transform = replace(transform, bias=bias)
        shard = resolve_shard(weight.t(), shard)
        if weight.shape[0] != shard.width:
            raise ValueError(
                f"weight must have the shard's {shard.width} rows [{shard.start}, {shard.stop}), got {weight.shape[0]}"
            )
        lead, scattered = list(hidden.shape[:-1]), linear.hidden_grad == "reduce_scatter"
        if scattered:
            if not lead:
                raise ValueError("hidden_grad='reduce_scatter' needs hidden states [S/P, .., H], got [H]")
            lead[0] *= shard.world_size
            hidden = hidden.contiguous()  # ranks agree on the order of the tokens they gather
        logits = hidden.new_empty((), dtype=dtype).expand(*lead, shard.width)
        rows, spec, inputs = flat_inputs(
            logits, labels, shard, want, transform, teacher, total_weight, ignore_index, options,
            logits if scattered else hidden,
        )  # fmt: skip
        flat = hidden.reshape(-1, hidden.shape[-1]) if scattered else rows.flatten(hidden)
        return cls(flat, weight, inputs, rows, shard, spec, linear)

    def sizes(self, weight_sums: bool = True) -> sweeps.Sizes:
        """Of an even share of the vocabulary: what all ranks know of each other's shards, so that they agree."""
        dtype, half = self.inputs.logits.dtype, (torch.bfloat16, torch.float16)
        width = -(-self.shard.vocab_size // self.shard.world_size)
        return sweeps.Sizes(
            max(1, self.inputs.logits.shape[0]), width, self.hidden.shape[-1], dtype.itemsize,
            sums=self.hidden.dtype in half, weight_sums=weight_sums and self.weight.dtype in half,
        )  # fmt: skip

    def budget(self, planner, sizes: sweeps.Sizes, sums: int) -> int:
        """The caller's, or what stands in `Linear`; sums: bytes that cannot be done without."""
        if self.linear.budget is not None:
            return self.linear.budget
        smaller = 4 * sizes.hidden * min(sizes.tokens, sizes.width) if sizes.sums else 0
        budget = DEFAULT_BLOCK + max(smaller, sums)
        return budget if planner(sizes, budget) is not None else sweeps.least_budget(planner, sizes)

    def recompute(self, labels, options) -> VocabStatistics:
        linear = self.linear
        sizes, planner = self.sizes(not linear.main_grad), sweeps.recompute_blocks
        if torch.compiler.is_compiling():  # which would trace through the cache and warn about it
            planner = planner.__wrapped__
        blocks = planner(sizes, self.budget(planner, sizes, 0))
        if blocks is None:
            _refuse(planner, sizes, linear.budget)
        of_linear = LinearSpec(self.inputs.logits.dtype, *blocks, linear.hidden_grad)
        main_grad = MainGrad(self.weight) if linear.main_grad else None
        _say(f"recompute: logits of {blocks.forward} tokens forward, {blocks.tokens} x {blocks.columns} backward")
        values = LinearStatistics.apply(self.hidden, self.weight, *self.inputs[1:], main_grad, self.spec, of_linear)
        return assembled(values, self.rows, labels, self.shard, (options or DEFAULTS).check)

    def one_sweep_tokens(self) -> int | None:
        """Of a block, the same on all ranks; None if the budget has no room for one."""
        linear = self.linear
        sizes, planner = self.sizes(not linear.main_grad), sweeps.one_sweep_tokens
        of_weight = 4 * sizes.width * sizes.hidden
        own = of_weight if linear.main_grad and linear.upstream is None else 0
        least = of_weight if linear.mode == "one_sweep" and (own or sizes.weight_sums) else 0
        return planner(sizes, max(0, self.budget(planner, sizes, least) - own))

    def one_sweep(self, labels, options, loss_of) -> tuple[VocabStatistics, tuple]:
        """-> statistics without gradients, and those of hidden states, weight and bias for `OneSweep`.

        loss_of(statistics of some tokens [n], their slice of the flat order) -> that part of the loss [].
        """
        linear, spec, inputs = self.linear, self.spec, self.inputs
        tokens, flat_labels = self.one_sweep_tokens(), inputs.labels
        if tokens is None:
            _refuse(sweeps.one_sweep_tokens, self.sizes(not linear.main_grad), linear.budget)
        declared = 1.0 if linear.upstream is None else linear.upstream
        if not isinstance(declared, torch.Tensor):  # filled there, where a copy would wait for the device
            declared = torch.full((), declared, device=self.hidden.device)
        direct = linear.main_grad and linear.upstream is not None
        _say(f"one sweep: logits of {tokens} tokens")

        def objective(values, flags, here):
            leaves = [row.detach().requires_grad_() for row in values]
            by_name, _ = named(leaves, flags, True, spec.want)
            with torch.enable_grad():
                stats = {name: by_name.get(name) for name in OUTPUTS if name != "owners"}
                stats = VocabStatistics(**stats, labels=flat_labels[here], vocab_size=spec.vocab_size)
                loss = loss_of(stats, here)
            names = [name for name in by_name if name in DIFFERENTIABLE]
            grads = torch.autograd.grad(loss, [by_name[n] for n in names], declared.to(loss.dtype), allow_unused=True)
            return kernel_grads(dict(zip(names, grads)))

        reduced = linear.hidden_grad != "none" and spec.world_size > 1
        of_linear = LinearSpec(inputs.logits.dtype, tokens, tokens, 0, linear.hidden_grad)
        types = torch.float32 if linear.main_grad else self.weight.dtype
        wanted = sweeps.Gradients(
            self.hidden.dtype if self.hidden.requires_grad or reduced else None,
            types if self.weight.requires_grad else None,
            None if inputs.bias is None or not inputs.bias.requires_grad else inputs.bias.dtype,
            self.weight.main_grad if direct and self.weight.requires_grad else None,
        )
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            operands = of_linear.operands(self.hidden.detach(), self.weight.detach(), spec)
            plain = Inputs(*(None if x is None else x.detach() for x in inputs))
            values, flags, of_hidden, out = sweeps.one_sweep(
                *operands, plain, spec, tokens, objective, wanted, linear.hidden_grad
            )
            of_weight = None if wanted.main_grad is not None else out.sum
            found = of_hidden, of_weight, out.bias
        by_name, _ = named(values.unbind(0), flags, True, spec.want)
        stats = assembled(
            [by_name.get(name) for name in OUTPUTS], self.rows, labels, self.shard, (options or DEFAULTS).check
        )
        return stats, found


def attached(head: Head, loss: torch.Tensor, stats: VocabStatistics, found) -> tuple[torch.Tensor, VocabStatistics]:
    """A loss [] and the statistics of `Head.one_sweep`, with the gradients that were found."""
    tensors = {name: x for name in OUTPUTS if isinstance(x := getattr(stats, name, None), torch.Tensor)}
    differentiable = sum(name in DIFFERENTIABLE for name in tensors)  # they come first
    main_grad = MainGrad(head.weight) if head.linear.main_grad else None
    loss, *tensors_ = OneSweep.apply(
        head.hidden, head.weight, head.inputs.bias, loss, found, main_grad, head.linear.upstream,
        head.spec.backend, differentiable, *tensors.values(),
    )  # fmt: skip
    return loss, stats._replace(**dict(zip(tensors, tensors_)))


class Picked:
    """The tokens that are not ignored, at most `count` of them, in their order; then ignored ones."""

    def __init__(self, labels: torch.Tensor, ignore_index: int, count: int):
        if labels is None:
            raise ValueError("max_valid_tokens drops tokens by their labels, got none")
        self.lead, valid = labels.shape, (labels != ignore_index).reshape(-1)
        self.valid = valid
        self.order = torch.sort((~valid).to(torch.uint8), stable=True).indices[:count]
        self.missing = valid.sum() > count  # tokens that should have been picked

    def __call__(self, x):
        """[.., *] -> [count, *]"""
        return x.reshape(-1, *x.shape[len(self.lead) :])[self.order] if isinstance(x, torch.Tensor) else x

    def transform(self, transform: Transform | None) -> Transform | None:
        return transform and replace(transform, temperature=self(transform.temperature))

    def teacher(self, teacher):
        if isinstance(teacher, Teacher):
            raise ValueError("max_valid_tokens would copy the teacher's logits, got a Teacher: drop the tokens before")
        return teacher and replace(
            teacher, **{field.name: self(getattr(teacher, field.name)) for field in fields(teacher)}
        )

    def spread_one(self, x: torch.Tensor, ignored, missing) -> torch.Tensor:
        """[count] -> [..]"""
        rest = torch.full_like(self.valid, ignored, dtype=x.dtype)
        rest = rest.masked_fill(self.valid, missing)
        return rest.index_copy(0, self.order, x).view(self.lead)

    def spread(self, stats: VocabStatistics, labels: torch.Tensor) -> VocabStatistics:
        out = {}
        for name, x in stats._asdict().items():
            if isinstance(x, torch.Tensor) and name != "labels":
                fill = (0.0, torch.nan) if x.is_floating_point() else (-1, -1) if name == "argmax" else (False, False)
                out[name] = self.spread_one(x, *fill)
        return stats._replace(**out | {"labels": labels, "valid": self.valid.view(self.lead)})


def _validate(hidden, weight, linear: Linear) -> torch.dtype:
    """-> the dtype of the GEMMs' operands, as torch.nn.functional.linear chooses it."""
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{list(hidden.shape)} and {list(weight.shape)}"
        raise ValueError(f"hidden states and weight must be [.., H] and [width, H], got {shapes}")
    if hidden.device != weight.device:
        raise ValueError(f"weight must be on {hidden.device} like the hidden states, got {weight.device}")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        dtype = torch.get_autocast_dtype(kind)
    elif hidden.dtype != weight.dtype:
        raise TypeError(f"hidden states and weight must have one dtype, got {hidden.dtype} and {weight.dtype}")
    else:
        dtype = hidden.dtype
    if linear.main_grad:
        if torch.compiler.is_compiling():
            raise ValueError("main_grad=True is for eager: under torch.compile, let dW be returned")
        main_grad = getattr(weight, "main_grad", None)
        fits = main_grad is not None and main_grad.shape == weight.shape and main_grad.is_contiguous()
        if not fits or main_grad.dtype != torch.float32:
            got = None if main_grad is None else f"{main_grad.dtype} {list(main_grad.shape)}, {main_grad.stride()}"
            shape = list(weight.shape)
            raise ValueError(f"main_grad=True needs weight.main_grad, fp32, contiguous, of shape {shape}, got {got}")
    return dtype


def _refuse(planner, sizes: sweeps.Sizes, budget: int):
    least = sweeps.least_budget(planner, sizes)
    raise ValueError(f"budget must be at least {least} bytes for blocks of {sweeps.TILE} tokens, got {budget}")


_said: set[str] = set()


def _say(what: str):
    if what not in _said and not torch.compiler.is_compiling():
        _said.add(what)
        _log.info("linear head: %s", what)
