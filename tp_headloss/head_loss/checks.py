"""Checks of the arguments of one `HeadLoss` call."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch

from ..arguments.sequences import SEQUENCE_REDUCTIONS, Sequences
from ..arguments.teachers import TopKTeacher
from ..call.dtensor import local_part
from ..call.given import Given
from ..call.request_of import expect_labels_of_tokens
from ..ranks.groups import have_common_ranks
from ..ranks.shard import VocabShard
from ..spec import (
    LABELS,
    SCALAR,
    TOKEN_WEIGHT,
    CheckedBy,
    Instance,
    Line,
    Sizes,
    TensorLine,
    sizes_of,
)
from ..spec.aliases import hint
from ..spec.checks import expect_dense, fits_fp32, is_number, refuse_float_labels
from ..spec.words import array_hint, shown
from ..statistics import AT_IDS, TOPK_TEACHER, names_with_beta
from .definition import HeadLossDefinition
from .distillation_terms import is_own_function, reads_tail
from .evaluation import StatisticsFunction
from .terms import Metric, Term
from .values import check_values, warn_of_other_entries

Inputs: TypeAlias = Annotated[Mapping[str, Any], CheckedBy("inputs of terms and metrics by name")]


class Call(NamedTuple):
    """Checked arguments of one call, with what follows from them. [..] is the labels' shape."""

    definition: HeadLossDefinition
    # [..], the ignore_index for tokens that a weight of 0 or the sequences' mask excludes
    labels: torch.Tensor
    token_weight: torch.Tensor | None  # [..], the caller's
    # [..], the caller's times those of a reduction by sequence, or of the labels
    loss_weight: torch.Tensor | None
    # [width], this rank's column weights of the statistic "total"
    total_weight: torch.Tensor | None
    # None: the mean divides by the sum of the valid tokens' weights
    denominator: torch.Tensor | float | None
    count: torch.Tensor | None  # type: ignore[assignment]  # hides tuple.count; number of sequences of a reduction by sequence; None: that of tokens
    inputs: dict[str, Any]  # tensors are expanded to [..]
    sequences: Sequences | None
    functions: list[StatisticsFunction]  # those that are summed together with the loss

    @property
    def ids(self) -> Any:
        """Ids [.., K] whose log-probs are asked for; None where "ids" is an input of other terms,
        or none."""
        return (
            self.inputs.get("ids") if any(name in self.definition.want for name in AT_IDS) else None
        )


def check_call(
    definition: HeadLossDefinition, given: Given, token_weight, denominator, inputs
) -> Call:
    """Check a loss's arguments. Raises TypeError or ValueError for wrong ones."""
    x, labels, shard = given.tokens, given.labels, given.shard
    expect_labels(labels, x, None)
    expect_labels_of_tokens(given)
    expect_token_weight(token_weight, labels, x)
    expect_denominator(denominator, definition.reduction, x.device)
    inputs = inputs or {}
    sequences = _checked_sequences(definition, inputs, labels)
    inputs = _checked_inputs(definition, inputs, labels, sequences)
    _expect_teacher_that_is_read(definition, inputs.get("teacher"))
    labels = _scored_labels(labels, token_weight, sequences, shard, definition.ignore_index)
    if definition.options is not None and definition.options.check:
        if isinstance(denominator, torch.Tensor):
            expect_denominator(float(denominator.detach()), definition.reduction, x.device)
        check_values(definition, labels, token_weight, denominator, inputs)
        warn_of_other_entries(definition, given.transform.temperature, labels, inputs)
    sizes: Sizes = {"V": (shard.vocab_size, "the vocabulary"), "device": (x.device, "logits")}
    for term in definition.terms:
        if term.class_weight is not None:
            TensorLine("real numbers", ("V",)).check("class_weight", term.class_weight, sizes)
        if isinstance(term.weight, torch.Tensor) and term.weight.is_meta and not x.is_meta:
            raise ValueError(
                f"the weight of term {term.name!r} must have a number, got a meta tensor: make terms "
                "outside of torch.device('meta')"
            )
    loss_weight, count = with_label_weight(definition, labels, token_weight), None
    if definition.reduction in SEQUENCE_REDUCTIONS:
        assert sequences is not None
        loss_weight, total = sequences.aggregate(definition.reduction)
        loss_weight = loss_weight if token_weight is None else loss_weight * token_weight
        denominator = total if denominator is None else denominator
        count = total / sequences.ranks
    total_weight = definition.total_weight
    if total_weight is not None:  # this rank's columns, with 0 for those of padding
        columns = total_weight[shard.start : shard.stop]
        total_weight = torch.nn.functional.pad(columns, (0, shard.width - columns.shape[0]))
    functions = definition.plan.summed[int(sequences is not None)]
    return Call(
        definition,
        labels,
        token_weight,
        loss_weight,
        total_weight,
        denominator,
        count,
        inputs,
        sequences,
        functions,
    )


