"""`MadeWhole`: a base of arguments whose parts nobody can take, and that nobody can move."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

# what users call on tensors, which these objects are not
MOVES = ("to", "cuda", "cpu", "pin_memory", "detach", "clone")
CUTS = ("chunk", "split", "unbind", "narrow", "index_select")


class MadeWhole:
    """Base of arguments that hold all tokens of a call, and are made anew for others."""

    # how it is made, with {} for what becomes of its tensors
    made_anew = ""

    def __getitem__(self, _index) -> NoReturn:
        raise TypeError(f"{self._made_of('a part of its tensors', '[..]')}, got an index")

    if not TYPE_CHECKING:  # to which a class with it would have every name

        def __getattr__(self, name: str) -> NoReturn:
            said = ""
            if name in MOVES:
                said = f": {self._made_of('moved tensors', f'.{name}(..)')}"
            elif name in CUTS:
                said = f": {self._made_of('a part of its tensors', '[..]')}"
            raise AttributeError(f"{type(self).__name__} has no {name!r}{said}")

    def _made_of(self, tensors: str, change: str) -> str:
        """Return the words of an error about what to make anew."""
        written = self.made_anew.format(change)
        return f"{type(self).__name__} must be made anew of {tensors}, {written}"
