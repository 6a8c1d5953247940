"""Numbers on the command line: types for `add_argument(type=...)`, by which argparse refuses
nonsense in one line."""

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
        bounds = (
            f"above {minimum} and at most {maximum}" if above else f"from {minimum} to {maximum}"
        )
        raise argparse.ArgumentTypeError(f"must be {name} {bounds}, got {text!r}")

    return convert


positive_int = at_least(int, 1)
non_negative_int = at_least(int, 0)
positive_float = at_least(float, 0, above=True)
non_negative_float = at_least(float, 0)
fraction = at_least(float, 0, maximum=1)


SHARED = {  # options that several programs have: type, help
    "tp": (
        positive_int,
        "number of vocabulary shards; processes / tp replicas (default: {default})",
    ),
    "vocab": (positive_int, "ids; the weights are padded to a multiple of --pad-to"),
    "pad-to": (positive_int, None),
    "layers": (positive_int, None),
    "width": (positive_int, None),
    "heads": (positive_int, None),
    "length": (positive_int, "tokens per row"),
    "batch": (positive_int, "rows per step, over all replicas and micro-batches"),
    "accumulate": (positive_int, "micro-batches per step and replica"),
    "steps": (positive_int, None),
    "lr": (positive_float, None),
    "warmup": (non_negative_int, None),
    "clip": (positive_float, "largest norm of the gradient"),
    "seed": (non_negative_int, "of weights and batches"),
    "validate-every": (positive_int, None),
    "validation-batches": (positive_int, None),
    "log-every": (positive_int, "steps between reads of the device's results"),
}


def parser_of(doc: str, *, precision: bool = False, **defaults) -> argparse.ArgumentParser:
    """A parser with --device and those options of `SHARED` that get a default here (None for --tp:
    all processes)."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if each process has a GPU",
    )
    if precision:
        told = "auto: bf16 autocast on GPU, else fp32"
        add("--precision", choices=("auto", "fp32", "bf16"), default="auto", help=told)
    for name, default in defaults.items():
        kind, text = SHARED[option := name.replace("_", "-")]
        said = text and text.format(default="all processes" if default is None else default)
        add(f"--{option}", type=kind, default=default, help=said)
    return parser


def check_multiple(
    parser: argparse.ArgumentParser, option: str, value: int, divisor: int, reason: str
) -> None:
    if value % divisor:
        parser.error(f"argument {option}: must be a multiple of {reason} = {divisor}, got {value}")