def with_label_weight(
    definition: HeadLossDefinition, labels, token_weight: torch.Tensor | None
) -> torch.Tensor | None:
    """The caller's token weights [..] times the class weights of the labels, if tokens are weighed
    by them. That of a label outside of the vocabulary is 1, so that its NaN is in the loss."""
    class_weight = definition.plan.label_weight
    if class_weight is None:
        return token_weight
    known = (labels >= 0) & (labels < class_weight.shape[0])
    weight = torch.where(known, class_weight[torch.where(known, labels, 0).long()], 1.0)
    return weight if token_weight is None else weight * token_weight


def local_arguments(tokens, given: Given, token_weight, denominator, inputs):
    """Replace DTensors of a loss's arguments by this rank's part. tokens: as the caller gave them;
    given: local."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a dict of inputs by name, or None, got {shown(inputs)}")
    hidden_grad = "all_reduce" if given.linear is None else given.linear.hidden_grad
    local = partial(local_part, shard=given.shard, hidden_grad=hidden_grad, tokens=tokens)
    for name, x in (inputs or {}).items():  # before anyone reads sizes
        if isinstance(x, torch.Tensor):
            expect_dense(f"input {name!r}", x)
    inputs = {name: local(x) for name, x in (inputs or {}).items()}
    if isinstance(denominator, torch.Tensor):
        denominator = local(denominator, name="denominator")
    return local(token_weight), denominator, inputs


def replicated_facts(
    definition: HeadLossDefinition, token_weight, denominator, inputs
) -> dict[str, Any]:
    """A loss's arguments and options that must be equal on all ranks, by the names that `Agreement`
    reports."""
    return {
        "token_weight": token_weight,
        "denominator": denominator,
        "inputs": inputs,
        "terms": definition.terms,
        "metrics": definition.metrics,
        # by which a linear head chooses its way
        "requires_grad": trained_constants(definition, token_weight, denominator, inputs),
        "token_metrics": definition.token_metrics,
        "reduction": definition.reduction,
    }


def trained_constants(definition: HeadLossDefinition, token_weight, denominator, inputs) -> list:
    """Names of what a loss is computed from besides statistics, as far as it requires a gradient."""
    given = {"token_weight": token_weight, "denominator": denominator, **(inputs or {})}
    given |= {f"the weight of {term.name!r}": term.weight for term in definition.terms}
    return [k for k, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad]


def expect_labels(labels, x, token_weight):
    """Raise TypeError or ValueError for labels of another type, or none, and for token weights that
    do not fit them.

    x: logits or hidden states.
    """
    if labels is None:
        raise ValueError(
            "labels are needed, got None: they say which tokens count, also where no term uses a "
            "label's log-prob (any id will do); for statistics alone, use vocab_statistics or "
            "linear_vocab_statistics"
        )
    refuse_float_labels(x, labels)
    LABELS.check("labels", labels, {})
    expect_token_weight(token_weight, labels, x)


def expect_token_weight(token_weight, labels, x):
    """Raise TypeError or ValueError for token weights that do not fit the labels."""
    if token_weight is not None:
        TOKEN_WEIGHT.check("token_weight", token_weight, sizes_of("labels", x, labels.shape))


def expect_denominator(
    denominator, reduction: str, device: torch.device, name: str = "denominator"
):
    """Raise TypeError or ValueError unless it is None, a number or a scalar tensor, and goes with
    the reduction.

    device: of the logits. A tensor on another device is moved there, except from "meta", where it
    has no value. name: what the caller calls it.
    """
    if denominator is None:
        return
    if reduction in ("none", "sum"):
        raise ValueError(f"a denominator goes with a mean, got reduction={reduction!r}")
    if isinstance(denominator, torch.Tensor):
        SCALAR.check(name, denominator, {"device": (device, "logits")})
        if denominator.dtype in (torch.bfloat16, torch.float16):
            warnings.warn(
                f"{name} is {denominator.dtype}, which rounds counts (was it cast, as FSDP2's "
                "MixedPrecisionPolicy casts tensors that a module is given?): pass a number or a "
                "tensor of integers",
                stacklevel=3,
            )
    elif not is_number(denominator):
        said = shown(denominator, array_hint(denominator))
        raise TypeError(f"{name} must be a number or a scalar tensor, got {said}")
    elif denominator != 0 and not (denominator > 0 and fits_fp32(denominator)):
        raise ValueError(
            f"{name} must be at least 0 and a number that fp32 holds, got {denominator}"
        )


def _checked_sequences(definition: HeadLossDefinition, inputs, labels) -> Sequences | None:
    """Return the input "sequences" after checking it against the labels and the reduction; None if
    there is none."""
    if "sequences" not in inputs:
        if definition.reduction in SEQUENCE_REDUCTIONS:
            raise ValueError(
                f"reduction {definition.reduction!r} needs the input 'sequences', "
                f"inputs={{'sequences': Sequences.from_mask(..)}}, got inputs {sorted(inputs)}"
            )
        return None
    sequences = inputs["sequences"]
    Instance(Sequences).check(
        "the input 'sequences'", sequences, sizes_of("labels", labels, labels.shape)
    )
    if definition.options is not None and definition.options.check:
        sequences.check()
        if ignored := int((sequences.mask & (labels == definition.ignore_index)).sum()):
            raise ValueError(
                "the mask of sequences must leave out tokens whose label is ignored "
                f"({definition.ignore_index}), got {ignored} of them in it"
            )
    return sequences


def _checked_inputs(definition: HeadLossDefinition, inputs, labels, sequences) -> dict[str, Any]:
    """Return the inputs with tensors expanded to the labels' shape. Raises for missing and for
    unused ones."""
    needed = set(definition.plan.inputs)
    if not inputs and not needed:
        return {}
    _refuse_other_names(needed, set(inputs), definition.want)
    out = {}
    has_ids = any(name in definition.want for name in AT_IDS)
    # beside sequences, [K] may be a value for each of them
    wanted_ids = inputs.get("ids") if has_ids and sequences is None else None
    for name, value in inputs.items():  # teacher and sets are checked with the statistics
        is_of_ids = has_ids and (name == "ids" or _has_values_of_ids(value, labels))
        line = definition.plan.inputs.get(name)
        if is_of_ids or name in ("sequences", "teacher", "sets"):
            out[name] = value
            if isinstance(value, torch.Tensor):
                _expect_values_of_ids(name, value, inputs.get("ids"))
        elif line is None:
            out[name] = value
        else:
            _refuse_values_of_ids(name, value, labels, wanted_ids)
            out[name] = _per_token(name, value, labels, sequences, line)
    return out


def _expect_teacher_that_is_read(definition: HeadLossDefinition, teacher):
    """Raise TypeError for several teachers, and ValueError for a beta or a tail that no term or
    metric reads."""
    if isinstance(teacher, (list, tuple)) and not hasattr(teacher, "_fields"):
        raise TypeError(
            f"a call has one teacher, got {len(teacher)}: make a call for each, or, of "
            "probabilities q1 and q2 of the same tokens, Teacher(((q1 + q2) / 2).log())"
        )
    parts: tuple[Term | Metric, ...] = (*definition.terms, *definition.token_metrics)
    readers = [part.function for part in parts if "teacher" in part.inputs]
    is_topk = isinstance(teacher, TopKTeacher)
    beta = getattr(teacher, "beta", None)
    reads_beta = names_with_beta(definition.want) or any(map(is_own_function, readers))
    if beta is not None and not reads_beta:
        term = "TopKDistillation" if is_topk else "Distillation"
        raise ValueError(
            f"teacher.beta is read by {term}(divergence='jsd') and by functions of your own, got "
            f"beta={beta} and none of them: choose that divergence, or leave out beta"
        )
    if is_topk and teacher.tail_log_prob is not None and not any(map(reads_tail, readers)):
        raise ValueError(
            "teacher.tail_log_prob is read by TopKDistillation(support='tail') and by functions of "
            "your own, got none of them: choose that support, or leave out tail_log_prob and "
            "renormalize=False"
        )


def _refuse_other_names(needed: set[str], given: set[str], want: tuple[str, ...]):
    """Raise ValueError for inputs that are missing, and for those that nothing takes.

    want: the statistics that terms and metrics need.
    """
    missing, unused = needed - given, given - needed - {"sequences"}
    if not missing and not unused:
        return
    wrong = [f"missing {sorted(missing)}"] if missing else []
    made = {name: made for name, made in _inputs_of_statistics(want).items() if name in missing}
    if made:
        written = ", ".join(f"{name!r}: {value}" for name, value in made.items())
        wrong.append(f"write inputs={{{written}}}")
    if unused:
        wrong.append(f"unused {sorted(unused)}, which none of them takes")
    hints = {name: hint(name, needed, "input") for name in sorted(unused, key=str)}
    wrong += [f"{name!r}{said}" for name, said in hints.items() if said]
    if "teacher" in unused:
        wrong.append(
            "a teacher is taken by Distillation and its relatives, by metrics of its statistics, "
            "and by a term of your own with want=('forward_kl',) or another of them"
        )
    if "reference_log_prob" in unused:
        wrong.append(
            "a whole loss such as PPO(kl=0) has no KL and takes none, and PolicyMetrics(..) with "
            "reference=True alone"
        )
    raise ValueError(
        f"inputs must be {sorted(needed)} for these terms and metrics, got {sorted(given)}: "
        f"{'; '.join(wrong)}"
    )


def _inputs_of_statistics(want: tuple[str, ...]) -> dict[str, str]:
    """Return what to write for the inputs that have a class of their own, and for those of the
    statistics, by name."""
    made = {"teacher": "Teacher(..)", "sets": "IdSets(ids)", "sequences": "Sequences.from_mask(..)"}
    if any(name in want for name in TOPK_TEACHER):
        made["teacher"] = "TopKTeacher(ids, log_probs)"
    if any(name in want for name in AT_IDS):
        made["ids"] = "a tensor of ids [.., K]"
    return made


def _has_values_of_ids(value, labels) -> bool:
    """True for a tensor [.., K] of K values per token."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == labels.dim() + 1
        and value.shape[:-1] == labels.shape
    )


