"""Registration of statistics of one's own: their names, then one try of their methods on a few
numbers.

Rows and statistics are known by name, in plain torch and in device functions, so that a name has
one owner.
"""

import contextlib
import inspect
import keyword
from typing import Annotated, Any

import torch

from .. import statistics
from ..spec import Instance, checked
from ..spec.aliases import hint
from ..statistics import (
    SOFTMAX,
    Family,
    VocabStatistics,
    Wanted,
    known_statistics,
    owners_of_rows,
)
from . import eager
from .later_ids import tensors_in
from .trial import GRADIENT, LABELS, Trial, has_own, try_family, try_later_ids
from .untried import (
    try_another_call,
    try_larger,
    try_ties,
    warn_of_last_bits,
    warn_of_rounding,
    warn_of_untried,
)
from .watched import watched

# Methods that return names, and how an error calls these names
ROWS = {"packet_rows": "packet rows", "merged_rows": "merged rows", "second_rows": "second rows"}
REPORTED = ("value_rows", "flags", "per_id", "second_rows")
# what the module of device functions has
OF_DEVICES = ("STATISTICS", "MERGE", "GRADIENT")
# names that carriers themselves give to rows
OF_CARRIERS = ("owners", "logits_at", "ids", "height")


@checked
def register_statistic(family: Annotated[Family, Instance(Family)]) -> None:
    """Make statistics of one's own known, as names for `want`, on logits and hidden states and with
    both backends.

    Their values are attributes of `VocabStatistics`. Ranks register the same families, in any
    order. The methods in plain torch are tried once on few numbers, small and large, where they
    must agree: a vocabulary in one part and in two, with a label and without, and the gradient with
    finite differences; those of a family with a table also at ids where the table has other numbers
    than at the first ones. A statistic that is constant on all of these numbers is a warning, and
    so are ids beyond a table that get its numbers, as by `%`, and a gradient that compares logits
    with those of the forward, which ``Linear("recompute")`` makes again. One that
    `family.gradients` does not name is a constant for every loss. On GPUs a call that wants the
    statistics needs `device`, the same methods as Triton functions, or
    ``Options(backend="torch")``.

    Args:
        family: what is summed over the vocabulary, how sums merge and what is differentiated, in
            plain torch, and for GPUs the same as device functions (`device`). The guide "Your own
            loss" explains each method, and `statistics.family` has the contract. Change none of its
            attributes afterwards.

    Returns:
        None.

    Raises:
        TypeError: no `Family`.
        ValueError: a statistic or a row with a name that is taken, a family without methods that
            its rows need, an attribute that requires a gradient, or methods that do not agree, with
            their names.

    Examples:
        >>> from energy_statistic import Energy  # examples/energy_statistic
        >>> register_statistic(Energy())
        >>> vocab_statistics(torch.tensor([[1.0, 2.0]]), want=("energy",)).energy
        tensor([5.])
    """
    _check_attributes(family)
    _check_statistics(family)
    _check_rows(family)
    _check_methods(family)
    _check_wanted(family)
    _check_device(family)
    tried = watched(family)
    # A context of a device makes each operation slower, so there is none where nothing needs it.
    # Tensors of inference mode do not say whether they were changed.
    elsewhere = torch.get_default_device().type != "cpu"
    on_cpu = torch.device("cpu") if elsewhere else contextlib.nullcontext()
    with on_cpu, torch.inference_mode(False), torch.no_grad():
        trial = Trial(tried, statistics.families_with(tried))
        _check_results(trial)
        try_family(trial)
        try_larger(trial)
        try_ties(trial)
        try_another_call(trial)
        try_later_ids(trial)
        warn_of_rounding(trial)
        warn_of_last_bits(trial)
        warn_of_untried(trial)
    statistics.add_family(family)


def _check_attributes(family: Family) -> None:
    """Raise ValueError for an attribute, or a part of one, that would get no gradient."""
    held = list(vars(family).items())
    for name, value in vars(family).items():
        held += tensors_in(name, value)
    for name, value in held:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(
                f"{type(family).__name__}.{name} gets no gradient, so it must not require one: "
                "detach it, or let the function of a Term read it"
            )


