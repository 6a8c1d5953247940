"""`Options(check=True)`: values of the arguments of a `HeadLoss` call, and of its terms, which wait
for the device."""

import math
import warnings
from functools import partial

import torch

from ..arguments.teachers import TopKTeacher
from ..call.not_finite import expect_finite
from ..spec.checks import refuse_tokens
from ..statistics import AT_IDS

# inputs that are log-probs of the program that sampled the tokens
SAMPLED_BY = ("old_log_prob", "generator_log_prob")


def check_values(definition, labels, token_weight, denominator, inputs):
    """Raise ValueError for values of a loss's arguments that make it NaN, or are none of theirs."""
    is_valid = labels != definition.ignore_index
    _check_weights(definition.terms)
    for name, value in inputs.items():
        expect_finite(f"input {name!r}", value, is_valid)
    _warn_of_rounded(inputs)
    expect_finite("token_weight", token_weight, is_valid)
    _refuse_impossible(inputs, is_valid)
    if "sets" not in inputs:  # of one id, whose log-prob is 0
        _warn_of_zeros(inputs, is_valid)
    if isinstance(weight := inputs.get("rollout_weight"), torch.Tensor):
        refuse_tokens(
            (weight < 0) & is_valid,
            lambda i: (
                f"input 'rollout_weight' of token {i} (flat index) must be at least 0, got "
                f"{float(weight.flatten()[i]):g}"
            ),
            ": are these log-weights? Pass their exp()",
        )
    if isinstance(num_bytes := inputs.get("num_bytes"), torch.Tensor):
        _check_bytes(num_bytes, is_valid)
    if denominator is None and definition.reduction == "mean" and token_weight is not None:
        refuse_tokens(
            (token_weight < 0) & is_valid,
            lambda i: (
                f"token_weight of token {i} (flat index) must not be below 0 where a mean divides "
                f"by the weights' sum, got {float(token_weight.flatten()[i]):g}; with a "
                "denominator= it may be"
            ),
        )


def _check_weights(terms):
    """Raise ValueError for terms whose weight is a tensor that fp32 does not hold as a number."""
    for term in terms:
        if not isinstance(term.weight, torch.Tensor):
            continue
        number = float(term.weight.detach().float())
        if not math.isfinite(number):
            raise ValueError(
                f"the weight of term {term.name!r} must be finite in fp32, got {number:g}"
            )


def _warn_of_rounded(inputs):
    """Warn of recorded log-probs in half precision, whose rounding looks like a change of the
    policy."""
    for name, value in inputs.items():
        if not name.endswith("log_prob") or not isinstance(value, torch.Tensor):
            continue
        if value.dtype.itemsize < 4:
            warnings.warn(
                f"input {name!r} is {value.dtype}: keep log-probs in fp32, because differences of "
                "rounded ones are ratios and KLs of a policy that has not changed; a cast from "
                f"{value.dtype} does not bring back what was rounded",
                stacklevel=2,
            )


def _warn_of_zeros(inputs, is_valid: torch.Tensor):
    """Warn of recorded log-probs that are exactly 0 at tokens that count.

    A policy that is certain of a token has them, too, so they are no error.
    """
    for name, value in inputs.items():
        if not name.endswith("log_prob") or not isinstance(value, torch.Tensor):
            continue
        if count := int(((value == 0) & is_valid).sum()):
            warnings.warn(
                f"input {name!r} is exactly 0 at {count} of {int(is_valid.sum())} tokens that "
                "count: was it scored under another mask? Log-probs of ignored tokens are 0",
                stacklevel=2,
            )


def _refuse_impossible(inputs, is_valid: torch.Tensor):
    """Raise ValueError for log-probs of -inf of the program that sampled the tokens, and warn of
    those of a reference."""
    for name in (*SAMPLED_BY, "reference_log_prob"):
        value = inputs.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        bad = (value == -torch.inf) & is_valid
        if name in SAMPLED_BY:
            refuse_tokens(
                bad,
                partial(_impossible_at, name),
                ": a token that is not the sampler's own has to be ignored",
            )
        elif count := int(bad.sum()):
            warnings.warn(
                f"input {name!r} is -inf at {count} of {int(is_valid.sum())} tokens that count, "
                "which the reference never writes: was it scored over the same vocabulary?",
                stacklevel=2,
            )


