"""Names that verl, TRL, torch, Liger, flash-attention and Megatron have for ours.

A true synonym is taken where `checked` sees it; for every other name the error says what to write.
"""

import difflib
import itertools
import re
from collections.abc import Collection
from opcode import opmap
from types import FrameType

from .alias_policies import OF_POLICIES
from .alias_statistics import OF_STATISTICS
from .alias_table import WRITTEN, Alias
from .alias_terms import OF_TERMS

ROWS = (*WRITTEN, *OF_TERMS, *OF_POLICIES, *OF_STATISTICS)

# the end of names of log-probs
LOG_PROB = "log_prob"

# names of the arguments of `checked` and `described` functions
KEYWORDS: dict[str, Collection[str]] = {}
# functions of one call of a loss -> what to write for an argument that another of them takes
PLACES = {
    "HeadLoss": "HeadLoss(.., {}=..)",
    "HeadLoss.forward": "HeadLoss(..)(.., {}=..), an argument of the call",
    "HeadLoss.linear": "HeadLoss(..).linear(.., {}=..), an argument of the call",
}
# classes that users make by their class methods, and functions of which an argument is easily left
# out
MADE_BY = {
    "Sequences": "Sequences.from_mask(mask), .from_cu_seqlens(..) or .from_ids(..)",
    "VocabShard.from_group": "VocabShard.from_group(group, vocab_size), with None for one rank",
    "VocabShard.from_mesh": "VocabShard.from_mesh(mesh, vocab_size)",
    "HeadLoss.forward": "HeadLoss(..)(logits, labels)",
    "HeadLoss.linear": "HeadLoss(..).linear(hidden, weight, labels)",
    "HeadLoss.explain": "HeadLoss(..).explain(logits, labels)",
    "HeadLoss.explain_linear": "HeadLoss(..).explain_linear(hidden, weight, labels)",
    "sample": "sample(logits, seed=seed, positions=positions), positions being for each token a "
    "number that no other draw with this seed has, in a first one torch.arange(B * S).view(B, S)",
}
# functions of logits -> what to write of hidden states and a weight
OF_HIDDEN_STATES = {
    "log_probs": "linear_vocab_statistics(hidden, weight, labels, ..).log_prob",
    "vocab_statistics": "linear_vocab_statistics(hidden, weight, labels, ..)",
    "HeadLoss.forward": "HeadLoss(..).linear(hidden, weight, labels, ..)",
}
# parameter -> the record that it takes, whose own arguments may be given in its place
RECORDS = {
    "transform": "Transform",
    "rule": "SamplingRule",
    "options": "Options",
    "linear": "Linear",
    "head_loss": "HeadLoss",
}
# parts of a call of a loss, whose other parts take other arguments
OF_CALLS = {"Term", "Metric", "CausalLMLoss", "VocabParallelHead.forward", *PLACES}
# functions of integrations.transformers and .trl, each of which takes what another does not
INSTALLATIONS = ("fuse_head", "causal_lm_loss", "fuse_log_probs")


def _one_by_one(alias: Alias) -> list[Alias]:
    """Return an alias for each name of one that has several."""
    names = alias.name.split(", ")
    return [
        alias._replace(
            name=name,
            ours=alias.ours.replace("{}", name),
            write=alias.write.replace("{}", name),
        )
        for name in names
    ]


ALIASES = [alias for written in ROWS for alias in _one_by_one(written)]


def synonym(value: str, names: Collection[str]) -> str:
    """Return our name for exactly the same value, or the value itself."""
    if value in names:
        return value
    for x in ALIASES:
        is_synonym = x.name == value and x.of == "value" and not x.write
        # names of tokens are those of a reduction, which has both
        is_there = {"mean", "sum"} <= {*names} if x.name.startswith("token-") else x.ours in names
        if is_synonym and is_there:
            return x.ours
    return value


def hint(value, names: Collection[str], of: str = "value") -> str:
    """Return what to write in the place of a name that does not exist.

    It is for the end of an error, "" if nobody knows.
    """
    if not isinstance(value, str):
        return ""
    is_value = of == "value"
    number = re.search(r"\d+", value)
    # of "top10" first the name itself, then "topk", of any number; of "ref_logprobs" "ref_log_prob"
    lower = value.lower()
    spellings = (lower, re.sub(r"\d+", "k", lower), _with_log_prob(lower))
    for name, alias in itertools.product(spellings, ALIASES):
        is_meant = alias.name.lower() == name and alias.of == of
        needs_ours = is_value or (of == "input" and alias.write)
        if is_meant and (not needs_ours or alias.ours in names):
            ours = repr(alias.ours) if is_value else alias.ours
            write = alias.write or ours
            return f": write {write.replace('(k)', f'({number[0]})') if number else write}"
    spelled = {_with_log_prob(name.lower().replace("-", "_")): name for name in names}
    meant = _with_log_prob(lower.replace("-", "_"))
    close = difflib.get_close_matches(meant, spelled, 1, 0.75)
    if not close or not _are_of_one_policy(meant, close[0]):
        return ""
    return f": did you mean {spelled[close[0]]!r}?"


def hints(values: Collection[str], names: Collection[str], of: str = "value") -> str:
    """Return `hint` of one name, or of each of several by name."""
    return join_hints({value: hint(value, names, of) for value in sorted(values)})


def join_hints(said: dict[str, str]) -> str:
    """Return the only hint as it is, and each of several behind its name."""
    if len(said) == 1:
        return next(iter(said.values()))
    return "".join(f"; {name!r}{text}" for name, text in said.items() if text)


def is_from_import(frame: FrameType) -> bool:
    """Return True where a frame is at a ``from .. import ..``, which puts words of its own in the
    place of an AttributeError's."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def _with_log_prob(name: str) -> str:
    """Return a name in our spelling of log-probs: "old_log_prob" for "old_logprobs"."""
    return re.sub(r"log_?p(rob)?s?$", LOG_PROB, name)


def _are_of_one_policy(name: str, other: str) -> bool:
    """Return False for names of log-probs whose policies are not spelled alike, such as
    "vllm_log_prob" and "old_log_prob": one in the place of the other would be silently wrong."""
    if not (name.endswith(LOG_PROB) and other.endswith(LOG_PROB)):
        return True
    policies = [x.removesuffix(LOG_PROB).strip("_") for x in (name, other)]
    return bool(difflib.get_close_matches(policies[0], policies[1:], 1, 0.75))


def rows() -> list[str]:
    """Return the table as lines of a page."""
    out = ["| elsewhere | here | whose |", "|---|---|---|"]
    for x in ROWS:
        names = x.name.replace(", ", "`, `")
        is_synonym = x.of == "value" and not x.write
        ours = f"the same as `{x.ours}`" if is_synonym else f"`{x.write or x.ours}`"
        out.append(f"| `{names}`{_where(x)} | {ours} | {x.whose} |")
    return out


def _where(alias: Alias) -> str:
    """Return what a name is elsewhere, after the name; "" for a value."""
    if alias.of == "value":
        return ""
    if alias.of in ("term", "metric", "input"):
        return f" as {alias.of}"
    if alias.of == "want":
        return " in want"
    if alias.of == "package":
        return " of the package"
    return f"= of {alias.of}"