def _check_statistics(family: Family) -> None:
    """Raise ValueError unless a family's statistics have names that nothing else has."""
    for field in ("statistics", "gradients", "packet", "merged"):
        names = getattr(family, field)
        if not isinstance(names, tuple) or not all(map(_is_name, names)):
            others = [x for x in names if not _is_name(x)] if isinstance(names, tuple) else []
            said = f": {others[0]!r} cannot be the name of an attribute" if others else ""
            raise ValueError(
                f"{type(family).__name__}.{field} must be a tuple of names such as ('energy',), "
                f"got {names!r}{said}"
            )
    if not family.statistics:
        raise ValueError(
            f"{type(family).__name__}.statistics must not be empty, got (): the names that `want` "
            "may hold, such as ('energy',)"
        )
    own = _reported(family)
    added = [known for known in statistics.FAMILIES if known not in statistics.BUILT_IN]
    of_added = {name for known in added for name in _reported(known)}
    of_package = {name for known in statistics.BUILT_IN for name in _reported(known)}
    of_package |= {*known_statistics(), *OF_CARRIERS, *dir(VocabStatistics)} - of_added
    if taken := sorted(own & of_package):
        raise ValueError(
            f"family must have statistics with names of their own, got {list(family.statistics)}, "
            f"of which {taken} are names of the package itself: choose others, such as "
            f"'own_{taken[0]}'"
        )
    if taken := sorted(own & of_added):
        raise ValueError(
            f"family must have statistics with names of their own, got {list(family.statistics)}, "
            f"of which {taken} are taken: in one process, register a family once, and start "
            "another to change it"
        )
    if unknown := sorted(set(family.gradients) - own):
        raise ValueError(
            f"{type(family).__name__}.gradients must be among its statistics {sorted(own)}, got "
            f"{unknown}"
        )


def _check_rows(family: Family) -> None:
    """Raise ValueError for a row that another family has, whose numbers it would replace."""
    for method, kind in ROWS.items():
        own = owners_of_rows(method, (family,))
        others = owners_of_rows(method, statistics.FAMILIES)
        if taken := [row for row in own if row in others or row in OF_CARRIERS]:
            raise ValueError(
                f"the {kind} of {_described(family)} must have names of their own, got "
                f"{taken[0]!r}, {_owner_of_row(taken[0], others)}: "
                f"{_other_name(family, taken[0], others)}"
            )
        if wrong := [row for row in own if not _is_name(row)]:
            raise ValueError(f"the {kind} of {_described(family)} must be names, got {wrong[0]!r}")
    extrema = [
        row for row in owners_of_rows("packet_rows", (family,)) if row.endswith(("max", "shift"))
    ]
    if extrema and not has_own(family, "merge"):
        raise ValueError(
            f"{_described(family)} must have a `merge` of its own for the packet row "
            f"{extrema[0]!r}: a name that ends in max or shift is that of a maximum, others are "
            "sums"
        )


def _owner_of_row(row: str, others: dict[str, Family]) -> str:
    """Return the words of an error about whose a row is. others: the families of rows by name."""
    if row not in others:
        return "which every call has"
    owner = others[row]
    of_package = ", a row of the package's own" * (owner in statistics.BUILT_IN)
    return f"which {_described(owner)} has{of_package}"


def _other_name(family: Family, row: str, others: dict[str, Family]) -> str:
    """Return what to call a row whose name is taken: after the statistic, unless that is taken."""
    name = family.statistics[0]
    if name in others or name in OF_CARRIERS:
        return f"choose another name for it, such as 'own_{row}'"
    return (
        f"name rows after the statistic, ({name!r},), and where a class has several instances, in "
        "its __init__"
    )


def _check_methods(family: Family) -> None:
    """Raise ValueError for a family without methods that its rows need."""
    own = {name for name in dir(Family) if has_own(family, name)}
    needed = ({"finish"}, True), ({"local"}, family.packet), (set(GRADIENT), family.gradients)
    missing = [names for names, used in needed if used and not own & names]
    if missing:
        said = ", no ".join(" or ".join(sorted(names)) for names in missing)
        raise ValueError(
            f"family {type(family).__name__} must have methods of its own, got no {said}"
            f"{_hint_of_missing(family, {name for names in missing for name in names})}"
        )


