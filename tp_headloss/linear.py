"""The fused linear head, for callers: hidden states and a weight shard in place of the logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from . import sweeps
from .agreement import Agreement
from .api import DEFAULTS, NO_TRANSFORM, Options, Teacher, TopKTeacher, Transform, assembled, flat_inputs
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
from .dtensor import local, local_head
from .shard import VocabShard
from .stats import HeadSpec, Inputs, VocabStatistics
from .validation import expect_instance

MODES = ("auto", "one_sweep", "recompute")
FEWEST = 512  # tokens of a block below which summing dW costs more than making the logits again
_log = logging.getLogger("tp_headloss")


@dataclass(frozen=True)
class Linear:
    """How a linear head works. The hidden states' gradient is, by ``hidden_grad``: "all_reduce" (default: hidden states
    replicated over the shard's group, their gradient summed over it and replicated), "reduce_scatter" (sequence
    parallelism: each rank passes its [S/P, ..] of the first dimension, gathered here, and gets that part of the sum;
    labels and statistics are of all S) or "none" (this rank's part alone: the caller adds them up).

    These collectives depend on nothing else: with a group, "all_reduce" and "reduce_scatter" compute and reduce dH in
    every backward (of one sweep: in the forward, if gradients are enabled), even where this rank's hidden states need
    no gradient; for frozen ones say "none" on every rank, and no dH is computed. dW is not computed for a weight that
    requires no gradient.

    mode: "recompute" makes the logits twice, for any loss and any use of the statistics (four GEMMs); "one_sweep"
    computes gradients in the forward (three; `HeadLoss.linear` only, where its conditions are; an exchange per block);
    "auto" (default): one sweep where it is possible and the budget has room for blocks of 512 tokens, else recompute.
    Which one it was is logged (logger "tp_headloss", INFO).

    budget: bytes beyond inputs, dH and dW: a block of logits and, where sums over blocks are not what is returned, fp32
    memory for them (of dH or dW if these are of half precision). None: 128 MiB for a block and, in half precision, fp32
    memory for the smaller of dH and dW ("one_sweep": for dW), or what is needed at least. A rank whose shard is larger
    than an even share takes accordingly more; what autocast converts and "reduce_scatter" gathers is not counted.

    main_grad: add dW to ``weight.main_grad`` (fp32, Megatron's) instead of returning it, and set Megatron's flags.
    upstream: the gradient that will arrive at the loss of a one-sweep head (a number or a scalar tensor), where that is
    known (a loss scale, say): it is in the gradients before they are rounded, and with main_grad dW goes there during
    the forward, without memory in between; one backward must follow. Another gradient than that makes dH NaN.

    max_valid_tokens: tokens that are not ignored, or a bound on them, where the caller knows it: all others are dropped
    before the GEMMs, without a host synchronisation. If there are more, the rest of them become NaN, and so do losses.
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
    fp32 products are IEEE fp32 unless torch's own switch allows TF32. dH and dW are summed in fp32 and rounded once, dH
    before it is added to the other ranks'.
    Arguments otherwise as in `vocab_statistics`, errors, too; ValueError for a budget that is too small.
    """
    expect_instance("options", options, Options)
    expect_instance("linear", linear, Linear)
    linear = linear or Linear()
    if linear.mode == "one_sweep":
        raise ValueError(
            "mode='one_sweep' computes the gradient of a HeadLoss: use HeadLoss.linear, or 'recompute' here"
        )
    if linear.upstream is not None:
        raise ValueError(f"upstream is of a one-sweep HeadLoss.linear, got {linear.upstream}")
    with Agreement(options, shard) as agreement:
        hidden, weight, bias, shard = local_head(hidden, weight, bias, shard, linear.hidden_grad)
        labels, transform, teacher = (local(x, shard) for x in (labels, transform, teacher))
        agreement.on(
            "linear_vocab_statistics", shard, weight=weight, hidden=hidden_fact(hidden, linear), labels=labels,
            bias=bias, want=want, transform=transform, teacher=teacher, total_weight=total_weight,
            ignore_index=ignore_index, options=options, linear=linear,
        )  # fmt: skip
        if linear.max_valid_tokens is None:
            head = Head.of(
                *(hidden, weight, labels, bias, shard, want, transform, teacher, total_weight, ignore_index),
                *(options, linear),
            )
    if linear.max_valid_tokens is not None:
        picked = Picked(labels, ignore_index, linear.max_valid_tokens, options, shard.vocab_size)
        stats = linear_vocab_statistics(
            picked(hidden, "hidden states"), weight, picked(labels, "labels"), bias=bias, shard=shard, want=want,
            transform=picked.transform(transform), teacher=picked.teacher(teacher), total_weight=total_weight,
            ignore_index=ignore_index, options=options, linear=replace(linear, max_valid_tokens=None),
        )  # fmt: skip
        return picked.spread(stats, labels)
    return head.recompute(labels, options)


def hidden_fact(hidden: torch.Tensor, linear: Linear):
    """What ranks must agree on: hidden states, or, where each rank has its own part of them, shape and dtype."""
    return (list(hidden.shape), str(hidden.dtype)) if linear.hidden_grad == "reduce_scatter" else hidden


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

    @property
    def of_linear(self) -> LinearSpec:
        linear = self.linear
        weight_sums = self.weight.dtype.itemsize == 2 and not linear.main_grad
        return LinearSpec(self.inputs.logits.dtype, linear.budget or 0, weight_sums, linear.hidden_grad)

    @property
    def reduces(self) -> bool:
        """Whether there is a collective for the hidden states' gradient, whoever requires one."""
        return self.linear.hidden_grad != "none" and self.spec.world_size > 1

    def recompute(self, labels, options) -> VocabStatistics:
        _say("recompute")
        main_grad, everywhere = MainGrad(self.weight) if self.linear.main_grad else None, None
        if self.reduces and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            everywhere = self.hidden.new_empty(0).requires_grad_()
        values = LinearStatistics.apply(
            self.hidden, self.weight, *self.inputs[1:], main_grad, everywhere, self.spec, self.of_linear
        )
        return assembled(values, self.rows, labels, self.shard, (options or DEFAULTS).check)

    def one_sweep_tokens(self) -> int:
        """Of a block, the same on all ranks; 0 if the budget has no room for one (a ValueError if mode says so)."""
        linear, sizes, planner = self.linear, self.of_linear.sizes(self.hidden, self.spec), sweeps.one_sweep_tokens
        of_weight, forced = 4 * sizes.width * sizes.hidden, linear.mode == "one_sweep"
        own = of_weight if linear.main_grad and linear.upstream is None else 0
        least = of_weight if forced and (own or sizes.weight_sums) else 0
        tokens = sweeps.planned(planner, sizes, linear.budget, least, own)
        if tokens is None and forced:
            raise ValueError(sweeps.refusal(planner, sizes, linear.budget, own))
        return tokens or 0

    def one_sweep(self, labels, options, loss_of) -> tuple[VocabStatistics, OneSweepGradients]:
        """-> statistics without gradients, and those of hidden states, weight and bias.

        loss_of(statistics of some tokens [n], their slice of the flat order) -> that part of the loss [].
        """
        linear, spec, inputs, check = self.linear, self.spec, self.inputs, (options or DEFAULTS).check
        tokens, flat_labels, upstream = self.one_sweep_tokens(), inputs.labels, linear.upstream
        if isinstance(upstream, torch.Tensor):
            upstream = upstream.detach().clone()  # the caller may change it
        else:  # filled there, where a copy would wait for the device
            upstream = torch.full((), 1.0 if upstream is None else upstream, device=self.hidden.device)
        direct = linear.main_grad and linear.upstream is not None
        if check:  # before anything is added to a main_grad
            check_range(labels, spec.ignore_index, spec.vocab_size)
        _say("one sweep")

        def objective(values, flags, here):
            leaves = [row.detach().requires_grad_() for row in values]
            by_name, _ = named(leaves, flags, True, spec.want)
            # a checkpoint around the head must not see this graph, or it would compute everything again
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                stats = {name: by_name.get(name) for name in OUTPUTS if name != "owners"}
                stats = VocabStatistics(**stats, labels=flat_labels[here], vocab_size=spec.vocab_size)
                loss = loss_of(stats, here)
            if not loss.requires_grad:
                return kernel_grads({"lse": torch.zeros_like(leaves[0])})
            if here.start == 0 and _depends_on_others(loss, leaves):
                raise ValueError(
                    "a tokenwise term depends on something else that requires a gradient, which one sweep does not "
                    "compute: use mode='recompute'"
                )
            names = [name for name in by_name if name in DIFFERENTIABLE]
            grads = torch.autograd.grad(loss, [by_name[n] for n in names], upstream.to(loss.dtype), allow_unused=True)
            return kernel_grads(dict(zip(names, grads)))

        wanted = sweeps.Gradients(
            self.hidden.dtype if self.hidden.requires_grad or self.reduces else None,
            (torch.float32 if linear.main_grad else self.weight.dtype) if self.weight.requires_grad else None,
            None if inputs.bias is None or not inputs.bias.requires_grad else inputs.bias.dtype,
            self.weight.main_grad if direct and self.weight.requires_grad else None,
        )
        if direct:  # raises if there are any
            message = "a declared upstream with main_grad adds to it in the forward: this head cannot be checkpointed"
            with torch.autograd.graph.disable_saved_tensors_hooks(message):
                pass
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            operands = self.of_linear.operands(self.hidden.detach(), self.weight.detach(), spec)
            plain = Inputs(*(None if x is None else x.detach() for x in inputs))
            values, flags, of_hidden, out = sweeps.one_sweep(
                *operands, plain, spec, tokens, objective, wanted, linear.hidden_grad
            )
        by_name, _ = named(values.unbind(0), flags, True, spec.want)
        stats = assembled([by_name.get(name) for name in OUTPUTS], self.rows, labels, self.shard, check)
        of_weight = None if wanted.main_grad is not None else out.sum
        declared = None if linear.upstream is None else upstream
        return stats, OneSweepGradients((of_hidden, of_weight, out.bias), declared)

    def attached(self, loss: torch.Tensor, stats: VocabStatistics, found: OneSweepGradients):
        """A loss [] and the statistics of `one_sweep`, with the gradients that were found."""
        tensors = {name: x for name in OUTPUTS if isinstance(x := getattr(stats, name, None), torch.Tensor)}
        differentiable = sum(name in DIFFERENTIABLE for name in tensors)  # they come first
        main_grad = MainGrad(self.weight) if self.linear.main_grad else None
        loss, *passed = OneSweep.apply(
            self.hidden, self.weight, self.inputs.bias, loss, found.gradients, main_grad, found.declared,
            self.spec.backend, differentiable, *tensors.values(),
        )  # fmt: skip
        return loss, stats._replace(**dict(zip(tensors, passed)))


class OneSweepGradients(NamedTuple):
    gradients: tuple  # of hidden states, weight and bias, None where not wanted or in a main_grad
    declared: torch.Tensor | None  # the upstream gradient that is in them


def _same(x):
    return x


def _depends_on_others(loss: torch.Tensor, leaves) -> bool:
    """Whether its graph ends in anything but the leaves."""
    known, todo, seen = {id(leaf) for leaf in leaves}, [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) not in known:
            return True
        todo += [after for after, _ in node.next_functions]
    return False


def check_range(labels: torch.Tensor, ignore_index: int, vocab_size: int):
    """A ValueError that names the first label that is neither ignored nor an id."""
    bad = ((labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))).flatten().nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"label of token {token} (flat index) must be the ignore_index or in [0, {vocab_size}), got "
            f"{int(labels.flatten()[token])}; {len(bad)} such tokens"
        )


