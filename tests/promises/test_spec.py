"""Every argument of a checked function has a line, and what the line rules out is refused by the
argument's name."""

import ast
import contextlib
import importlib
import inspect
import re
import textwrap
import typing

import numpy as np
import pytest
import torch
from known import modules_of_integrations
from lines import OF_OTHERS, right, wrong
from right_calls import CHECKED, HOSTS, MEANT, arguments_of

import tp_headloss as hl
from tp_headloss.spec import OneOf, TensorLine
from tp_headloss.spec.checked import _hints as hints_of


@pytest.mark.parametrize(
    ("shape", "sharded"), [(("..", "width"), -1), (("width", "H"), 0), (("width",), 0)]
)
def test_a_part_without_padding_is_refused_with_the_line_that_pads_it(shape, sharded):
    """The last rank's part of a vocabulary that is padded for the student alone."""
    line = TensorLine("floating point", shape, sharded=sharded)
    sizes = {"..": ((2, 3), "logits"), "width": (12, "logits"), "H": (5, "hidden")}
    full = [n for symbol in shape for n in ((2, 3) if symbol == ".." else (sizes[symbol][0],))]
    for width in (9, 1):
        sizes["shard"] = hl.VocabShard.from_group(None, width, padded_size=12), "logits"
        part = torch.ones(full).narrow(sharded, 0, width)
        with pytest.raises(ValueError, match=rf"got .*{width}.*padding\? Pass F.pad") as error:
            line.check("teacher.logits", part, dict(sizes))
        pad = ast.literal_eval(re.search(r"F\.pad\(\.\., (\(.*?\))\)", str(error.value))[1])
        padded = torch.nn.functional.pad(part, pad)
        line.check("teacher.logits", padded, dict(sizes))
        assert padded.sum() == part.sum()


def names_and_values(hint):
    """For each argument of some names within an annotation: whether editors and type checkers see
    them (Literal)."""
    if typing.get_origin(hint) is typing.Literal:
        return [True]
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        named = any(isinstance(x, OneOf) and x.names != (True, False) for x in inner[1:])
        seen = names_and_values(inner[0])
        return seen if seen or not named else [False]
    return [seen for x in inner for seen in names_and_values(x)]


def test_names_that_an_argument_takes_are_seen_by_type_checkers():
    found = {
        f"{key}({name})": names_and_values(hint)
        for key, function in CHECKED.items()
        for name, hint in hints_of(function).items()
    }
    named = {name: all(seen) for name, seen in found.items() if seen}
    assert len(named) > 20 and all(named.values()), [n for n, seen in named.items() if not seen]


def test_every_loss_has_lines():
    assert set(LOSSES) <= set(CHECKED)


def is_result(x) -> bool:
    """True for a class of results, which callers read and do not make."""
    return isinstance(x, type) and hasattr(x, "_fields")


def test_every_public_function_and_constructor_is_called_here():
    public = {name: getattr(hl, name) for name in hl.__all__}
    called = {*CHECKED.values(), *MEANT.values()} | {
        hl.Sequences
    }  # whose constructor is among them
    missing = [
        name for name, x in public.items() if callable(x) and not is_result(x) and x not in called
    ]
    assert not missing, f"no right call of {missing} in tests/helpers/right_calls.py"


def functions_of_hosts() -> list:
    """Checked functions of tensors in the adapters that can be imported without their host."""
    found = []
    for name in modules_of_integrations():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"tp_headloss.integrations.{name}")
            functions = [f for f in vars(module).values() if inspect.isfunction(f)]
            own = [f for f in functions if f.__module__ == module.__name__ and hasattr(f, "lines")]
            found += [f for f in own if any(map(tensor_line, f.lines.values()))]
    return found


def test_every_function_of_a_host_has_a_right_call():
    found = functions_of_hosts()
    assert len(found) > 10
    missing = sorted({f"{f.__module__}.{f.__name__}" for f in found if f not in HOSTS})
    assert not missing, f"no right call of {missing} in HOSTS of tests/helpers/right_calls.py"