def _expect_values_of_ids(name: str, value: torch.Tensor, ids):
    """Raise ValueError for a tensor [.., K] of another K than that of the ids at which log-probs
    are asked for."""
    if isinstance(ids, torch.Tensor) and value.shape[-1:] != ids.shape[-1:]:
        raise ValueError(
            f"input {name!r} must have a value for each of a token's {ids.shape[-1]} ids, or one "
            f"per token {list(value.shape[:-1])}, got {list(value.shape)}"
        )


def _refuse_values_of_ids(name: str, value, labels, ids):
    """Raise ValueError for ids [.., K] whose log-probs nothing wants, and for values of K ids that
    are not those of each token.

    ids: those whose log-probs are asked for, if any.
    """
    if ids is None:
        if name == "ids" and _has_values_of_ids(value, labels):
            raise ValueError(
                f"'ids' [.., K] is for a term or metric with want=('log_probs_at',), got "
                f"{list(value.shape)} where nothing wants log_probs_at"
            )
        return
    lead, count = list(labels.shape), ids.shape[-1]
    shape = list(getattr(value, "shape", ()))
    fits = len(shape) <= len(lead) + 1 and shape[-1:] == [count]
    one_per_token = len(shape) == len(lead) and all(n in (1, m) for n, m in zip(shape, lead))
    if fits and not one_per_token and all(n in (1, m) for n, m in zip(shape[-2::-1], lead[::-1])):
        raise ValueError(
            f"input {name!r} must be {lead}, a value per token, or {[*lead, count]}, one for each of "
            f"its ids, got {shape}: pass its .expand({', '.join(map(str, [*lead, count]))})"
        )


