"""`Given`: the arguments of one call for statistics as one value.

First they are as the caller gave them, then this rank's part of them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch

from ..arguments.id_sets import IdSets
from ..arguments.linear import Linear
from ..arguments.options import DEFAULTS, NO_TRANSFORM, Options, Transform
from ..arguments.teachers import Teacher, TeacherHead, TopKTeacher
from ..spec import (
    HIDDEN,
    WEIGHT,
    Bias,
    CheckedBy,
    Instance,
    Labels,
    Line,
    Names,
    Sizes,
    TensorLine,
    TokenIds,
    TotalWeight,
    lines_of,
)
from ..spec.checks import expect_dense
from ..statistics import UNHEARD, known_statistics
from .dtensor import local_head, local_logits, local_part
from .subclasses import is_dtensor

ALWAYS = ("lse", "log_prob", "target_logit", "valid")  # of every call's statistics
# Lines of fields in a call, where the class says less
PER_TOKEN: dict[str, Line] = dict.fromkeys(
    ("temperature", "student_temperature"), TensorLine("real numbers")
)
FLAT_SETS: dict[str, Line] = {"ids": TensorLine("int64 or int32", ("all",))}
Want: TypeAlias = Annotated[
    tuple[str, ...], Names(known_statistics, f"; {ALWAYS} are always there", UNHEARD)
]


class Given(NamedTuple):
    """Arguments of one call. [..] is the shape of the tokens, width that of the shard."""

    logits: Annotated[Any, CheckedBy("[.., width], or None: made of hidden states")]
    labels: Labels | None = None
    shard: Annotated[Any, CheckedBy("a `VocabShard`, or None")] = None
    want: Want = ()
    transform: Transform = NO_TRANSFORM
    teacher: Teacher | TopKTeacher | TeacherHead | None = None
    sets: IdSets | None = None
    ids: TokenIds | None = None
    total_weight: TotalWeight | None = None
    ignore_index: int = -100
    options: Options = DEFAULTS
    hidden: Annotated[Any, HIDDEN] = None  # [.., H], or this rank's [S/P, .., H]
    weight: Annotated[Any, WEIGHT] = None
    bias: Bias | None = None
    linear: Annotated[Any, Instance(Linear)] = None  # None: a call on logits

    @classmethod
    def checked(cls, logits, labels, shard, want: Any, transform, options) -> Given:
        """Return the arguments with defaults in the place of None.

        Raises TypeError for options of another type.
        """
        transform = NO_TRANSFORM if transform is None else transform
        options = DEFAULTS if options is None else options
        LINES["options"].check("options", options, {})
        LINES["transform"].check("transform", transform, {})
        is_list = hasattr(want, "__iter__") and not isinstance(want, (str, torch.Tensor))
        names: Any = tuple(want) if is_list else want
        return cls(logits, labels, shard, names, transform, options=options)

    def check(self, sizes: Sizes, *names: str):
        """Raise TypeError or ValueError unless these arguments are what their lines say.

        So must be tensors that are fields of them.

        Args:
            sizes: of symbols of shapes, and the device, that are known; K is of each argument by
                itself.
        """
        for name in names:
            value = getattr(self, name)
            LINES[name].check(name, value, sizes)
            if value is None:
                continue
            within = {symbol: size for symbol, size in sizes.items() if symbol != "K"}
            others = PER_TOKEN if getattr(value, "spans", None) is None else FLAT_SETS
            owner = getattr(value, "called", "")
            for field, line in getattr(value, "lines", {}).items():
                x = getattr(value, field)
                if isinstance(x, torch.Tensor):
                    (others.get(field) or line).check(owner + field, x, within)

    @property
    def tokens(self) -> Any:
        """The tensor that the tokens are of: logits or hidden states."""
        return self.logits if self.linear is None else self.hidden

    @property
    def tokens_shape(self) -> list[int]:
        """Shape [..] of the tokens of all ranks, of a local call."""
        shape = list(self.tokens.shape[:-1])
        is_scattered = self.linear is not None and self.linear.hidden_grad == "reduce_scatter"
        if is_scattered and shape:  # [S/P, ..] of each rank
            shape[0] *= self.shard.world_size
        return shape

    def local(self) -> Given:
        """Return this rank's plain part of the arguments, with the shard that they imply."""
        for name in ("logits", "hidden", "weight", "labels", "bias"):  # before anyone reads sizes
            if isinstance(x := getattr(self, name), torch.Tensor):
                expect_dense("hidden states" if name == "hidden" else name, x)
        hidden_grad = "all_reduce" if self.linear is None else self.linear.hidden_grad
        logits = self.logits
        hidden = self.hidden
        weight = self.weight
        bias = self.bias
        if self.linear is None:
            logits, shard = local_logits(logits, self.shard)
        else:
            if not any(map(is_dtensor, (hidden, weight, self.labels))):  # else sizes are of others
                _expect_not_swapped(hidden, weight, self.labels, hidden_grad)
            hidden, weight, bias, shard = local_head(hidden, weight, bias, self.shard, hidden_grad)
            HIDDEN.check("hidden states", hidden, {})
            _expect_not_swapped(hidden, weight, self.labels, hidden_grad)
        local = partial(local_part, shard=shard, hidden_grad=hidden_grad, tokens=self.tokens)
        total_weight = local_part(self.total_weight, shard, name="total_weight", sharded=0)
        return Given(
            logits,
            local(self.labels),
            shard,
            self.want,
            local(self.transform),
            local(self.teacher),
            local(self.sets),
            local(self.ids),
            total_weight,
            self.ignore_index,
            self.options,
            hidden,
            weight,
            bias,
            local_part(self.linear, shard),
        )

    def facts(self) -> dict[str, Any]:
        """Arguments that ranks must agree on, by the names that `Agreement` reports."""
        return {name: x for name, x in self._asdict().items() if name != "shard" and x is not None}


def _expect_not_swapped(hidden, weight, labels, hidden_grad: str):
    """Raise TypeError or ValueError for two of them in each other's place; no tensors pass."""
    if not all(isinstance(x, torch.Tensor) for x in (hidden, weight, labels)):
        return
    if labels.is_floating_point():
        for name, x in {"weight": weight, "hidden states": hidden}.items():
            if not x.is_floating_point():
                raise TypeError(
                    f"labels must be int64 or int32, got {labels.dtype} (are labels and {name} "
                    "swapped?)"
                )
    tokens = labels.shape
    are_swapped = hidden.shape[:-1] != tokens == weight.shape[:-1]
    if are_swapped and hidden_grad != "reduce_scatter":
        said = f"{list(hidden.shape)} (are hidden states and weight swapped?)"
        raise ValueError(f"hidden states must be [*{list(tokens)}, H] for these labels, got {said}")


LINES = lines_of(Given)
