"""Evaluation of the terms' and metrics' functions on per-token statistics."""

import contextlib
import types
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from ..call.compile import uncompiled
from ..engine.autograd import has_other_leaves
from ..engine.reductions import StatisticValue
from ..spec.aliases import hint
from ..statistics import MissingStatistics, VocabStatistics, known_statistics
from .terms import METRICS
from .token_sums import expect_per_token, metric_sums
from .tokenwise import expect_tokenwise

# names that have a meaning of their own in `mean_metrics` or in `HeadLossOutput`, and beginnings of
# such names
RESERVED = {"loss", "perplexity", "num_tokens", "num_sequences"}
LOSSES = "loss/", "weighted/", "count/loss/"


class StatisticsFunction(NamedTuple):
    """Function of the statistics and of named inputs, with the name that error messages use for its
    owner."""

    owner: str
    function: Callable | StatisticValue
    inputs: tuple[str, ...] = ()
    may_return: tuple[str, ...] = ()  # of the names that are `RESERVED`
    is_loss: bool = False
    tokenwise: bool = False  # it promises what `Term.tokenwise` does


def names_read(function) -> set[str]:
    """Names of statistics, among others, that a function's code or the arguments of a `partial`
    say."""
    if isinstance(function, partial):
        return names_read(function.func) | {x for x in function.args if isinstance(x, str)}
    if isinstance(function, StatisticValue):
        return {function.statistic}
    return {*getattr(getattr(function, "__code__", None), "co_names", ())}


def evaluate(
    functions: list[StatisticsFunction],
    metrics: list[StatisticsFunction],
    stats: VocabStatistics,
    inputs: dict[str, Any],
    token_weight: torch.Tensor | None,
):
    """Evaluate functions and metrics.

    Returns the functions' per-token values (None for a `StatisticValue`, which the reduction
    evaluates), the metrics' sums over tokens by name, and, with the input "sequences", their sums
    over sequences of each sequence's mean.
    """
    values = [
        None if isinstance(f.function, StatisticValue) else _call_function(f, stats, inputs)
        for f in functions
    ]
    for function, value in zip(functions, values):
        if not isinstance(function.function, StatisticValue):
            if not isinstance(value, torch.Tensor):
                _expect_statistics(function, stats, inputs)
            expect_per_token(function.owner, value, stats.lse, function.is_loss)
            if function.is_loss and value is not None:
                _expect_gradient(function.owner, value, stats)
    with torch.no_grad():
        by_token, by_sequence = _metric_values(metrics, stats, inputs), {}
        if by_token and (sequences := inputs.get("sequences")) is not None:
            by_token.setdefault("num_tokens", torch.ones_like(stats.lse))
            share = (
                sequences.token_share
                if token_weight is None
                else sequences.token_share * token_weight
            )
            by_sequence = metric_sums(by_token, stats.valid, share)
            by_sequence["num_sequences"] = sequences.count / sequences.ranks
        return values, metric_sums(by_token, stats.valid, token_weight), by_sequence


def compiled_evaluate() -> Callable:
    """Compile a copy of `evaluate`. torch limits recompilations per code object, so every HeadLoss
    needs its own."""
    own = types.FunctionType(evaluate.__code__.replace(), globals(), evaluate.__name__)
    compiled = torch.compile(own)

    @wraps(own)
    def run(*args):
        try:
            return compiled(*args)
        except Exception as error:
            note_compilation(error)
            raise

    return run


def note_compilation(error: Exception):
    """Add a note to an error of torch's compiler, which knows nothing of the option that asked for
    it."""
    if type(error).__module__.startswith("torch._inductor") and hasattr(error, "add_note"):
        error.add_note(
            "HeadLoss(compile=True) compiles the PyTorch of terms and metrics, on CPUs with a C++ "
            "compiler: leave out compile=True, or install what is missing"
        )


def checked_evaluation(run: Callable, check: bool, functions, metrics, stats, inputs, *args):
    """Call `evaluate`, or a compiled copy `run` of it, and look at what the functions did.

    check: of `Options`.
    """
    with expect_unchanged([*functions, *metrics], stats, inputs, check):
        found = run(functions, metrics, stats, inputs, *args)
    if check:
        for function, value in zip(functions, found[0]):
            if function.tokenwise and value is not None:
                call = partial(_call_function, function)
                expect_tokenwise(function.owner, call, value, stats, inputs)
        expect_known_where_ignored(functions, found[0], stats)
    return found