def _hint_of_missing(family: Family, names: set[str]) -> str:
    """Return what to write where methods are missing: the name of one that is misspelt, or that
    statistics have no gradient; "" if nobody knows."""
    for other in sorted({*dir(family)} - {*dir(Family)}):
        if said := hint(other, names):
            return f", but {other!r}{said}"
    if names & {*GRADIENT}:
        return ": write one of these, or gradients = () for statistics without a gradient"
    return ""


def _check_wanted(family: Family) -> None:
    """Raise ValueError for a family that leaves out a call which wants one of its statistics, or
    needs labels in calls without."""
    owner = f"{type(family).__name__}.wanted"
    for name in family.statistics:
        if not (found := family.wanted(Wanted(True, (name,)))):
            raise ValueError(
                f"{owner} must return True for a call with labels that wants {name!r}, got "
                f"{found!r}: write `return super().wanted(call)`"
            )
        if family.needs_label_logits and (found := family.wanted(Wanted(False, (name,)))):
            raise ValueError(
                f"{owner} must return False for a call without labels, which has no logits of "
                f"labels for needs_label_logits, got {found!r}: write "
                "`return call.has_labels and super().wanted(call)`"
            )


def _check_device(family: Family) -> None:
    """Raise ValueError for device functions that are no module. A property is read by calls that
    need them."""
    device = inspect.getattr_static(family, "device")
    if not isinstance(device, property) and not all(hasattr(device, x) for x in OF_DEVICES):
        raise ValueError(
            f"{type(family).__name__}.device must be a module that has {', '.join(OF_DEVICES)}, or "
            f"a property that returns one, got {device!r}"
        )


def _check_results(trial: Trial) -> None:
    """Raise ValueError if `merge` or `finish` return rows of other families, whose numbers they
    would replace."""
    family, request = trial.family, trial.request(LABELS)
    packets = torch.zeros(request.packets_shape, dtype=torch.float64)
    eager.local_statistics(packets, request)
    rows = dict(zip(request.layout.packet, packets.unbind(1)))
    merging = SOFTMAX.merging(rows, 1.0)
    _expect_packet_rows(family, family.rescale(rows, merging.drop, merging.factor))
    merged = family.merge(rows, merging)
    _expect_own(family, "merge", merged, ("packet_rows",))
    shift, sums = eager.merged_sums(packets, request.layout)
    joined, *_ = SOFTMAX.joined(shift, sums, request.tensors.labels, request.facts.packets, 1.0)
    values, kept = family.finish(family.join(sums, joined), joined)
    _expect_own(family, "finish", values, REPORTED)
    _expect_own(family, "finish", kept, ("merged_rows",))


def _expect_packet_rows(family: Family, found: dict) -> None:
    """Raise ValueError unless `rescale` returns rows of the family's packet alone."""
    packet = owners_of_rows("packet_rows", (family,))
    if others := [row for row in found if row not in packet]:
        raise ValueError(
            f"{type(family).__name__}.rescale must return the rows {list(packet)} of its packet "
            f"alone, got {others}, too: its argument has the rows of all families"
        )


def _expect_own(family: Family, method: str, found: dict, kinds: tuple[str, ...]) -> None:
    others = {row for kind in kinds for row in owners_of_rows(kind, statistics.FAMILIES)}
    # names of merged maxima
    shifts = {f"{row.removesuffix('max')}shift" for row in others if row.endswith("max")}
    if taken := sorted(found.keys() & {*others, *shifts, *OF_CARRIERS}):
        own = {row for kind in kinds for row in owners_of_rows(kind, (family,))}
        raise ValueError(
            f"{type(family).__name__}.{method} must return rows of its own, got {taken} of other "
            f"families, too: its argument has the rows of all; return {sorted(own)} alone"
        )


def _described(family: Family) -> str:
    return f"{type(family).__name__} ({', '.join(family.statistics) or 'every call'})"


def _reported(family: Family) -> set[str]:
    """Names of a family's statistics and of whatever else it reports."""
    return {
        *family.statistics,
        *(name for kind in REPORTED for name in owners_of_rows(kind, (family,))),
    }


def _is_name(name: Any) -> bool:
    """True for a name that an attribute can have."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and name[0] != "_"
        and not keyword.iskeyword(name)
    )
