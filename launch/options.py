"""Numbers on the command line: types for `add_argument(type=...)`, by which argparse refuses nonsense in one line."""

import argparse
import math

LARGEST = 2**31 - 1


def at_least(kind: type, minimum: float, *, maximum: float = LARGEST, above: bool = False):
    """A type of numbers from `minimum` (above: larger than it) to `maximum`; kind: int or float."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if minimum < value <= maximum or (value == minimum and not above):
            return value
        name = "a whole number" if kind is int else "a number"
        bounds = f"above {minimum} and at most {maximum}" if above else f"from {minimum} to {maximum}"
        raise argparse.ArgumentTypeError(f"must be {name} {bounds}, got {text!r}")

    return convert


positive_int = at_least(int, 1)
non_negative_int = at_least(int, 0)
positive_float = at_least(float, 0, above=True)
non_negative_float = at_least(float, 0)
fraction = at_least(float, 0, maximum=1)


def check_multiple(parser: argparse.ArgumentParser, option: str, value: int, divisor: int, reason: str) -> None:
    if value % divisor:
        parser.error(f"argument {option}: must be a multiple of {reason} = {divisor}, got {value}")
