"""Comparison of the facts that ranks which make a call together must have in common.

`Agreement` exchanges them.
"""

from ..spec.checks import OTHER_BATCHES
from .own_ids import expect_own_ids

# of the error for sequences that ranks of their group do not have in common
OF_SEQUENCES = (
    ": these are the ranks of Sequences(.., group=), which must be the context-parallel group, "
    "whose ranks hold pieces of the same sequences, never the data-parallel one"
)


def compare_calls(facts: tuple[dict, ...]):
    """Raise ValueError on all ranks if their facts, a dict each, or their shards do not agree."""
    # first, because other versions may have other facts; those before 0.3 have none of it
    versions = [rank_facts.pop("version", "an older one") for rank_facts in facts]
    if len({*versions}) > 1:
        ranks_of = {
            version: [rank for rank, other in enumerate(versions) if other == version]
            for version in dict.fromkeys(versions)
        }
        told = " and ".join(f"{version} on ranks {ranks}" for version, ranks in ranks_of.items())
        raise ValueError(
            f"all ranks of the group must have the same version of tp_headloss, got {told}"
        )
    bounds = [rank_facts.pop("bounds") for rank_facts in facts]
    own = [rank_facts.pop("own") for rank_facts in facts]
    first = facts[0]
    for rank, other in enumerate(facts):
        _compare_with_first(first, other, rank)
    _expect_cover(bounds, first["vocab_size"][0])
    expect_own_ids(own)
    whole = [rank for rank, (_, _, tp_invariant) in enumerate(bounds) if tp_invariant]
    others = [rank for rank, (_, _, tp_invariant) in enumerate(bounds) if not tp_invariant]
    if whole and others:
        raise ValueError(
            "ranks must make their shards alike (all by from_group, say), got whole chunks of the "
            f"vocabulary, with known bounds of the others, on ranks {whole} of the group, "
            f"and bounds alone on ranks {others}"
        )


def _compare_with_first(first: dict, other: dict, rank: int, advice: str = ""):
    """Raise ValueError with the first fact that differs between rank 0 of the group and `rank`.

    advice: for the end of the error.
    """
    nothing = "nothing", 0
    for name in dict.fromkeys((*first, *other)):
        expected, checksum = first.get(name, nothing)
        found, other_checksum = other.get(name, nothing)
        if expected != found or checksum != other_checksum:
            said = found if expected != found else "other values"
            entry = ".".join(name.split(".")[:2])
            of = f" of {first[f'{entry}.name'][0]}" if f"{entry}.name" in first else ""
            advice = advice or OTHER_BATCHES * (name == "labels")
            raise ValueError(
                f"ranks must agree on {name}{of}: rank 0 of the group has {expected}, got {said} "
                f"on rank {rank}{advice}"
            )


def _expect_cover(bounds: list[tuple[int, int, bool]], vocab_size: str):
    """Raise ValueError unless shards [start, stop) cover the vocabulary once, in any order."""
    covered = 0
    for start, stop, _ in sorted(bound for bound in bounds if bound[0] < bound[1]):
        covered = stop if start == covered else -1
    if str(covered) != vocab_size:
        owned = [list(bound[:2]) for bound in bounds]
        raise ValueError(f"the shards of the group must cover [0, {vocab_size}) once, got {owned}")


def compare_sequences(facts: tuple[dict, ...]):
    """Raise ValueError on all ranks of the sequences' group if their facts do not agree."""
    for rank, other in enumerate(facts):
        _compare_with_first(facts[0], other, rank, OF_SEQUENCES)