def tensor_line(line):
    """The line of a tensor in a line, or None."""
    return next(
        (x for x in getattr(line, "lines", (line,)) if isinstance(x, hl.spec.TensorLine)), None
    )


def sets_sizes(function, name, what) -> bool:
    """True if another argument than this one has the shape (or for "meta" the device) of the
    tokens."""
    own = tensor_line(function.lines[name])
    for other, line in function.lines.items():
        tensor = tensor_line(line)
        if isinstance(line, hl.spec.Instance) and line.kind in (hl.Sequences, hl.VocabStatistics):
            return True
        alike = (
            tensor is not None
            and tensor.shape != ()
            and (tensor.shape is None) == (own.shape is None)
        )
        if other != name and alike and (what == "meta" or ".." in tensor.shape):
            return True
    return False


# One test per function goes through all that is wrong: thousands of tests would take longer than
# what they try.
OF_EACH_FUNCTION = pytest.mark.parametrize("key", CHECKED)


def ruled_out(function):
    """Yields the name of an argument, what is wrong, and such a value, for all lines of a
    function."""
    for name, line in function.lines.items():
        for what, value in wrong(line).items():
            if what not in OF_OTHERS or sets_sizes(function, name, what):
                yield name, what, value


def test_many_values_are_ruled_out():
    assert sum(len([*ruled_out(function)]) for function in CHECKED.values()) > 4000


@OF_EACH_FUNCTION
def test_what_the_lines_take_is_taken(key):
    CHECKED[key](**arguments_of(CHECKED[key]))


def number_line(line):
    """The line of a number in a line, or None."""
    return next(
        (
            x
            for x in getattr(line, "lines", (line,))
            if isinstance(x, (hl.spec.NumberLine, hl.spec.IntLine))
        ),
        None,
    )


@OF_EACH_FUNCTION
def test_numbers_of_numpy_are_numbers(key):
    """Any value that a line takes, 0 and others, of any type of NumPy's, is taken as Python's
    is."""
    function = CHECKED[key]
    given = arguments_of(function)
    lines = {name: number_line(line) for name, line in function.lines.items()}
    for name, line in lines.items():
        if line is None:
            continue
        usual = given.get(name)
        usual = usual if isinstance(usual, (int, float)) else right(name, line)
        for number in {float(np.float32(usual)) if isinstance(usual, float) else usual, 0, 1, 0.25}:
            kinds = (np.int64,) if isinstance(line, hl.spec.IntLine) else (np.float64, np.float32)
            outcomes = {
                outcome_of(function, given | {name: kind(number)}) for kind in (type(usual), *kinds)
            }
            assert len(outcomes) == 1, (name, number)


def outcome_of(function, given) -> str:
    """ "taken", or the kind of error, whose words have another number."""
    try:
        function(**given)
    except (TypeError, ValueError, IndexError) as error:
        assert ", got " in str(error), error
        return type(error).__name__
    return "taken"


@OF_EACH_FUNCTION
def test_what_a_line_rules_out_is_refused_by_name(key):
    function = CHECKED[key]
    given = arguments_of(function)
    first = next(iter(given), "")
    for name, what, value in ruled_out(function):
        # logits or hidden states, as the other arguments say
        said = ["hidden states"] * (name in ("logits", "hidden"))
        # the first sets sizes, so another may be the one that differs
        names = [name, *said] if name != first else [*given, *said]
        error = error_of(function, given | {name: value})
        assert error is not None, f"{name} is {what}, and nothing is refused"
        words = "|".join(rf"\b{re.escape(n)}\b" for n in names)
        assert re.search(words, error), f"{name} is {what}: {error}"


def error_of(function, given) -> str | None:
    """The words of the error of a call, or None."""
    try:
        function(**given)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def parameters_of(function) -> dict:
    """Parameters by name, without the object of a method and what is handed on."""
    found = inspect.signature(MEANT.get(function, function)).parameters
    own = {name: x for name, x in found.items() if name not in ("self", "cls")}
    return {name: x for name, x in own.items() if x.kind != x.VAR_KEYWORD}


