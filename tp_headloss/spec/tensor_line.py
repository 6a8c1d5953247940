"""`TensorLine`: the line of a tensor. It reads metadata, never values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .checks import expect_dense, is_number
from .words import array_hint

# symbol of a shape -> its size, and the name of the argument that set it; "shard": the shard, which
# knows why a tensor may have other columns or rows
Sizes: TypeAlias = dict[str, tuple[Any, str]]


def sizes_of(name: str, x: torch.Tensor, lead: Sequence[int], **others: Any) -> Sizes:
    """Sizes that the tokens [*lead] of a tensor set, its device, and others by their symbols."""
    known: Sizes = {"..": (tuple(lead), name), "device": (x.device, name)}
    return known | {symbol: (size, name) for symbol, size in others.items()}


DTYPES: dict[str, Callable[[torch.dtype], bool]] = {
    "floating point": lambda dtype: dtype.is_floating_point,
    "int64 or int32": lambda dtype: dtype in (torch.int64, torch.int32),
    "bool": lambda dtype: dtype == torch.bool,
    "bool or integers": lambda dtype: not dtype.is_floating_point and not dtype.is_complex,
    "real numbers or bool": lambda dtype: not dtype.is_complex,
    "real numbers": lambda dtype: not dtype.is_complex and dtype != torch.bool,
}

# what an object in the place of a tensor may have: of columns or rows of the vocabulary, of hidden
# states, and of values per token
COLUMN_PARTS = "weight", "logits"
HIDDEN_PARTS = "last_hidden_state", "hidden_states[-1], of a call with output_hidden_states=True"
TOKEN_PARTS = "weight", "log_prob", "logits"
OF_FUSED_HEAD = (
    ": a model with a fused head makes logits in eval() under torch.no_grad(), or without labels"
)
OF_TEACHER_HEAD = ": hidden states of the teacher? Pass TeacherHead(hidden, weight)"
OF_TEACHER_LOGITS = ": hidden states of the teacher? Pass Teacher(F.linear(hidden, its weight))"
CASTS = {"int64 or int32": ".long()", "real numbers": ".float()"}
OF_LIST = ": write torch.tensor(..), of tensors torch.stack(..)"
OF_UNEVEN_LISTS = (
    ": write x = torch.zeros(mask.shape); x[mask] = torch.tensor([a for row in .. for a in row]), "
    "with the mask of the tokens that the lists are of"
)
# .bool() would make True of labels of -100, and of the -inf of a mask that is added to scores
OF_A_MASK = ": of a mask of 0 and 1 pass mask != 0"
OF_LABELS = ", of labels labels != -100"
OF_LABEL_MASK = ": ids, not a mask (torch.where(mask, labels, -100), or mask.nonzero()[:, 0])"


def _hint_of_setter(x, lead, setters, shard) -> str:
    """Return what to pass where the tokens [*lead] are probably wrong, and not x: they were set by
    hidden states of this rank's tokens alone, or by an id for each row."""
    if lead == x.shape[:1] and "ids" in setters:
        sizes = ", ".join(map(str, x.shape))
        return f": for a sequence in each row pass ids[:, None].expand({sizes})"
    if not lead or "hidden states" not in setters:
        return ""
    ranks = getattr(shard, "world_size", 1)
    if ranks > 1 and x.shape[1:] == lead[1:] and x.shape[0] == ranks * lead[0]:
        return (
            ": of all tokens, beside sequence-parallel hidden states? Keep it, and pass "
            "linear=Linear(hidden_grad='reduce_scatter')"
        )
    return ""


def _is_uneven(rows) -> bool:
    """True for lists of different lengths in a list."""
    return all(isinstance(row, (list, tuple)) for row in rows) and len({*map(len, rows)}) > 1


