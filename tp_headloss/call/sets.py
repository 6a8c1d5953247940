"""A call's sets and given ids: their checks, and what kernels take.

Also the check of a top-K teacher's values.
"""

import warnings

import torch

from ..arguments.id_sets import IdSets, flat_ids, masked_ids, ragged
from ..arguments.teachers import TopKTeacher
from ..engine.operators import distinct_ids
from ..engine.request import Facts, TokenOrder
from ..spec.checks import refuse_tokens
from ..statistics import OVER_SETS
from ..statistics.sets import rows_and_places


def validate_sets(sets: IdSets | None, labels, want, logits):
    """Raise TypeError or ValueError, from metadata, unless the sets fit logits [.., width]."""
    expect_both("sets", sets, OVER_SETS, want, "sets of ids, got none: sets=IdSets(ids)")
    if sets is None:
        return
    if "set_log_prob" in want and labels is None:
        raise ValueError("set_log_prob is the log-prob of a label, got no labels")
    if sets.spans is not None:
        sets.expect_tokens(logits.shape[:-1])


def expect_both(name: str, given, statistics, want, needed: str):
    """Raise ValueError if an argument is given and serves no statistic in want, or is missing.

    Args:
        statistics: those that the argument serves.
        needed: what to pass where it is missing.
    """
    wanted = [statistic for statistic in statistics if statistic in want]
    if given is None and wanted:
        raise ValueError(f"{wanted} need {needed}")
    if given is not None and not wanted:
        raise ValueError(f"{name} serve the statistics {statistics}, got none of them in want")


def set_tensors(
    sets: IdSets | None, lead, order: TokenOrder, facts: Facts
) -> dict[str, torch.Tensor]:
    """Return the tensors of sets as a request has them. lead: shape of the tokens."""
    if sets is None:
        return {}
    ids, spans = flat_ids(sets, lambda x: order.flatten(x.reshape(*lead, x.shape[-1])))
    most = None if sets.spans is not None else sets.ids.shape[-1]
    known = distinct_ids("known_sets", ids, spans, facts.vocab_size, most, facts.backend)
    return dict(zip(("sets", "set_spans"), known))


def check_sets(sets: IdSets, labels, ignore_index: int, vocab_size: int, has_labels: bool = True):
    """Raise ValueError with the first token whose set holds an unknown id or lacks its label.

    has_labels: False for a call without labels, where a set must not be empty instead.
    """
    ids, spans = flat_ids(sets, lambda x: x.reshape(labels.numel(), x.shape[-1]))
    row, place = rows_and_places(spans)
    labels = labels.reshape(-1)
    unknown = torch.zeros(len(spans), dtype=torch.bool, device=ids.device)
    unknown[row[ids[place] >= vocab_size]] = True
    if has_labels:
        unknown |= ~ragged(ids, spans).contains(labels)
    else:
        has_ids = torch.zeros_like(unknown)
        has_ids[row[ids[place] >= 0]] = True
        unknown |= ~has_ids

    def needed(token: int) -> str:
        return f" and its label {int(labels[token])}" if has_labels else ", one at least"

    refuse_tokens(
        (labels != ignore_index) & unknown,
        lambda token: (
            f"the set of token {token} (flat index) must hold ids below {vocab_size}"
            f"{needed(token)}, got {ids[slice(*spans[token].tolist())].tolist()[:20]}"
        ),
    )


# of K / V, the least that the K likeliest ids have, which even other ids seldom have less than
UNLIKELY = 0.1
# by which a teacher's probabilities may miss 1: they may have been rounded before they came here
MASS_ROUNDING = 0.01


