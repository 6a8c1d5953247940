"""Triton's interpreter, without its patching `triton.language` anew for every call of a device function.

A launch patches the language and restores it; in between, a function whose module has been patched finds nothing left
to patch, and looking for it was three quarters of the interpreter's time.
"""


def patch_once_per_launch():
    from triton.runtime import interpreter

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