@dataclass(frozen=True)
class TensorLine:
    """A tensor.

    Args:
        kind: name in `DTYPES`.
        shape: symbols, set by the first argument with one, and numbers; "..": any dimensions. None:
            not checked here.
        broadcasts: sizes of 1, or no dimension at all, will do.
        sharded: the dimension that is sharded on the vocabulary; None: replicated.
        constant: it gets no gradient, so that one that requires it is an error.
        detached: it is a constant to the function, whose call detaches it.
        hint: of the error for anything but a tensor, for numbers in the place of a mask or ids, and
            for several in the place of one.
        of_list: of the error for a tuple or list, in the place of `hint`.
        of_uneven_lists: of the error for lists of different lengths.
        of_mask: of the error for a mask in the place of ids.
        trained: of the error for a constant that requires a gradient.
        per_token: of the error for a value per sequence, one for all, or others [n], which must not
            be expanded.
    """

    kind: str
    shape: tuple[str | int, ...] | None = ("..",)
    broadcasts: bool = False
    sharded: int | None = None
    constant: bool = False
    detached: bool = False
    hint: str = ""
    of_list: str = ""
    of_uneven_lists: str = OF_UNEVEN_LISTS
    of_mask: str = OF_LABEL_MASK
    trained: str = ""
    per_token: str = ""

    @property
    def says(self) -> str:
        """Words for a table: shape, dtype and sharding, and whether it is detached."""
        if self.shape is None:
            shape = "a tensor of "
        elif self.shape == ():
            shape = "a scalar tensor of "
        else:
            shape = f"[{', '.join(map(str, self.shape))}] "
        constant = "constant " * self.detached
        sharded = " sharded on V" * (self.sharded is not None)
        broadcasts = ", or sizes of 1" * self.broadcasts
        return f"{constant}{shape}{self.kind}{sharded}{broadcasts}"

    def check(self, name: str, x: Any, sizes: Sizes):
        """Raise TypeError or ValueError unless x is such a tensor."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(x).__name__}{self._object_hint(x)}"
            )
        expect_dense(name, x)
        if not DTYPES[self.kind](x.dtype):
            raise TypeError(f"{name} must be {self.kind}, got {x.dtype}{self._dtype_hint(x)}")
        if self.constant and x.requires_grad:
            raise ValueError(f"{name} gets no gradient: pass {name}.detach(){self.trained}")
        if self.shape is not None:
            self._check_shape(name, x, sizes)
        # torch takes other scalars of the CPU
        if x.dim() or x.is_meta or (self.shape and not self.broadcasts):
            self._check_device(name, x, sizes)

    def _object_hint(self, x) -> str:
        """Return what to pass in the place of an object that is no tensor."""
        if said := getattr(type(x), "remedy", "") or array_hint(x):
            return said
        if self.broadcasts and is_number(x) and math.isfinite(x):
            return f": write torch.tensor({x})"
        parts: tuple[str, ...] = TOKEN_PARTS
        if self.sharded is not None:
            parts = COLUMN_PARTS
        elif "H" in (self.shape or ()):
            parts = HIDDEN_PARTS
        for part in parts:
            if hasattr(x, part.partition("[")[0]):
                return f": pass its .{part}"
        if self.sharded is not None and hasattr(x, "log_prob"):
            return ": its .log_prob is one number per token, not one per id of the vocabulary"
        if x is None and self.sharded == -1:
            return OF_FUSED_HEAD
        if self.shape in (("width",), ("V",)) and isinstance(x, (dict, list, tuple)):
            return f": write a tensor [{self.shape[0]}] of them, one number for each id"
        if type(x) in (list, tuple):
            if self.kind != "bool" and _is_uneven(x):
                return self.of_uneven_lists
            return self.of_list or self.hint or OF_LIST
        return self.hint

    def _dtype_hint(self, x) -> str:
        """Return what to pass in the place of a tensor of another dtype."""
        if x.dtype == torch.bool and self.kind == "int64 or int32":
            return self.of_mask
        is_several = self.shape == () and x.dim() > 0
        is_of_masks_or_ids = self.kind in ("bool", "int64 or int32")
        if self.hint and (is_several or (is_of_masks_or_ids and x.is_floating_point())):
            return self.hint
        if self.kind == "bool" and not x.is_complex():
            may_be_labels = "K" not in self._tail and not x.is_floating_point()
            return OF_A_MASK + OF_LABELS * may_be_labels
        is_weight = self.sharded == 0 and "H" in (self.shape or ())
        if is_weight and DTYPES["int64 or int32"](x.dtype):
            return ": are these labels? The weight [width, H] comes before them"
        if self.kind == "floating point" and self.shape == ():
            return ": one of integers stays whole when it is filled, write torch.tensor(1.0)"
        has_cast = self.kind in CASTS and not x.is_complex()
        return f": pass its {CASTS[self.kind]}" if has_cast else ""

    def _check_device(self, name, x, sizes):
        """Raise ValueError for another device, or for meta beside values if no shape says more."""
        if self.shape is not None:
            check_alike(name, "device", x.device, sizes)
        else:
            kind = "meta" if x.is_meta else "a device with values"
            check_alike(name, "kind of device", kind, sizes)

    def _check_shape(self, name, x, sizes):
        """Raise ValueError unless x has the sizes that are known; note those that it sets."""
        assert self.shape is not None
        setters = dict.fromkeys(sizes[symbol][1] for symbol in self.shape if symbol in sizes)
        tail = self._tail
        own_lead = tuple(x.shape[: max(x.dim() - len(tail), 0)])
        own_tail = dict(zip(tail, x.shape[len(own_lead) :]))
        lead = sizes.setdefault("..", (own_lead, name))[0] if ".." in self.shape else ()
        known = {symbol: sizes[symbol][0] for symbol in tail if symbol in sizes}
        numbers = {size: size for size in tail if isinstance(size, int)}
        values = own_tail | known | numbers
        expected = (*lead, *(values.get(symbol) for symbol in tail))
        if not self._fits(x.shape, expected):
            if self.broadcasts:
                raise ValueError(
                    f"{name} must broadcast to the tokens {list(expected)} with as many "
                    f"dimensions, got {list(x.shape)}: {self._broadcast_hint(x, expected)}"
                )
            shape = ", ".join(str(known.get(symbol, symbol)) for symbol in (*lead, *tail))
            fits = " to fit " * bool(setters) + " and ".join(setters)
            shard = sizes.get("shard", (None, ""))[0]
            wanted = (*lead, *((known | numbers).get(symbol) for symbol in tail))
            said = self._transposed_hint(x, wanted) or self._hidden_hint(x, expected, sizes)
            said = said or self._columns_hint(x, expected, shard)
            said = said or _hint_of_setter(x, lead, setters, shard)
            said = said or self._shape_hint(x, lead, expected)
            raise ValueError(f"{name} must have shape [{shape}]{fits}, got {list(x.shape)}{said}")
        for symbol, size in own_tail.items():
            if isinstance(symbol, str):
                sizes.setdefault(symbol, (size, name))

    @staticmethod
    def _broadcast_hint(x, expected) -> str:
        """Return what to pass in the place of a tensor that does not broadcast to the tokens.

        It is a value for each row of tokens, for each position in the rows, or, where all tokens
        are in one row, for each packed sequence.
        """
        row, position = (
            "a value per row is [B, 1]",
            "a value per position is [1, S], pass its [None]",
        )
        for_all = "a value for all tokens is []"
        if not expected:
            return for_all
        if x.dim() == 1 and len(expected) == 2 and len(x) == expected[1]:
            return f"{row}, and {position}" if len(x) == expected[0] else position
        is_flat = x.squeeze().dim() <= 1 or sum(n != 1 for n in expected) <= 1
        if is_flat and x.numel() == math.prod(expected):
            return f"pass its .reshape({', '.join(map(str, expected))})"
        is_one_row = math.prod(expected[:-1]) == 1
        if is_one_row and _may_be_packed(x.numel(), expected):
            rows = "[None]" * (len(expected) - 1)
            return f"one per packed sequence? Pass its .repeat_interleave(lengths){rows}"
        return for_all if len(expected) == 1 else row

    @property
    def _tail(self) -> tuple[str | int, ...]:
        """Symbols and numbers of the dimensions after those of the tokens."""
        return tuple(size for size in self.shape or () if size != "..")

    def _fits(self, shape, expected) -> bool:
        """Return True for the expected sizes, or, where it broadcasts, sizes of 1 or none."""
        if self.broadcasts and len(shape) == 0:
            return True
        if len(shape) != len(expected):
            return False
        return all(n == e or (self.broadcasts and n == 1) for n, e in zip(shape, expected))

    def _transposed_hint(self, x, wanted) -> str:
        """Return what to pass in the place of columns whose other order has the wanted sizes, of
        which None is any."""
        dims = x.dim()
        if not self._tail or self.sharded == 0 or dims < 2 or len(wanted) != dims:
            return ""
        other = (*x.shape[:-2], x.shape[-1], x.shape[-2])
        fits = all(size in (None, own) for size, own in zip(wanted, other))
        written = ".T" if dims == 2 else ".transpose(-1, -2)"
        return f": transposed? Pass its {written}" * fits

    def _hidden_hint(self, x, expected, sizes) -> str:
        """Return what to pass in the place of a teacher's hidden states, which have the tokens, and
        far fewer numbers for each than there are ids."""
        shard = sizes.get("shard", (None, ""))[0]
        is_of_teacher = self.sharded == -1 and ".." in (self.shape or ())
        if shard is None or not is_of_teacher or x.shape[:-1] != expected[:-1]:
            return ""
        size = x.shape[-1]
        if 2 * size >= shard.width or size == shard.valid_width:
            return ""
        is_of_head = sizes[".."][1].startswith("hidden states")
        return OF_TEACHER_HEAD if is_of_head else OF_TEACHER_LOGITS

    def _columns_hint(self, x, expected, shard) -> str:
        """Return what to pass in the place of a tensor with other columns, or rows, than the
        shard's, if that is known."""
        if shard is None or self.sharded is None or x.dim() != len(expected):
            return ""
        size = x.shape[self.sharded]
        fits = [n in (None, own) for n, own in zip(expected, x.shape)]
        fits.pop(self.sharded)
        if size == expected[self.sharded] or not all(fits):
            return ""
        has_rows = self.sharded == 0
        return shard.other_columns_hint(size, has_rows, is_vector=has_rows and x.dim() == 1)

    def _shape_hint(self, x, lead, expected) -> str:
        """Return what to pass in the place of a tensor of another shape, if that is likely."""
        is_vector = x.dim() == 2 and x.numel() == max(x.shape)
        # of a size that is not known the last dimension's, maybe 1, is expected
        if is_vector and not lead and len(expected) == 1 and expected[0] in (x.numel(), 1):
            return f": pass its .reshape({x.numel()})"
        if self.shape == () and x.numel() > 1:
            return self.hint
        if self.sharded == 0 and x.dim() == len(expected) == 2 and x.shape[0] == expected[0]:
            # without a shard, as many rows as there are is right
            transposed = " transposed? Pass its .t()," * (x.shape[0] == expected[1])
            return f":{transposed} or pass hidden states [.., {x.shape[1]}]"
        if lead != expected or not lead:
            return ""
        sizes = ", ".join(map(str, lead))
        same = [n for n in x.shape if n != 1] == [n for n in lead if n != 1]
        is_flat = 1 in (x.dim(), len(lead)) and x.numel() == math.prod(lead)
        if same or is_flat:
            return f": pass its .reshape({sizes})"
        if x.dim() == 2 and tuple(x.shape) == lead[::-1]:
            return ": transposed? Pass its .T"
        if self.kind == "int64 or int32" and tuple(x.shape[:-1]) == lead:
            return (
                ": several ids for each token are ids= of vocab_statistics(want=('log_probs_at',)), "
                "and of one-hot labels pass their .argmax(-1)"
            )
        if tuple(x.shape[:-1]) == lead and self.hint:
            return self.hint
        said = self._fewer_hint(x, lead, sizes)
        is_fewer = said or x.dim() == 1  # as a table with a value for each id
        return self.per_token if is_fewer and self.per_token else said

    def hint_of_other_tokens(self, x, lead: Sequence[int]) -> str:
        """Return what to pass in the place of a tensor that is not of the tokens [*lead], "" if
        nobody knows."""
        return self._shape_hint(x, tuple(lead), tuple(lead))

    def _fewer_hint(self, x, lead, sizes: str) -> str:
        """Return what to pass in the place of fewer values than tokens."""
        as_many = x.dim() == len(lead)
        if x.dim() == 0 or (as_many and all(n in (1, e) for n, e in zip(x.shape, lead))):
            return f": pass its .expand({sizes})"
        has_values = x.dim() == 1 and self.kind != "int64 or int32"
        return self._row_hint(len(x), lead, sizes) if has_values else ""

    @staticmethod
    def _row_hint(size: int, lead, sizes: str) -> str:
        """Return what to pass in the place of a value per row, or per packed sequence."""
        if size == lead[0]:
            rows = ", ".join([":"] + ["None"] * (len(lead) - 1))
            return f": pass its [{rows}].expand({sizes})"
        if size in (1, lead[-1]):
            return f": pass its .expand({sizes})"
        is_packed = _may_be_packed(size, lead)
        return ": one per packed sequence? Pass its .repeat_interleave(lengths)" * is_packed


def _may_be_packed(size: int, lead) -> bool:
    """Return True where so many values may be those of sequences that are packed into one row."""
    return max(lead) == math.prod(lead) >= 2 * size


def check_alike(name: str, symbol: str, device, sizes: Sizes):
    """Raise ValueError unless the device, or the kind of it, is that of the first tensor."""
    expected, first = sizes.setdefault(symbol, (device, name))
    if device != expected:
        kind = getattr(device, "type", device)
        expected_kind = getattr(expected, "type", expected)
        if kind != expected_kind:  # without numbers of devices: the same on all ranks
            device = kind
            expected = expected_kind
        raise ValueError(f"{name} must be on {expected} like {first}, got {device}")