def check_entries(teacher: TopKTeacher, labels, ignore_index: int, vocab_size: int):
    """Raise ValueError with the first token, if any, whose entries cannot be a teacher's.

    They cannot if one is at or beyond the vocabulary, or if their probabilities add up to more than
    1, as those of logits in place of log-probs mostly do. With a tail's they must add up to 1: else
    it is the tail of other entries, or of another temperature or base. A token without entries may
    have any tail. Without a tail, entries that add up to less than the likeliest ids can are a
    warning, if all tokens' do.
    """
    count = teacher.ids.shape[-1]
    given = teacher.log_probs.detach().reshape(-1, count)
    known = (masked_ids(teacher).reshape(-1, count) >= 0) & (given != -torch.inf)
    check_ids(teacher.ids, labels, ignore_index, vocab_size, "teacher.ids", known)
    known_log_probs = given.masked_fill(~known, -torch.inf)
    mass, rounding = _mass(known_log_probs)
    valid = labels.reshape(-1) != ignore_index
    refuse_tokens(
        valid & known_log_probs.isnan().any(1),
        lambda token: f"teacher.log_probs of token {token} (flat index) holds NaN",
    )
    refuse_tokens(
        valid & ~(mass - 1 <= MASS_ROUNDING + rounding.clamp(max=0.1)),
        lambda token: (
            f"teacher.log_probs of token {token} (flat index) must be log-probs, of probabilities "
            f"that add up to at most 1, got {float(mass[token]):.6g} from "
            f"{given[token].tolist()[:20]}"
        ),
        lambda token: _hint_of_entries(given[token][known[token]]),
    )
    if teacher.tail_log_prob is None:
        if not teacher.renormalize:
            _warn_of_unlikely_entries(mass, known.sum(1) / vocab_size, valid)
        return
    tail = teacher.tail_log_prob.detach().reshape(-1, 1)
    tail_mass, tail_rounding = _mass(tail)
    beyond = mass + tail_mass - 1
    allowed = MASS_ROUNDING + (rounding + tail_rounding).clamp(max=0.1)
    is_tail = (beyond <= allowed) & ((beyond >= -allowed) | ~known.any(1))
    refuse_tokens(
        valid & ~is_tail,
        lambda token: (
            f"teacher.tail_log_prob of token {token} (flat index) must be the log-prob of all other "
            f"ids, of probability {float((1 - mass[token]).clamp(min=0)):.6g} beside these entries, "
            f"got {float(tail[token]):.6g}, of {float(tail_mass[token]):.6g}"
        ),
        "; is it a natural logarithm, of these entries, at their temperature?",
    )


def _warn_of_unlikely_entries(mass: torch.Tensor, even: torch.Tensor, valid: torch.Tensor):
    """Warn where the entries of all tokens have fewer probability than the K likeliest ids can.

    mass, even: [n], the entries' probability, and what it is where all ids are equally likely.
    """
    counted = valid & (even > 0)
    if not counted.any() or (counted & (mass >= UNLIKELY * even)).any():
        return
    token = int(counted.nonzero()[0])
    warnings.warn(
        f"teacher.log_probs of token {token} (flat index) are of probabilities that add up to "
        f"{float(mass[token]):.3g}, and the likeliest ids have at least {float(even[token]):.3g}, "
        "as those of all other tokens: are these logits? If so, pass log-probs; entries that are "
        "unlikely ids are right",
        stacklevel=2,
    )


def _hint_of_entries(values: torch.Tensor) -> str:
    """Return what a token's entries may be whose probabilities add up to more than 1."""
    if (values < 0).any():
        return "; are these logits?"
    if (values > 1 + 1e-3).any():
        return "; are these logits, or negated log-probs, which are never above 0?"
    return "; are these probabilities? Pass their log()"


def _mass(log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums [n] of the probabilities of log-probs [n, K], and by how much they may be
    off.

    Rounding a log-prob l to a dtype changes its probability by a factor of up to 1 + eps * |l| / 2.
    """
    exact = log_probs.double()
    probs = exact.exp()
    changes = probs * exact.masked_fill(exact == -torch.inf, 0.0).abs()
    return probs.sum(1), torch.finfo(log_probs.dtype).eps * changes.sum(1)


def check_ids(
    ids: torch.Tensor,
    labels,
    ignore_index: int,
    vocab_size: int,
    name: str = "ids",
    known: torch.Tensor | bool = True,
):
    """Raise ValueError with the first token of whose known ids [.., K] one is no id."""
    ids = ids.reshape(labels.numel(), ids.shape[-1])
    refuse_tokens(
        (labels.reshape(-1) != ignore_index) & (known & (ids >= vocab_size)).any(1),
        lambda token: (
            f"{name} of token {token} (flat index) must be below {vocab_size}, got "
            f"{ids[token].tolist()[:20]}"
        ),
    )