def _per_token(name: str, value, labels, sequences, line: Line) -> torch.Tensor:
    """Broadcast an input to the labels' shape [..], or spread its value per sequence [B] over the
    tokens."""
    broadcasts = isinstance(line, TensorLine) and line.broadcasts
    shape = getattr(value, "shape", None)
    if (
        broadcasts
        and sequences is not None
        and shape is not None
        and len(shape) == 1
        and shape != labels.shape
    ):
        if shape == (len(sequences),):
            return sequences.spread(value)
        if shape != (1,):
            either = f"[{len(sequences)}], one per sequence, or {list(labels.shape)}, one per token"
            raise ValueError(f"input {name!r} must be {either}, got {list(shape)}")
    line.check(f"input {name!r}", value, sizes_of("labels", labels, labels.shape))
    # one for all tokens may be on the CPU
    return value.to(labels.device).expand(labels.shape)


def _scored_labels(
    labels, token_weight, sequences, shard: VocabShard, ignore_index: int
) -> torch.Tensor:
    """Return labels with the ignore_index where no loss is computed, in int64, which holds any
    ignore_index.

    A weight of 0 is a loss mask, unless trained; within sequences its token counts, and only its
    loss is left out.
    """
    if sequences is None:
        if token_weight is None or token_weight.requires_grad:
            return labels
        return torch.where(token_weight == 0, ignore_index, labels.long())
    groups = sequences.group, shard.group
    if None not in groups and have_common_ranks(*(group.group_name for group in groups)):
        raise ValueError(
            "sequences must be split over a context-parallel group or none, got a group with ranks "
            "that share the vocabulary, which hold the same tokens"
        )
    return torch.where(sequences.counted, labels.long(), ignore_index)