def _impossible_at(name: str, token: int) -> str:
    return f"input {name!r} of token {token} (flat index) is -inf, which no sampled token has"


def warn_of_other_entries(definition, temperature, labels, inputs):
    """Warn of a term that reads both log-probs at ids and probabilities of a teacher's entries,
    where the ids or the student's temperatures differ, so that they do not add up to 1.

    temperature: of the call's `Transform`.
    """
    teacher = inputs.get("teacher")
    ids = inputs.get("ids")
    if not isinstance(teacher, TopKTeacher) or not isinstance(ids, torch.Tensor):
        return
    names = [term.name for term in definition.terms if _reads_ids_and_entries(term)]
    if not names:
        return
    reads = f"term {names[0]!r} reads 'log_probs_at' and statistics of a TopKTeacher's entries, "
    is_valid = labels != definition.ignore_index
    of_teacher = teacher.student_temperature_or_default
    if _differ(temperature, of_teacher, is_valid):
        warnings.warn(
            f"{reads}which are at two temperatures, of the Transform and of the teacher: write "
            "TopKTeacher(.., student_temperature=..) with that of the Transform",
            stacklevel=2,
        )
    counted = teacher.log_probs != -torch.inf
    counted = counted if teacher.mask is None else counted & teacher.mask
    entries = torch.where(counted, teacher.ids, -1)
    if entries.shape[:-1] != ids.shape[:-1] or ids.shape[:-1] != labels.shape:
        return  # an error of the statistics
    if bool(((_sorted(ids, entries) != _sorted(entries, ids)).any(-1) & is_valid).any()):
        warnings.warn(
            f"{reads}which are of other ids than the input 'ids': write TopKTeacher(ids, ..)",
            stacklevel=2,
        )


def _reads_ids_and_entries(term) -> bool:
    """Return True for a term that wants log-probs at ids and probabilities of a teacher's
    entries, or of everything else."""
    wants_mass = any(name in term.want for name in ("topk_log_mass", "tail_log_mass"))
    return wants_mass and any(name in term.want for name in AT_IDS)


def _differ(temperature, other, is_valid: torch.Tensor) -> bool:
    """Return True where temperatures, numbers or one per token, differ at a token that counts."""
    given = temperature, other
    both = [torch.as_tensor(x, dtype=torch.float32, device=is_valid.device) for x in given]
    if any(x.numel() != 1 and x.shape != is_valid.shape for x in both):
        return False  # an error of the statistics
    first, second = (x.reshape(()) if x.numel() == 1 else x for x in both)
    return bool(((first != second) & is_valid).any())


def _sorted(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return ids [.., K] in descending order, filled up with -1 to the number of the others."""
    known = ids.long().clamp(min=-1)
    more = max(0, others.shape[-1] - ids.shape[-1])
    padded = torch.nn.functional.pad(known, (0, more), value=-1)
    return padded.sort(-1, descending=True).values


def _check_bytes(num_bytes: torch.Tensor, is_valid: torch.Tensor):
    """Raise ValueError for bytes per token [..] that are negative, or all 0. One token may have
    none, such as the end of a text."""
    if num_bytes.shape != is_valid.shape:
        return  # the metric refuses it
    refuse_tokens(
        (num_bytes < 0) & is_valid,
        lambda i: (
            f"input 'num_bytes' of token {i} (flat index) must be at least 0, got "
            f"{float(num_bytes.flatten()[i]):g}"
        ),
    )
    if bool(is_valid.any()) and not bool((num_bytes * is_valid).any()):
        raise ValueError(
            "input 'num_bytes' must be above 0 for some token that is not ignored, got 0 for all"
        )


def expect_known_terms(functions, values, stats, token_weight):
    """Raise ValueError for the first token where a term is NaN, although its statistics are not.

    Args:
        functions: with their values [..], None for those that the reduction evaluates.
        token_weight: [..] or None. Tokens of weight 0 do not count.
    """
    counted = stats.valid if token_weight is None else stats.valid & (token_weight != 0)
    for function, value in zip(functions, values):
        if value is None:
            continue
        refuse_tokens(
            value.isnan() & counted,
            partial(_nan_at, function.owner),
            ": its statistics and inputs are not, so look at roots and logarithms of negative "
            "numbers, 0 / 0 and inf - inf",
        )


def _nan_at(owner: str, token: int) -> str:
    return f"{owner} is NaN at token {token} (flat index)"
