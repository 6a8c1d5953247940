"""`MadeWhole`: a base of arguments whose parts nobody can take, and which nobody can move."""

from typing import NoReturn


def _not_moved(name: str) -> property:
    """Return a property for a method of tensors, whose AttributeError says what to write.

    So `hasattr` stays False, by which trainers find out what of a batch they can move.
    """

    def refuse(self) -> NoReturn:
        made = self.made_anew.replace("[..]", f".{name}(..)")
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: it must be made anew of its tensors, {made}"
        )

    return property(refuse, doc="Raises AttributeError: it is made anew of other tensors.")


class MadeWhole:
    """Base of arguments that hold all tokens of a call, and are made anew for others."""

    # how it is made of parts of its tensors
    made_anew = ""

    to = _not_moved("to")
    cuda = _not_moved("cuda")
    cpu = _not_moved("cpu")
    detach = _not_moved("detach")
    clone = _not_moved("clone")
    contiguous = _not_moved("contiguous")
    float = _not_moved("float")
    half = _not_moved("half")
    bfloat16 = _not_moved("bfloat16")

    def __getitem__(self, _index) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} must be made anew of a part of its tensors, {self.made_anew}, "
            "got an index"
        )
