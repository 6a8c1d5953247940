"""Triton's interpreter without what it does again and again for every operation.

The operations themselves stay the interpreter's own: what is kept here are patches, types and facts about types."""

import dataclasses
import functools
from types import SimpleNamespace


def speed_up():
    from triton.language import core
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _call_builtins_directly(interpreter)
    _keep_types(core)
    _skip_casts_between_equal_types(interpreter.TritonSemantic)

    # Every sum of 32-bit integers is formed in 64 bits, too, to be compared: no size of these tests comes near.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # A table of all types is built to look one up.
    numpy_type, known = interpreter._get_np_dtype, {}

    def numpy_type_once(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_type(dtype)
        return known[name]

    interpreter._get_np_dtype = numpy_type_once


def _patch_once(interpreter):
    """A launch patches triton.language and restores it, and every call of a device function looks for what is left to
    patch. Here nothing but the interpreter uses the language, so that it stays patched."""
    patch, patched = interpreter._patch_lang, set()
    stays = SimpleNamespace(restore=lambda: None)

    def patch_once(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch(fn)
        return stays

    interpreter._patch_lang = patch_once


def _call_builtins_directly(interpreter):
    """A patched builtin copied its keywords to call a wrapper that checks for the one that was added."""

    def patch(obj, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)  # of a tensor: no wrapper

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, functools.wraps(function)(call))

    interpreter._patch_attr = patch


def _keep_types(core):
    """Types of blocks, and what a tensor takes from its type, are made once."""
    make_type, make_tensor, unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
    types = {}

    def new_type(cls, element_ty, shape):
        key = element_ty.name, getattr(element_ty, "address_space", None), *map(unwrap_fast, shape)
        if key not in types:
            types[key] = object.__new__(cls)
            make_type(types[key], element_ty, shape)
        return types[key]

    def init_tensor(self, handle, type):
        parts = type.__dict__.get("of_tensors")
        if parts is None:
            make_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = parts

    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}

    def unwrap_fast(value):
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core.block_type.__new__, core.block_type.__init__ = new_type, lambda self, element_ty, shape: None
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrap_fast


def _skip_casts_between_equal_types(semantic):
    """Operands of one type are what their operation takes, but for divisions and pointers; a number beside a tensor of
    floats has the tensor's type."""
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def check_types(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if arithmetic_check and isinstance(lhs, self.tensor):
            if lhs.type is getattr(rhs, "type", None):
                if not div_or_mod and not lhs.dtype.is_ptr():
                    return lhs, rhs
            elif lhs.dtype.name in ("fp32", "fp64") and type(rhs) in (int, float):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_types(self, lhs, rhs):
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_types, broadcast_types
