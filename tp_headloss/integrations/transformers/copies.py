"""Copies of a model that has a head, and heads that somebody else installs on top of it.

A forward in the dict of a model is a bound method. pickle takes it for the method of the model's
class, a replica of `nn.DataParallel` shares the one that is bound to its original, and a library
that puts a forward of its own on top may never call it. In each case the model would have another
loss, without a word. So the head installs two more entries, `__reduce_ex__` (pickle, torch.save,
deepcopy) and `_replicate_for_data_parallel`, which give a copy the head, and a hook of the model's
body, which raises if the body is called past the head.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..hooks import location
from .forward import FUSED, head_below, is_of_trl, without_head_below
from .model_parts import body_of

# what a head puts into the dict of a model
ENTRIES = "forward", "__reduce_ex__", "_replicate_for_data_parallel"

_here = threading.local()  # .depth: forwards of heads that are running in this thread


@contextmanager
def inside():
    """A block in which the body of a model runs for its head."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1


def leads_past_head(model) -> bool:
    """Return True if the model's forward is neither a head nor its class's own, nor a wrapper that
    names one."""
    forward = vars(model).get("forward")
    while forward is not None and not hasattr(forward, FUSED):
        inner = getattr(forward, "__wrapped__", None)
        if inner is None:
            return True
        forward = inner
    return False


def _expect_inside(head, model, body, args):
    """Hook of a model's body. RuntimeError if another forward, which was installed on top of the
    head, calls it."""
    if getattr(_here, "depth", 0) or not leads_past_head(model) or was_taken_off(model):
        return
    forward, name = vars(model)["forward"], type(head).__name__
    write = (
        "install the head after that one, or .remove() it before; after a `del model.forward`, "
        ".remove() it and install it again"
    )
    if is_of_trl(forward):
        write = without_head_below(name)
    raise RuntimeError(
        f"{name} was installed on this {type(model).__name__}, and is not called: "
        f"{location(forward)}, put another forward on top: {write}"
    )


def watch_body(head, model):
    """Let the body of the model raise if it is called past the head."""
    body_of(model).register_forward_pre_hook(partial(_expect_inside, head, model))


def unwatch_body(model, head=None):
    """Undo `watch_body` of a head; None: of any head."""
    hooks = body_of(model)._forward_pre_hooks
    for key, hook in list(hooks.items()):
        is_ours = isinstance(hook, partial) and hook.func is _expect_inside
        if is_ours and (head is None or hook.args[0] is head):
            del hooks[key]


def was_taken_off(model) -> bool:
    """Return True for a model that has no head, though one may have left entries: `del
    model.forward` takes a head off, and TRL may have installed its own since."""
    forward = vars(model).get("forward")
    return forward is None or (is_of_trl(forward) and head_below(forward) is None)


def forget(model):
    """Remove what a head left that somebody took off by ``del model.forward``."""
    if not was_taken_off(model):
        return
    for name, function in (("__reduce_ex__", reduce), ("_replicate_for_data_parallel", replicate)):
        entry = getattr(vars(model).get(name), "__func__", None)
        if isinstance(entry, partial) and entry.func is function:
            del vars(model)[name]
    unwatch_body(model)


def replicate(head, model):
    """Return a replica of `nn.DataParallel` with the head. RuntimeError if its forward would be the
    original's."""
    if was_taken_off(model):
        forget(model)
        return type(model)._replicate_for_data_parallel(model)
    if not is_head_of(model):
        raise RuntimeError(
            f"nn.DataParallel copies a model on whose head {location(vars(model)['forward'])}, put "
            "another forward, which computes with the weights of the original: remove it, or use "
            "DistributedDataParallel"
        )
    replica = type(model)._replicate_for_data_parallel(model)
    vars(replica).update(head.entries_of(replica))
    return replica


def is_head_of(model) -> bool:
    """Return True if the model's forward is a head itself: nobody wrapped it."""
    forward = vars(model)["forward"]
    return hasattr(forward, FUSED) and not hasattr(forward, "__wrapped__")


def reduce(head, model, protocol):
    """Return what pickle and deepcopy make a copy of the model from: its class, its head and its
    attributes."""
    if was_taken_off(model):
        forget(model)
        model_class: Any = type(model)
        return model_class.__reduce_ex__(model, protocol)
    own = set(head.names) - (set() if is_head_of(model) else {"forward"})
    state = {name: value for name, value in vars(model).items() if name not in own}
    return _model_with_head, (type(model), _Carried(head, _why_not_pickled(head, model))), state


def _why_not_pickled(head, model) -> str | None:
    """Return why a pickled copy of the model would lack something, or None."""
    if not is_head_of(model):
        wrapper = location(vars(model)["forward"])
        return f"pickle loses what {wrapper}, put on top of the head: unwrap the model first (accelerate: unwrap_model)"
    if "forward" in head._before:
        return "pickle loses TRL's head, which this one replaced: .remove() it first, and install both where it is read"
    return None


class _Carried:
    """The head of a copied model: the same one in a deepcopy, a copy in what is pickled."""

    def __init__(self, head, problem: str | None = None):
        self.head, self.problem = head, problem

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        if self.problem is not None:
            raise RuntimeError(
                f"a model with a {type(self.head).__name__} cannot be pickled: {self.problem}"
            )
        return _Carried, (self.head,)


def _model_with_head(model_class, carried: _Carried):
    """Return a model without attributes besides its head."""
    model = model_class.__new__(model_class)
    carried.head.adopt(model)
    return model
