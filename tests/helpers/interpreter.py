"""Triton's interpreter without what it does again and again for every operation, and with bf16 and fp8 as
hardware rounds it.

Otherwise the operations stay the interpreter's own: what is kept here are patches, types and facts
about types."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np
import torch


def patch_interpreter():
    from triton.language import core
    from triton.runtime import interpreter

    _patch_once(interpreter)
    _call_builtins_directly(interpreter)
    _keep_types(core)
    _skip_casts_between_equal_types(interpreter.TritonSemantic)
    _check_sizes_quickly(interpreter)
    _sum_directly(interpreter)
    _round_to_nearest(interpreter)
    _expect_no_gaps(interpreter)

    # Every sum of 32-bit integers is formed in 64 bits, too, to be compared: no size of these tests
    # comes near.
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
    """A launch patches triton.language and restores it, and every call of a device function looks
    for what is left to patch. Here nothing but the interpreter uses the language, so that it stays
    patched."""
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
    """A patched builtin copied its keywords to call a wrapper that checks for the one that was
    added."""

    def patch(obj, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)  # of a tensor: no wrapper

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, functools.wraps(function)(call))

    interpreter._patch_attr = patch


def _keep_types(core):
    """Types of blocks, and what a tensor takes from its type, are made once."""
    make_type, make_tensor, unwrap = (
        core.block_type.__init__,
        core.tensor.__init__,
        core._unwrap_if_constexpr,
    )
    types = {}

    def new_type(cls, element_ty, shape):
        sizes = [size if type(size) is int else unwrap_fast(size) for size in shape]
        key = element_ty.name, getattr(element_ty, "address_space", None), *sizes
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

    plain = {
        int,
        float,
        bool,
        str,
        type(None),
        core.tensor,
        core.dtype,
        core.pointer_type,
        core.block_type,
    }

    def unwrap_fast(value):
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core.block_type.__new__, core.block_type.__init__ = (
        new_type,
        lambda self, element_ty, shape: None,
    )
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrap_fast


def _skip_casts_between_equal_types(semantic):
    """The type that an operation computes in is looked up, not found anew by comparisons of names:
    of two tensors, of a tensor of floats and a number, of one of signed integers and a small
    integer, which have the tensor's type, and of pointers and integers, which keep theirs. A cast
    to the type that is there is none."""
    check, broadcast, cast = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.cast,
    )
    numbers = dict.fromkeys(("fp32", "fp64"), (int, float)) | dict.fromkeys(
        ("int32", "int64"), (int,)
    )
    plain, common = {*numbers}, {}

    def takes(tensor, number):
        kind = type(number)
        return kind in numbers.get(tensor.dtype.name, ()) and (
            kind is float or -(2**31) <= number < 2**31
        )

    def common_type(self, a, b, div_or_mod):
        key = a.name, b.name, div_or_mod
        if key not in common:
            common[key] = self.computation_type_impl(a, False, b, False, div_or_mod)
        return common[key]

    def check_types(
        self,
        lhs,
        rhs,
        allow_lhs_ptr=False,
        allow_rhs_ptr=False,
        arithmetic_check=True,
        div_or_mod=False,
    ):
        if arithmetic_check and type(lhs) is self.tensor and type(rhs) is self.tensor:
            a, b = lhs.dtype, rhs.dtype
            if a.is_ptr():
                if allow_lhs_ptr and b.name in ("int32", "int64"):
                    return self.broadcast_impl_value(lhs, rhs)
            elif not b.is_ptr():
                dtype = common_type(self, a, b, div_or_mod)
                return self.broadcast_impl_value(self.cast(lhs, dtype), self.cast(rhs, dtype))
        elif arithmetic_check and type(lhs) is self.tensor and takes(lhs, rhs):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif arithmetic_check and type(rhs) is self.tensor and takes(rhs, lhs):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_types(self, lhs, rhs):
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    def cast_types(self, input, dst_ty, fp_downcast_rounding=None):
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if fp_downcast_rounding is None and len(plain & {source.name, target.name}) == 2:
            dst_ty = input.type.with_element_ty(target)
            # as each kind of cast is
            return self.make_tensor(self.builder.cast_impl(input.handle, dst_ty), dst_ty)
        return cast(self, input, dst_ty, fp_downcast_rounding)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = (
        check_types,
        broadcast_types,
    )
    semantic.cast = cast_types


def _check_sizes_quickly(interpreter):
    """Whether an array's items fit its type is asked of every array, and of a result twice."""
    largest = {}  # bytes of an item, by the type's name

    def fits(array, dtype):
        if dtype.name not in largest:
            largest[dtype.name] = (
                math.inf if dtype.is_ptr() else max(dtype.primitive_bitwidth, 8) // 8
            )
        return array.itemsize <= largest[dtype.name]

    interpreter._validate_np_data_size = fits


