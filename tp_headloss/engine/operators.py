"""Registered operators, so that `torch.compile` sees opaque, shape-inferable calls.

They take the fields of `Tensors`, `Facts` and `LinearFacts`, plain values from which their schemas
are made. Their namespace is the name of the package, which is another one where a second copy of it
is imported under another name, as from a kernels repository.
"""

import functools
import typing

import torch

from ..ranks import comm
from ..spec.checks import expect_no_gradient
from ..statistics import MaybeNone
from . import passes
from .backend import load_backend
from .request import Facts, Request, Tensors, accumulation_dtype

NAMESPACE = __name__.partition(".")[0]
OPS = getattr(torch.ops, NAMESPACE)

_TYPES = {
    torch.Tensor: "Tensor",
    torch.Tensor | MaybeNone: "Tensor?",
    int: "int",
    float: "float",
    str: "str",
    bool: "bool",
    tuple[str, ...]: "str[]",
    torch.dtype: "ScalarType",
}


def schema_of(record, leave_out: tuple[str, ...] = ()) -> str:
    """The fields of a NamedTuple as the arguments of an operator's schema."""
    hints = typing.get_type_hints(record)
    return ", ".join(
        f"{_TYPES[hints[name]]} {name}" for name in record._fields if name not in leave_out
    )


def fields_of(*records) -> list:
    """The values of records as an operator takes them."""
    return [
        list(field) if isinstance(field, tuple) else field for record in records for field in record
    ]


def register(name: str, arguments: str, result: str, real, fake, *records):
    """Define an operator whose last arguments are the fields of records; real and fake get the
    records."""

    def rebuilding(function):
        def operator(*args):
            built = []
            for record in reversed(records):
                args, fields = args[: -len(record._fields)], args[-len(record._fields) :]
                built.append(
                    record(
                        *(tuple(field) if isinstance(field, list) else field for field in fields)
                    )
                )
            return function(*args, *reversed(built))

        return operator

    def without_gradient(*args):
        # the bridges of autograd call operators without gradients, a program of torch.export does
        # not
        if torch.is_grad_enabled():
            expect_no_gradient(*args)
        return rebuilding(real)(*args)

    schema = ", ".join([arguments, *map(schema_of, records)])
    torch.library.define(f"{NAMESPACE}::{name}", f"({schema}) -> {result}")
    torch.library.impl(f"{NAMESPACE}::{name}", "default", without_gradient)
    torch.library.register_fake(f"{NAMESPACE}::{name}", rebuilding(fake))


def can_skip_dispatch(tensor) -> bool:
    """True in plain eager mode, where calling the implementation directly saves the operator's
    overhead."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def _statistics(*args):
    *tensors, facts = args
    return passes.statistics(Request.of(tensors, facts))


def _statistics_fake(*args):
    *tensors, facts = args
    request = Request.of(tensors, facts)
    logits = request.tensors.logits
    return request.layout.empty_outputs(logits, logits.shape[0], accumulation_dtype(logits.dtype))


def statistics(request: Request) -> list[torch.Tensor]:
    """[merged rows [R, N], values [K, N], *flags [N]]; see `passes.statistics`."""
    if can_skip_dispatch(request.tensors.logits):
        return passes.statistics(request)
    return OPS.statistics(*request.tensors, *fields_of(request.facts))


def _logits_gradient(*args):
    *tensors, merged, grads, facts = args
    request, out = Request.of(tensors, facts), torch.empty_like(tensors[0])
    passes.write_gradient(out, request, merged, dict(zip(request.layout.gradients, grads)))
    return out


def logits_gradient(request: Request, merged, grads: dict, *loss) -> torch.Tensor:
    """d loss / d logits; grads and loss as in `passes.write_gradient`."""
    if loss or can_skip_dispatch(merged):
        out = torch.empty_like(request.tensors.logits)
        passes.write_gradient(out, request, merged, grads, *loss)
        return out
    given = [grads.get(name) for name in request.layout.gradients]
    return OPS.logits_gradient(*request.tensors, merged, given, *fields_of(request.facts))


def _distinct(name: str, *args):
    return getattr(load_backend(args[-1]), name)(*args[:-1])


def distinct_ids(name: str, *args):
    """A call's lists of ids as backends take them, by "entries" or "known_sets" of the `backend`
    named last."""
    if can_skip_dispatch(args[0]):
        return _distinct(name, *args)
    return getattr(OPS, name)(*args)


def _entries_fake(ids, log_probs, *_):
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return torch.empty_like(ids, dtype=torch.int32), torch.empty_like(log_probs, dtype=dtype)


def _gather_tokens(x, world_size, group_name):
    gathered = comm.gather_parts(x, world_size, group_name)
    return x.clone() if gathered is x else gathered


if hasattr(OPS, "statistics"):
    raise ImportError(
        f"{NAMESPACE} must be imported once in a process, whose operators torch keeps, and it was "
        "already imported in this one: restart the process"
    )
_TENSORS = schema_of(Tensors)
register("statistics", _TENSORS, "Tensor[]", _statistics, _statistics_fake, Facts)
register(
    "logits_gradient",
    f"{_TENSORS}, Tensor merged, Tensor?[] grads",
    "Tensor",
    _logits_gradient,
    lambda logits, *_: torch.empty_like(logits),
    Facts,
)
register(
    "entries",
    "Tensor ids, Tensor log_probs, Tensor? scales, float scale, bool renormalize, int vocab_size, "
    "str backend",
    "(Tensor, Tensor)",
    functools.partial(_distinct, "entries"),
    _entries_fake,
)
register(
    "known_sets",
    "Tensor ids, Tensor spans, int vocab_size, SymInt? most, str backend",
    "(Tensor, Tensor)",
    functools.partial(_distinct, "known_sets"),
    lambda ids, spans, *_: (torch.empty_like(ids, dtype=torch.int32), torch.empty_like(spans)),
)
register(
    "gather_tokens",
    "Tensor x, int world_size, str group_name",
    "Tensor",
    _gather_tokens,
    lambda x, size, _: x.new_empty(size * x.shape[0], *x.shape[1:]),
)
register(
    "reduce_tokens",
    "Tensor x, str how, int world_size, str group_name",
    "Tensor",
    lambda x, *how: comm.reduce_hidden(x.clone(memory_format=torch.contiguous_format), *how)(),
    lambda x, how, size, _: x.new_empty(
        x.shape[0] // (size if how == "reduce_scatter" else 1), *x.shape[1:]
    ),
)
