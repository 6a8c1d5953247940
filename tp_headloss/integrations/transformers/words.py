"""Keywords of a model's call that its ``**kwargs`` would swallow: our own in the wrong place, those
that others have for ours, and misspelt ones."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...spec.aliases import ALIASES, INSTALLATIONS, KEYWORDS

# argument of a HeadLoss's call -> what to write in a model's call
IN_CALL = {
    "denominator": "num_items_in_batch=",
    "inputs": "head_inputs=",
    "token_weight": (
        "labels of -100 for weights of 0, and for others a Term that multiplies its loss by an "
        "input of head_inputs="
    ),
}

OF_LOSSES = (*IN_CALL, "head_inputs", "ignore_index")  # words of a call that computes a HeadLoss
OF_MODELS = ("attention_mask",)  # words that a model may take though its signature lacks them
NAMES_NO_KEYWORD = ("value", "term", "metric")  # kinds of aliases
OF_TRL = "fused_lm_head"  # of a call of a model with fuse_log_probs, or with TRL's own head
NO_HEAD_LOSS = "nothing, because {} has no HeadLoss: use fuse_head"


def refuse_unread(
    installation: str, function: Callable, read: Collection[str], given: Mapping[str, Any]
):
    """Raise TypeError for a keyword that nothing reads and that was meant for this package.

    Args:
        installation: the name of the function that replaced a part of the model.
        function: whose parameters are the model's, with those of what wraps it.
        read: keywords that the replacement reads.
        given: the call's arguments by name.
    """
    taken = _parameters(function)
    for word, value in given.items():
        if word in taken or word in read or value is None:
            continue
        if (write := _what_to_write(installation, word, read)) is not None:
            raise TypeError(
                f"a model with {installation} got the keyword {word!r}, which nothing reads: write "
                f"{write}"
            )


def _parameters(function: Callable | None) -> set[str]:
    """Return the names that a function and every function below it take: what wraps a forward may
    read words of its own, which functools.wraps hides from its signature."""
    taken: set[str] = set()
    while function is not None:
        taken |= set(inspect.signature(function, follow_wrapped=False).parameters)
        function = getattr(function, "__wrapped__", None)
    return taken


def _what_to_write(installation, word, read) -> str | None:
    """Return what to write for a word that nothing reads, or None if it is not ours."""
    has_head_loss = "head_inputs" in read
    if word == OF_TRL and word not in read:
        return f"nothing, because {installation} has no log-probs: fuse_log_probs(model) does"
    if word in IN_CALL and has_head_loss:
        return IN_CALL[word]
    if word in KEYWORDS[installation]:
        return f"{installation}(model, {word}=..)"
    if word in KEYWORDS["HeadLoss"] and has_head_loss:
        return f"{installation}(model, HeadLoss({word}=..))"
    for other in INSTALLATIONS:
        if word in KEYWORDS.get(other, ()) and word not in OF_LOSSES:
            return f"nothing, because {installation} takes none: {other}(model, {word}=..) does"
    if (ours := _ours(word)) is not None:
        return _in_call_of_model(installation, ours, has_head_loss)
    if word in OF_LOSSES or word in KEYWORDS["HeadLoss"]:
        return NO_HEAD_LOSS.format(installation)
    if (meant := _meant(word, read)) is None:
        return None
    return f"{meant}=" if meant in read else _what_to_write(installation, meant, read)


def _ours(word: str) -> str | None:
    """Return what is written here for somebody else's keyword of a loss, a call of one for
    preference, or None."""
    if word in OF_MODELS:
        return None
    found = [alias for alias in ALIASES if alias.name == word and alias.of not in NAMES_NO_KEYWORD]
    of_calls = [alias for alias in found if "HeadLoss" in alias.of or alias.of == "input"]
    return next((alias.ours for alias in (*of_calls, *found)), None)


def _in_call_of_model(installation: str, ours: str, has_head_loss: bool) -> str:
    """Return what to write in a call of a model, or at the installation, for what a call of a
    HeadLoss takes."""
    first = ours.split("=")[0]
    if first == "shard":
        return f"{installation}(model, {ours.removesuffix(', of the call')})"
    if ours == "labels=":
        return ours
    if not has_head_loss:
        return NO_HEAD_LOSS.format(installation)
    if first == "token_weight":
        return IN_CALL["token_weight"]
    if first in ("logits", "hidden", "weight", "transform") or first.startswith("logits."):
        return (
            f"nothing, because logits are the model's own: HeadLoss(..)(logits, labels) has {ours}"
        )
    if ours.startswith("'"):
        return f"head_inputs={{{ours}: ..}}"
    if first.startswith(("inputs", "labels ")):
        return ours.replace("inputs=", "head_inputs=")
    if ours.startswith("HeadLoss("):
        return f"{installation}(model, {ours})"
    return f"{installation}(model, HeadLoss(..)) with {ours}"


def _meant(word: str, read: Collection[str]) -> str | None:
    """Return the word of a call that a misspelt or shortened one means, or None."""
    longer = [name for name in read if "_" in word and name.startswith(f"{word}_")]
    close = difflib.get_close_matches(word, [*read, "head_inputs", OF_TRL], 1, 0.75)
    return next(iter((*longer, *close)), None)
