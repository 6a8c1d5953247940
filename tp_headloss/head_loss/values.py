"""`Options(check=True)`: values of the arguments of a `HeadLoss` call, and of its terms, which wait
for the device."""

import math
import warnings
from functools import partial

import torch

from ..call.not_finite import expect_finite
from ..spec.checks import refuse_tokens

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