@contextlib.contextmanager
def expect_unchanged(
    functions: list[StatisticsFunction],
    stats: VocabStatistics,
    inputs: dict[str, Any],
    check: bool = False,
):
    """Raise RuntimeError if functions that are evaluated within write to what others, and the
    caller, read as well.

    check: compare values, too. Tensors of torch.inference_mode(), and collectives, do not say that
    a tensor was written to.
    """
    read = *stats, *(stats.registered or {}).values(), *inputs.values()
    given = [x for x in read if isinstance(x, torch.Tensor)]

    def versions():
        return [x._version for x in given if not x.is_inference()]

    error, before = None, versions()
    copies = [x.detach().clone() for x in given] if check else []
    try:
        yield
    except RuntimeError as found:
        if "in-place" not in str(found) and "inplace" not in str(found):
            raise
        error = found
    is_unchanged = error is None and versions() == before and all(map(_is_same, given, copies))
    if not is_unchanged:
        owners = [f.owner for f in functions if not isinstance(f.function, StatisticValue)]
        raise RuntimeError(
            "functions of statistics and inputs must not change them in place (x *= 2, x.exp_(), "
            "dist.all_reduce(x): they are of the whole vocabulary, equal on all ranks), which "
            "others read as well: write x = x * 2; got a change by "
            f"{' or '.join(owners)}"
        ) from error


