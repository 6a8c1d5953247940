"""The parser of options of `python -m tp_headloss` and its commands."""

import argparse
import difflib
import sys
from collections.abc import Sequence


def options_of(args: Sequence[str]) -> list[str]:
    """Return the names of the options of a command line, without their values."""
    return [x.split("=")[0] for x in args if x.startswith("--")]


class Parser(argparse.ArgumentParser):
    """A parser whose errors name unknown options, too, and those that may be meant: argparse looks
    first for what is missing, which a misspelt option is as well. A command refuses them itself,
    with its own usage."""

    unknown: tuple[str, ...] = ()

    def parse_known_args(self, args=None, namespace=None):
        given = args or sys.argv[1:]
        self.unknown = self._unknown_among(given)
        self._expect_once(given)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            meant = self._meant_by(self._unknown_among(rest))
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
        return found, rest

    def error(self, message):
        if "argument command" in message and self.unknown:
            message += f"; options of a command stand behind it, as in plan {self.unknown[0]} .."
        said = f"; unknown: {', '.join(self.unknown)}{self._meant_by(self.unknown)}"
        super().error(message + said * bool("required" in message and self.unknown))

    def _expect_once(self, args) -> None:
        """Refuse an option of this parser that is there twice, of which argparse takes the last."""
        names = options_of(args)
        for name in self._option_string_actions:
            if names.count(name) > 1:
                self.error(f"argument {name}: expected once, got {names.count(name)} times")

    def _unknown_among(self, args) -> tuple[str, ...]:
        """Options of a command line that this parser does not have."""
        return tuple(x for x in options_of(args) if x not in self._option_string_actions)

    def _meant_by(self, names: tuple[str, ...]) -> str:
        """Words for an error about unknown options; "" where none is like one that there is."""
        close = [difflib.get_close_matches(x, self._option_string_actions, 1, 0.75) for x in names]
        found = dict.fromkeys(option for options in close for option in options)
        return f", did you mean {' and '.join(found)}?" if found else ""