def of_teacher(teacher, function):
    """A teacher whose tensors are what function(tensor, name) makes of them."""
    tensors = {f.name: x for f in fields(teacher) if isinstance(x := getattr(teacher, f.name), torch.Tensor)}
    return replace(teacher, **{name: function(x, f"teacher.{name}") for name, x in tensors.items()})


class Picked:
    """The tokens that are not ignored, at most `count` of them, in their order; then ignored ones."""

    def __init__(self, labels: torch.Tensor | None, ignore_index: int, count: int, options, vocab_size: int):
        if labels is None:
            raise ValueError("max_valid_tokens drops tokens by their labels, got none")
        if options is not None and options.check:  # here, where a token's place is known
            check_range(labels, ignore_index, vocab_size)
        self.lead, valid = labels.shape, (labels != ignore_index).reshape(-1)
        self.valid = valid
        self.order = torch.sort((~valid).to(torch.uint8), stable=True).indices[:count]
        self.missing = valid.sum() > count  # tokens that should have been picked

    def __call__(self, x, name: str):
        """[.., *] -> [count, *]"""
        if not isinstance(x, torch.Tensor):
            return x
        if x.shape[: len(self.lead)] != self.lead:
            raise ValueError(f"{name} must begin with the labels' shape {list(self.lead)}, got {list(x.shape)}")
        return x.reshape(-1, *x.shape[len(self.lead) :]).index_select(0, self.order)

    def transform(self, transform: Transform | None) -> Transform | None:
        return transform and replace(transform, temperature=self(transform.temperature, "temperature"))

    def teacher(self, teacher):
        if isinstance(teacher, Teacher):
            raise ValueError("max_valid_tokens would copy the teacher's logits, got a Teacher: drop the tokens before")
        return teacher and of_teacher(teacher, self)

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
    if linear.main_grad and weight.requires_grad:
        if torch.compiler.is_compiling():
            raise ValueError("main_grad=True is for eager: under torch.compile, let dW be returned")
        main_grad = getattr(weight, "main_grad", None)
        fits = main_grad is not None and main_grad.shape == weight.shape and main_grad.is_contiguous()
        if not fits or main_grad.dtype != torch.float32 or main_grad.device != weight.device:
            got = None
            if main_grad is not None:
                got = main_grad.dtype, list(main_grad.shape), main_grad.stride(), main_grad.device
            raise ValueError(
                f"main_grad=True needs weight.main_grad, fp32, contiguous, {list(weight.shape)} on {weight.device}, "
                f"got {got}"
            )
    return dtype


_said: set[str] = set()


def _say(mode: str):
    """The first time at INFO, then at DEBUG."""
    if not torch.compiler.is_compiling():
        _log.log(logging.DEBUG if mode in _said else logging.INFO, "linear head: %s", mode)
        _said.add(mode)
