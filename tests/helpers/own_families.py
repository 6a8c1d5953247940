"""Families of statistics that a test registers: weighted sums over the vocabulary, whose truth is
known."""

import contextlib
from unittest import mock

import torch

import tp_headloss as hl
from tp_headloss.statistics.family import Family, row_sum


@contextlib.contextmanager
def registered(*families):
    """Register families, and forget them at the end."""
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        for family in families:
            hl.register_statistic(family)
        yield


class Sums(Family):
    """One statistic, the sum over `parts` of weight times a sum over the vocabulary.

    A part is (kind, number, weight). Kinds: "power", sum p^number; "moment", sum z^number, where
    the number is an integer; "surprise", sum p log p.
    """

    def __init__(self, name, parts):
        self.name, self.parts = name, parts
        self.statistics = self.gradients = (name,)
        self.packet = self.merged = tuple(f"{name}_{i}" for i in range(len(parts)))

    def each(self):
        """Row, kind, number and weight of each part."""
        return [(row, *part) for row, part in zip(self.packet, self.parts)]

    def local(self, tile, softmax, rows):
        found = {}
        z = tile.z.masked_fill(tile.z == -torch.inf, 0.0)
        shifted = softmax.shifted.masked_fill(softmax.shifted == -torch.inf, 0.0)
        for row, kind, number, _ in self.each():
            terms = {
                "power": softmax.exp**number,
                "moment": z**number,
                "surprise": softmax.exp * shifted,
            }
            found[row] = row_sum(terms[kind])
        return found

    def rescale(self, rows, drop, factor):
        found = {}
        for row, kind, number, _ in self.each():
            if kind == "power":
                found[row] = factor**number * rows[row]
            elif kind == "surprise":
                found[row] = factor * (rows[row] + drop * rows["sum"])
            else:
                found[row] = rows[row]
        return found

    def target(self, p, offset):
        found = {}
        for row, kind, number, _ in self.each():
            if kind != "moment":
                found[row] = p**number if kind == "power" else p * offset
        return found

    def finish(self, sums, joined):
        merged = {}
        for row, kind, number, _ in self.each():
            if kind == "power":
                merged[row] = sums[row] / joined.whole**number
            elif kind == "surprise":
                merged[row] = sums[row] / joined.whole - joined.log_sum
            else:
                merged[row] = sums[row]
        value = sum(weight * merged[row] for row, _, _, weight in self.each())
        return {self.name: value}, merged

    def coefficient(self, coefficient, shifted, weight, merged, grads):
        if self.name not in grads:
            return coefficient
        log_p = weight.log().masked_fill(weight == 0, 0.0)
        for row, kind, number, factor in self.each():
            if kind == "power":
                slope = number * (weight ** (number - 1) - merged[row])
            else:
                slope = log_p - merged[row]
            if kind != "moment":
                coefficient = coefficient + grads[self.name] * factor * slope
        return coefficient

    def direct(self, dz, tile, merged, grads):
        if self.name not in grads:
            return dz
        z = tile.z.masked_fill(tile.z == -torch.inf, 0.0)
        for _, kind, number, factor in self.each():
            if kind == "moment":
                slope = number * z ** (number - 1)
                dz = dz + grads[self.name] * factor * slope.masked_fill(tile.z == -torch.inf, 0.0)
        return dz

    def truth(self, z):
        """The statistic [N] of float64 logits."""
        log_p = z.log_softmax(-1)
        terms = {
            "power": lambda number: (number * log_p).exp(),
            "moment": lambda number: z**number,
            "surprise": lambda number: log_p.exp() * log_p,
        }
        return sum(weight * terms[kind](number).sum(-1) for kind, number, weight in self.parts)


def scaled(method):
    """Return the method with results that are ten per cent too large: numbers, or each row of a
    dict."""

    def wrong(self, *given):
        found = method(self, *given)
        if isinstance(found, dict):
            own = {row: 1.1 * found[row] for row in self.packet if row in found}
            return found | own
        # what a gradient method adds to its first argument
        return given[0] + 1.1 * (found - given[0])

    return wrong


def without(method):
    """Return the method of `Family` in its place."""
    return getattr(Family, method.__name__)


def first_packet(method):
    """Return a `merge` that takes the rows of the first packet alone."""

    def wrong(self, rows, merging):
        return {row: x[0] for row, x in rows.items() if row in self.packet}

    return wrong


# How a method can be wrong. The last ones are those of methods that `Family` has already.
def first_packets(method):
    """Return a `merge` that takes the rows of two packets alone, of which most tries have no
    more."""

    def wrong(self, rows, merging):
        given = {row: x[:2] if row in self.packet else x for row, x in rows.items()}
        given = {
            row: torch.nn.functional.pad(x, (0, 0, 0, len(rows[row]) - len(x)))
            for row, x in given.items()
        }
        return method(self, given, merging)

    return wrong


def by_logits(method):
    """Return a gradient method that is for logits instead of z."""

    def wrong(self, dz, tile, *given):
        return dz + tile.slope * (method(self, dz, tile, *given) - dz)

    return wrong


WAYS = {
    "local": (scaled,),
    "rescale": (scaled, without),
    "target": (scaled, without),
    "coefficient": (scaled, without),
    "direct": (scaled, without, by_logits),
    "merge": (scaled, first_packet, first_packets),
    "join": (scaled, lambda join: lambda self, sums, joined: sums),
}


def broken(family, method, way):
    """Return the family with one method that is wrong."""
    wrong = way(getattr(type(family), method))
    return type("Broken", (type(family),), {method: wrong})(family.name, family.parts)
