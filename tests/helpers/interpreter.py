"""Triton's interpreter without what it does again and again for every operation."""

import dataclasses


def speed_up():
    from triton.runtime import interpreter

    # A launch patches triton.language and restores it; in between, a function whose module has been patched finds
    # nothing left to patch, and looking for it was three quarters of the time.
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            return patch(fn)

    def launch_anew(*args, **kwargs):
        patched.clear()
        return launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew

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
