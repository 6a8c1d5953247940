"""Values that a line takes, and values that it rules out, by what is wrong with them."""

import math

import torch

from tp_headloss import (
    Linear,
    Sequences,
    TopKTeacher,
    Transform,
    VocabStatistics,
    spec,
    vocab_statistics,
)

B, S, V = 2, 3, 3
MASK = torch.ones(B, S, dtype=torch.bool)
WANT = (
    "total",
    "entropy",
    "topk_forward_kl",
    "topk_reverse_kl",
    "topk_jsd",
    "topk_log_mass",
    "tail_log_mass",
)
WANT += "vocab_forward_kl", "vocab_jsd"
STATS = vocab_statistics(
    torch.zeros(B, S, V),
    torch.zeros(B, S, dtype=torch.long),
    want=WANT,
    teacher=TopKTeacher(
        torch.zeros(B, S, 1, dtype=torch.long), torch.full((B, S, 1), -0.4), renormalize=False
    ),
)
OF_TEACHER = ("forward_kl", "teacher_entropy", "total_variation", "overlap")  # a whole one
STATS = STATS._replace(**dict.fromkeys(OF_TEACHER, STATS.lse))
OBJECTS = {
    Linear: Linear(),
    Sequences: Sequences.from_mask(MASK),
    VocabStatistics: STATS,
    Transform: Transform(),
}
RELATED = {  # values that go with others
    "clip": (0.2, 0.2),
    "dual_clip": 3.0,
    "inplace": False,
    "hidden_grad": "none",
    "scale": 1.0,
    "softcap": 2.0,
    "support": "topk",
    "output_clamp": 10.0,
}
NAN = math.nan


def right(name, line):
    """A value that a line takes."""
    if isinstance(line, spec.AnyOf):
        return right(name, max(line.lines, key=lambda part: isinstance(part, spec.TensorLine)))
    if name in RELATED and not isinstance(line, spec.TensorLine):
        return RELATED[name]
    if isinstance(line, spec.TensorLine):
        sizes = {"..": (B, S), "pairs": (B,), "V": (V,), "width": (V,), "K": (2,), "H_t": (4,)}
        symbols = ("..",) if line.shape is None else line.shape
        shape = [n for symbol in symbols for n in sizes.get(symbol, (B,))]
        values = torch.full(shape, -0.5 if line.kind == "floating point" else 1.0)
        return (
            values.bool()
            if line.kind == "bool"
            else values.long()
            if "int64" in line.kind
            else values
        )
    if isinstance(line, spec.OneOf):
        return next(iter(line.names))
    if isinstance(line, spec.Instance):
        return OBJECTS[line.kind]
    if isinstance(line, spec.NumberLine):
        return max(line.low, 0.0) if line.high > 1 else (max(line.low, 0.0) + line.high) / 2
    if isinstance(line, spec.IntLine):
        return max(line.low, 1)
    if isinstance(line, spec.TupleOf) and line.around is not None:
        return line.around / 2, line.around * 2
    simple = {spec.Callables: lambda stats: stats.lse, spec.Names: (), spec.Text: "text"}
    return (
        simple[type(line)] if type(line) in simple else tuple([right("", line.line)] * line.count)
    )


def in_fp32(line):
    """True for a tuple of numbers, or of such tuples, that tensors in fp32 are compared with."""
    return in_fp32(line.line) if isinstance(line, spec.TupleOf) else getattr(line, "in_fp32", False)


def overflowing(line):
    """A right value of a tuple, but for its last number, which fp32 does not hold."""
    if not isinstance(line, spec.TupleOf):
        return 1e50
    return (*right("", line)[:-1], overflowing(line.line))


def wrong(line):
    """Values that a line rules out, by what is wrong with them."""
    if isinstance(line, spec.CheckedBy):
        # a group, or a parameter
        return {} if line.function is None else {"text": "text", "number": 7}
    if isinstance(line, spec.TupleOf) and line.count is None:
        return {"number": 7, "texts": ("a",), "None": None}
    if isinstance(line, spec.AnyOf):
        others = [wrong(part) for part in line.lines]
        shared = set(others[0]).intersection(*others[1:])  # what no line takes
        ruled_out = {
            k: v for k, v in others[0].items() if k in shared and not (v is None and line.optional)
        }
        for part, values in zip(line.lines, others):
            # of a range; others take no numbers
            if isinstance(part, spec.NumberLine) and part.says != "a number":
                ruled_out |= {
                    k: values[k] for k in ("nan", "low", "high", "overflow") if k in values
                }
        return ruled_out
    values = {"text": "text", "None": None, "object": object()}
    if isinstance(line, spec.TensorLine):
        good = right("", line)
        values |= {
            "list": [1.0],
            "number": 1.5,
            "complex": good.to(torch.complex64),
            "meta": good.to("meta"),
        }
        values |= {"sparse": good.to_sparse()}
        dtypes = {
            "floating point": "long bool",
            "bool": "float long",
            "int64 or int32": "float bool",
        }
        dtypes |= {"bool or integers": "float", "real numbers or bool": ""}
        values |= {dtype: getattr(good, dtype)() for dtype in dtypes.get(line.kind, "bool").split()}
        if line.constant:
            values["trained"] = good.clone().requires_grad_()
        if line.shape is not None:
            values["one dimension more"] = good[None]
        if line.shape is not None and good.dim() > 1:
            values["rows"] = good[:, 0]
            values |= {} if line.broadcasts else {"a column": good[:, :1]}
    elif isinstance(line, spec.OneOf):
        values |= {"unknown": "unknown", "number": 7} | (
            {} if line.names == (True, False) else {"flag": True}
        )
    elif isinstance(line, spec.Callables):
        values |= {"number": 7, "class": int}
    elif isinstance(line, spec.Names):
        values |= {"number": 7, "numbers": (1,)} | ({"unknown": ("unknown",)} if line.known else {})
    elif isinstance(line, spec.Text):
        values = {"None": None, "object": object(), "number": 7, "empty": ""}
    elif isinstance(line, spec.IntLine):
        values |= {"float": 1.5, "flag": True, "tensor": torch.tensor(1), "low": line.low - 1}
    elif isinstance(line, spec.Instance):
        values |= {"number": 1.5, "tensor": torch.ones(B, S)}
        if line.kind is Sequences:
            values["of other tokens"] = Sequences.from_mask(MASK[:, :2])
        values |= {
            f"no {field}": OBJECTS[line.kind]._replace(**{field: None}) for field in line.fields
        }
    else:
        values |= {"list": [], "flag": True, "complex": 1j, "tensor": torch.tensor(0.5)}
        numbers = {"nan": NAN}
        if isinstance(line, spec.NumberLine):
            numbers |= {"low": line.low - 1 - abs(line.low)} if line.low > -math.inf else {}
            numbers |= {"high": line.high + 1 + abs(line.high)} if line.high < math.inf else {}
            values |= numbers | ({"overflow": 1e50} if line.in_fp32 else {})
        else:
            values |= {"overflow": overflowing(line)} if in_fp32(line) else {}
            values |= {
                "one more": (*right("", line), 0.5),
                "number": 0.5,
                "texts": ("a",) * line.count,
            }
            if line.ordered:
                values |= {"unordered": (2.0, 1.0), "nan": (NAN, 1.0)}
                values |= {} if line.around is None else {"far": (0.2, 0.28), "above": (1.5, 2.0)}
    return values


# wrong beside another argument of the tokens alone
OF_OTHERS = "meta", "rows", "a column", "one dimension more"
