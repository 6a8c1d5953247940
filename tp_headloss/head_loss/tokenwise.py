"""`Options(check=True)`: whether a `tokenwise` term has the same values for some of the tokens as for
all of them, which a one-sweep linear head takes for granted."""

from collections.abc import Callable
from typing import Any

import torch

from ..linear_head.teacher import map_teacher_tensors, without_logits
from ..statistics import VocabStatistics

# of fp32, whose functions may round otherwise in tensors of another size
TOLERANCE = 1e-4


def expect_tokenwise(
    owner: str,
    function: Callable[[VocabStatistics, dict], torch.Tensor],
    value: torch.Tensor,
    stats: VocabStatistics,
    inputs: dict[str, Any],
):
    """Raise ValueError unless a term's function has the same values for tokens in one dimension, and
    for the last half of them in reverse order, as for all tokens [..].

    Whoever looks at a token's place, or at the tokens before or behind it, has others there.

    Args:
        function: of the statistics and all inputs of a call.
        value: [..], what it returned for all tokens.
    """
    shape = stats.lse.shape
    whole = [] if len(shape) == 1 else [shape.numel()]
    for count in [*whole, shape.numel() // 2]:
        if count == 0 or not shape:
            continue
        part = VocabStatistics(*[_some(x, count, shape) for x in stats])
        of_part = {name: _some(x, count, shape) for name, x in inputs.items()}
        sizes = f"for [{count}] tokens than for {list(shape)}"
        if count < shape.numel():
            sizes = f"for the last [{count}] tokens in reverse order than for {list(shape)}"
        remedy = (
            "a value must depend on its own token alone: leave out tokenwise and pointwise, or pass "
            "what is of all tokens as one of the inputs"
        )
        try:
            with torch.no_grad():
                found = function(part, of_part)
        except Exception as error:
            raise ValueError(
                f"{owner} is not tokenwise, got {type(error).__name__} {sizes}: {error}; {remedy}"
            ) from error
        expected, valid = _some(value.detach(), count, shape), part.valid
        if found is None or found.shape != expected.shape:
            got = list(getattr(found, "shape", []))
            raise ValueError(f"{owner} is not tokenwise, got {got} {sizes}; {remedy}")
        if not _are_close(found[valid], expected[valid]):
            raise ValueError(f"{owner} has other values {sizes}: not tokenwise; {remedy}")


def _some(x: Any, count: int, shape: torch.Size) -> Any:
    """Return tensors [.., *] of tokens [*shape], of a teacher or in a dict as well, as [count, *]:
    of all tokens in their order, or of the last ones in reverse order."""
    if isinstance(x, dict):
        return {name: _some(value, count, shape) for name, value in x.items()}
    if isinstance(x, torch.Tensor):
        if x.shape[: len(shape)] != shape:
            return x
        flat = x.flatten(0, len(shape) - 1)
        return flat if count == len(flat) else flat[-count:].flip(0)
    if hasattr(x, "temperature"):
        return map_teacher_tensors(without_logits(x), lambda tensor: _some(tensor, count, shape))
    return x


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True for equal values but for their rounding; NaN and infinities are equal to themselves."""
    size = expected.abs()
    largest = float(size[size.isfinite()].max()) if bool(size.isfinite().any()) else 0.0
    return torch.allclose(
        found.double(), expected.double(), TOLERANCE, TOLERANCE * largest, equal_nan=True
    )