def _is_same(x: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return True for equal values, NaN among them."""
    return torch.allclose(x.detach(), copy, rtol=0.0, atol=0.0, equal_nan=True)


def _expect_gradient(owner: str, value: torch.Tensor, stats: VocabStatistics):
    """Warn of a loss that has no gradient where the statistics have one.

    It is no error, because a function may return zeros for a batch that has none of its tokens.
    """
    if value.requires_grad:
        return
    if torch.is_grad_enabled() and stats.lse.requires_grad:
        warn_without_gradient(owner, "of a statistic that has none, or detached")


def warn_without_gradient(owner: str, reason: str):
    """Warn of a term that moves the loss and trains nothing."""
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"{owner} has no gradient here ({reason}), so that it trains nothing: make it a Metric",
            stacklevel=3,
        )


def _metric_values(metrics, stats, inputs) -> dict[str, torch.Tensor]:
    """Evaluate metrics -> per-token values by name. Raises if two metrics return the same name."""
    values: dict[str, torch.Tensor] = {}
    returned: list[dict[str, torch.Tensor]] = []
    for metric in metrics:
        new = _call_function(metric, stats, inputs)
        if not isinstance(new, dict):
            raise TypeError(
                f"{metric.owner} must return values by name, a dict, got {type(new).__name__}"
            )
        if unnamed := [name for name in new if not isinstance(name, str) or not name]:
            raise TypeError(
                f"{metric.owner} must name its values by strings, not empty, got {unnamed}"
            )
        if not all(isinstance(value, torch.Tensor) for value in new.values()):
            _expect_statistics(metric, stats, inputs)
        if reserved := {x for x in new if x in RESERVED or x.startswith(LOSSES)} - {
            *metric.may_return
        }:
            raise ValueError(
                f"{metric.owner} must not return {sorted(reserved)}, names that mean_metrics uses "
                "itself"
            )
        for name, value in new.items():
            expect_per_token(f"metric {name!r}", value, stats.lse)
        expect_distinct_names(values, new)
        values.update(new)
        returned.append(new)
    for new in returned:
        _expect_metrics_of_counts(new, {*values, *METRICS})
    return values


def _expect_metrics_of_counts(returned: dict[str, torch.Tensor], known: set[str]):
    """Raise ValueError for a "count/x" that a function returns where nothing returns "x".

    known: names of all metrics.
    """
    counts = [name for name in returned if name.startswith("count/")]
    others = [name for name in returned if name not in counts]
    for count in counts:
        name = count.removeprefix("count/")
        if name.startswith(("max_", "min_")):
            raise ValueError(
                f"{count!r} must divide a sum, got the extremum {name!r}, which has none"
            )
        if name not in known:
            meant = hint(name, others)
            raise ValueError(
                f"{count!r} is the divisor of a metric {name!r}, which nothing returns, got metrics "
                f"{others}{meant}"
            )


def expect_known_where_ignored(functions: list[StatisticsFunction], values, stats: VocabStatistics):
    """Raise ValueError if a function that reads something trained is not finite at an ignored
    token, where statistics are 0.

    Its value is left out there, but 0 times the infinite derivative by what is trained is NaN.
    """
    known = [x for x in stats if isinstance(x, torch.Tensor)]
    for function, value in zip(functions, values):
        if value is None or not has_other_leaves(value, known):
            continue
        bad = (~stats.valid & ~value.isfinite()).flatten().nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"{function.owner} is not finite at the ignored token {bad[0]} (flat index), whose "
                "statistics are 0, so that the gradient of what it trains would be NaN: choose its "
                "operands with torch.where(stats.valid, .., number) first"
            )


def expect_distinct_names(metrics: dict[str, torch.Tensor], others: dict[str, torch.Tensor]):
    """Raise ValueError if two sets of metrics have a name in common."""
    if clash := set(others) & set(metrics):
        raise ValueError(f"metrics must have distinct names, got {sorted(clash)} twice")


def _call_function(function: StatisticsFunction, stats, inputs):
    """Call a function. Raises ValueError if it reads an optional statistic that no term or metric
    asked for; other errors get a note that names it."""
    try:
        return function.function(stats, **{name: inputs[name] for name in function.inputs})
    except (TypeError, AttributeError, MissingStatistics) as error:
        _expect_statistics(function, stats, inputs, error)
        _add_note(error, function, stats, inputs)
        raise
    except Exception as error:
        _add_note(error, function, stats, inputs)
        raise


@uncompiled("it writes a note on an error")
def _add_note(error: Exception, function: StatisticsFunction, stats, inputs):
    """Add a note to an error that names the function and the shapes that it got."""
    if not hasattr(error, "add_note"):  # before Python 3.11
        return
    if isinstance(error, AttributeError) and "can't set attribute" in str(error):
        error.add_note("statistics are read only: keep a new value in a variable of your own")
    if isinstance(error, IndexError) and str(error).startswith("index -"):
        error.add_note(
            "stats.labels of ignored tokens are the ignore_index, and no place in a table: look it "
            "up at stats.labels.clamp(min=0)"
        )
    said = f"in {function.owner}, whose statistics are {list(stats.lse.shape)}"
    given = {name: inputs[name] for name in function.inputs}
    shapes = [f"{k!r} {list(x.shape)}" for k, x in given.items() if isinstance(x, torch.Tensor)]
    if shapes:
        said += f" and inputs {', '.join(shapes)}"
    if stats.log_probs_at is not None:
        of_ids = list(stats.log_probs_at.shape)
        said += (
            f"; log_probs_at are {of_ids}, to which x[..., None] of a value per token broadcasts"
        )
    error.add_note(said)


def note_block(error: Exception, tokens: int, shape: torch.Size):
    """Add a note to an error of a `tokenwise` function that was called with some of a call's
    tokens [*shape], or with all of them in one dimension."""
    if not hasattr(error, "add_note"):  # before Python 3.11
        return
    called = f"some of the tokens, here {tokens} of {shape.numel()}"
    if tokens == shape.numel():
        if len(shape) == 1:
            return
        called = f"tokens in one dimension, here [{tokens}] of {list(shape)}"
    error.add_note(
        f"one sweep calls a tokenwise function with {called}: name whatever it reads of each token "
        "in inputs=(..)"
    )


def _expect_statistics(function: StatisticsFunction, stats, inputs, error: Exception | None = None):
    """Raise ValueError if a function reads an optional statistic that no term or metric asked
    for."""
    used = _names_read_in_a_call(function, stats, inputs)
    absent = [
        name for name in known_statistics() if name in used and getattr(stats, name, None) is None
    ]
    if absent:
        raise ValueError(
            f"{function.owner} uses the statistics {absent}, which nothing wants: give it "
            f"want={tuple(absent)}"
        ) from error


@uncompiled("it watches what a function reads, for an error")
def _names_read_in_a_call(function: StatisticsFunction, stats, inputs) -> set[str]:
    """Names of statistics that a function reads, itself or in the functions that it calls."""
    found = set()

    class Watched(VocabStatistics):
        def __getattribute__(self, name):
            found.add(name)
            return super().__getattribute__(name)

    given = {name: inputs[name] for name in function.inputs}
    with contextlib.suppress(Exception), torch.no_grad():
        function.function(Watched(*stats), **given)
    return found
