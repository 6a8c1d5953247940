"""`MadeWhole`: a base of arguments whose parts nobody can take."""

from typing import NoReturn


class MadeWhole:
    """Base of arguments that hold all tokens of a call, and are made anew for others."""

    # how it is made of parts of its tensors
    made_anew = ""

    def __getitem__(self, _index) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} must be made anew of a part of its tensors, {self.made_anew}, "
            "got an index"
        )
