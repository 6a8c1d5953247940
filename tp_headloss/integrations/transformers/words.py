"""Keywords of a model's call that its ``**kwargs`` would swallow: our own in the wrong place, and
misspelt ones."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...spec.aliases import KEYWORDS

# argument of a HeadLoss's call -> what to write in a model's call
IN_CALL = {
    "denominator": "num_items_in_batch=",
    "inputs": "head_inputs=",
    "token_weight": (
        "labels of -100 for weights of 0, and for others a Term that multiplies its loss by an "
        "input of head_inputs="
    ),
}


def refuse_unread(
    installation: str, function: Callable, read: Collection[str], given: Mapping[str, Any]
):
    """Raise TypeError for a keyword that nothing reads and that was meant for this package.

    Args:
        installation: the name of the function that replaced a part of the model.
        function: whose parameters are the model's.
        read: keywords that the replacement reads.
        given: the call's arguments by name.
    """
    parameters = inspect.signature(function).parameters
    for word, value in given.items():
        if word in parameters or word in read or value is None:
            continue
        if (write := _what_to_write(installation, word, read, given)) is not None:
            raise TypeError(
                f"a model with {installation} got the keyword {word!r}, which nothing reads: write "
                f"{write}"
            )


def _what_to_write(installation, word, read, given) -> str | None:
    """Return what to write for a word that nothing reads, or None if it is not ours."""
    has_head_loss = "head_inputs" in read
    if word in IN_CALL and has_head_loss:
        return IN_CALL[word]
    if word in KEYWORDS[installation]:
        return f"{installation}(model, {word}=..)"
    if word in KEYWORDS["HeadLoss"] and has_head_loss:
        return f"{installation}(model, HeadLoss({word}=..))"
    if word in (*IN_CALL, "head_inputs", "ignore_index"):
        return f"nothing, because {installation} has no HeadLoss: use fuse_head"
    close = difflib.get_close_matches(word, [name for name in read if name not in given], 1, 0.75)
    return f"{close[0]}=" if close else None