PLACES = {
    key: [name for name, x in parameters_of(f).items() if x.kind == x.POSITIONAL_OR_KEYWORD]
    for key, f in CHECKED.items()
    if f not in MEANT
}


@OF_EACH_FUNCTION
def test_a_missing_argument_is_named_with_what_it_must_be(key):
    function = CHECKED[key]
    for name, parameter in parameters_of(function).items():
        if parameter.default is not parameter.empty:
            continue
        given = {key: value for key, value in arguments_of(function).items() if key != name}
        words = f"must have {name} ({function.lines[name].says}), got {', '.join(given)}"
        with pytest.raises(TypeError, match=re.escape(words)):
            function(**given)


@pytest.mark.parametrize("key", PLACES)
def test_arguments_beyond_those_by_position_are_counted(key):
    many = [None] * (len(PLACES[key]) + 2)
    taken = ", ".join(PLACES[key]) or "no argument"
    with pytest.raises(TypeError, match=rf"takes {taken} by position, got 2 more"):
        CHECKED[key](*many)


@pytest.mark.parametrize("key", [key for key, names in PLACES.items() if names])
def test_an_argument_is_given_once(key):
    given = arguments_of(CHECKED[key])
    first = PLACES[key][0]
    value = given.get(first)
    with pytest.raises(TypeError, match=f"must get {first} once, got it by position and by name"):
        CHECKED[key](value, **given | {first: value})


# numbers per token that a loss differentiates; its line says of every other one that it is a
# constant
TRAINED = {"log_prob", "other", "chosen", "rejected", "values"}
LOSSES = [name for name in hl.losses.__all__ if inspect.isfunction(getattr(hl.losses, name))]


def arguments_of_loss(name) -> tuple[dict, set, set]:
    """Arguments of a loss by name, all real numbers of other values; names of those, and of the
    constants of them."""
    loss = getattr(hl.losses, name)
    lines = {
        key: found
        for key, line in loss.lines.items()
        if (found := tensor_line(line)) and not found.constant
    }
    real = {key for key, line in lines.items() if line.kind in ("floating point", "real numbers")}
    parameters, generator = inspect.signature(loss).parameters, torch.Generator().manual_seed(0)
    given = {
        key: x
        for key, x in arguments_of(loss).items()
        if key in lines or parameters[key].default is inspect._empty
    }
    given |= {
        key: given[key] * (0.5 + torch.rand(given[key].shape, generator=generator))
        for key in sorted(real)
    }
    given |= {"support": "tail"} if "support" in given else {}
    return given, real, {key for key in real if lines[key].detached}