def _sum_directly(interpreter):
    """A sum is one of numpy's, which the interpreter finds after all other reductions, and copies;
    an exclusive or, of which a sort is made, it forms element by element."""
    reduce, standard = interpreter.ReduceOps.apply, interpreter.tl.standard
    of_numpy = {standard._sum_combine: np.add, standard._xor_combine: np.bitwise_xor}
    tensor, block_type, handle = (
        interpreter.tl.core.tensor,
        interpreter.tl.block_type,
        interpreter.TensorHandle,
    )

    def apply(self, input):
        function = of_numpy.get(self.combine_fn)
        if (
            function is None
            or type(input) is not tensor
            or self.axis not in range(len(input.shape))
        ):
            return reduce(self, input)
        data, dtype = input.handle.data, input.dtype
        total = function.reduce(data, axis=self.axis, keepdims=self.keep_dims).astype(
            data.dtype, copy=False
        )
        if total.ndim:
            return tensor(handle(total, dtype), block_type(dtype, list(total.shape)))
        return tensor(handle(total.reshape(1), dtype), dtype)

    interpreter.ReduceOps.apply = apply


OF_TORCH = {"fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}


def _round_to_nearest(interpreter):
    """The interpreter truncates fp32 to bf16, and rounds some numbers to fp8 to half of them.
    Hardware rounds to the nearest number, of two to the even one."""
    convert = interpreter._convert_float

    def convert_float(input, input_dtype, output_dtype, rounding_mode):
        if output_dtype.name in OF_TORCH:
            assert input_dtype.name == "fp32", input_dtype
            nearest = torch.from_numpy(input.view(np.float32)).to(OF_TORCH[output_dtype.name])
            return nearest.view(torch.uint8).numpy()
        if (input_dtype.name, output_dtype.name) != ("fp32", "bf16"):
            return convert(input, input_dtype, output_dtype, rounding_mode)
        bits = input.view(np.uint32)
        nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(np.isnan(input), 0xFFFF, nearest).astype(np.uint16)

    interpreter._convert_float = convert_float


STRIDED = (
    "x",
    "dx_ptr",
    "teacher",
    "z_ptr",
    "x_ptr",
    "turned_ptr",
    "weight_ptr",
    "hidden_ptr",
)  # of kernels that are given their strides, too


def _expect_no_gaps(interpreter):
    """A kernel that is given no strides reads a tensor as if it had no gaps: one that has some is
    an error."""
    run = interpreter.GridExecutor.__call__

    def expect(name, value):
        if isinstance(value, tuple):
            for field, x in zip(getattr(value, "_fields", [name] * len(value)), value):
                expect(field, x)
        elif hasattr(value, "is_contiguous") and not value.is_contiguous() and name not in STRIDED:
            raise AssertionError(
                f"{name} has gaps: shape {list(value.shape)}, strides {value.stride()}"
            )

    def checked_run(self, *args, **kwargs):
        for name, value in [*zip(self.arg_names, args), *kwargs.items()]:
            expect(name, value)
        return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = checked_run