def stacked(values):
    """What a loss returns, values per token or a dictionary of metrics, as one tensor."""
    return (
        values
        if isinstance(values, torch.Tensor)
        else torch.stack([x.float() for x in values.values()])
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_differentiates_no_constant(name):
    """Where all constants were computed from what is trained, the gradient is that of detached
    ones."""
    loss, (given, real, constants) = getattr(hl.losses, name), arguments_of_loss(name)
    assert real - constants <= TRAINED
    given |= {key: torch.nn.Parameter(given[key]) for key in real - constants}
    leaves, gradients = (
        [given[key] for key in real - constants] + [torch.nn.Parameter(torch.ones(2))],
        [],
    )
    for trained in (False, True):
        sum_of_trained = sum(leaf.sum() for leaf in leaves)
        gap = sum_of_trained - sum_of_trained.detach()
        values = stacked(
            loss(
                **given
                | {key: given[key] + i * gap for i, key in enumerate(constants, 1) if trained}
            )
        )
        assert values.requires_grad == (bool(real - constants) and "metrics" not in name)
        gradients.append(
            torch.autograd.grad(values.sum() + 0 * leaves[-1].sum(), leaves, allow_unused=True)
        )
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def by_position(name) -> list[str]:
    """Names of a loss's arguments up to the first one that has to be given by its name."""
    parameters = inspect.signature(getattr(hl.losses, name)).parameters.values()
    return [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", LOSSES)
def test_constants_that_are_given_by_position_get_no_gradient(name):
    loss, (given, real, constants) = getattr(hl.losses, name), arguments_of_loss(name)
    given |= {key: torch.nn.Parameter(given[key]) for key in real}
    first = [key for key in by_position(name) if key in given]
    assert first == by_position(name)[: len(first)]  # none is left out between others
    values = stacked(
        loss(
            *[given[key] for key in first], **{key: given[key] for key in given if key not in first}
        )
    )
    assert torch.equal(values, stacked(loss(**given)))
    leaves = [given[key] for key in sorted(constants)] + [torch.nn.Parameter(torch.ones(2))]
    grads = torch.autograd.grad(values.sum() + 0 * leaves[-1].sum(), leaves, allow_unused=True)
    assert grads[:-1] == (None,) * len(constants)


def test_there_are_constants_that_can_be_given_by_position():
    found = {name for name in LOSSES if arguments_of_loss(name)[2] & {*by_position(name)}}
    assert found >= {
        "dpo",
        "ipo",
        "kto",
        "times_temperature_squared",
    }


def test_an_argument_without_a_line_does_not_import():
    def function(x: torch.Tensor, scale: hl.spec.Positive = 1.0): ...

    with pytest.raises(TypeError, match="annotation of x must be a line"):
        hl.spec.checked(function)


def entries_of(function) -> dict[str, str]:
    """The text about each argument in a docstring's section "Args"."""
    section = re.search(r"^Args:\n((?: {4}.*\n?)*)", inspect.getdoc(function) or "", re.M)
    found = re.findall(
        r"^ {4}(\w+): ((?:.*\n?)(?: {8}.*\n?)*)", section[1] if section else "", re.M
    )
    return {name: " ".join(text.split()) for name, text in found}


DOCUMENTED = {f"{f.__module__}.{f.__qualname__}": f for f in (*CHECKED.values(), *HOSTS)}


@pytest.mark.parametrize("key", DOCUMENTED)
def test_what_is_said_about_an_argument_is_whole_sentences_said_once(key):
    for name, text in entries_of(DOCUMENTED[key]).items():
        sentences = [x.strip(" .").lower() for x in re.split(r"(?<=[.:;]) ", text)]
        cut = [x for x in sentences if re.search(r"\b(as in|see|of the|in the|with)$", x)]
        assert not cut, f"{name} ends within a sentence: {cut}"
        pairs = [(x, y) for x, y in zip(sentences, sentences[1:]) if x and y]
        twice = [x for x, y in pairs if y.startswith(x) or x.startswith(f"{y}, or")]
        assert not twice, f"{name} says twice: {twice}"


@pytest.mark.parametrize("key", DOCUMENTED)
def test_an_argument_that_is_not_used_is_in_no_line_of_its_function(key):
    function = inspect.unwrap(DOCUMENTED[key])
    unused = {n for n, line in DOCUMENTED[key].lines.items() if line.says == "not used"}
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))) if unused else ast.Module([], [])
    assert not unused & {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}


def test_a_docstring_with_a_line_that_belongs_to_no_argument_does_not_import():
    def function(x: bool, y: bool):
        """Return nothing.

        Args:
            x, y: as in
            `other`.
        """

    with pytest.raises(TypeError, match=r"indented below its name, got '`other`\.'"):
        hl.spec.checked(function)


def test_the_docstring_of_a_checked_function_says_what_its_arguments_are():
    says = inspect.getdoc(hl.losses.dpo)
    assert (
        "beta: positive and finite in fp32. Weight of the reference." in says
        and "[pairs] floating point" in says
    )
    assert (
        "reference_chosen: constant [pairs] floating point." in says
        and "\n    chosen: [pairs] floating" in says
    )
    assert hl.losses.dpo.__name__ == "dpo"
    assert "summed" not in inspect.getdoc(hl.losses.orpo).lower()
    empty = [
        name
        for name, function in CHECKED.items()
        if re.search(r"^Args:\n\n|\. ,", inspect.getdoc(function) or "", re.M)
    ]
    assert not empty, "sections without an argument, or what follows `as in` is no sentence"
