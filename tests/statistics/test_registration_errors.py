"""What a family's author gets wrong is an error that names the method and what it must do."""

import re
import sys
import warnings

import pytest
import torch
from own_families import Sums, registered

import tp_headloss as hl
from tp_headloss.statistics import Family
from tp_headloss.statistics.family import row_sum

PARTS = (("power", 1.5, 1.0), ("moment", 2, 1.0), ("surprise", 1.0, 1.0))
OPTIONS = hl.Options(backend="torch")


def family_with(**methods):
    """A right family but for some of its methods."""
    return type("Own", (Sums,), methods)("own", PARTS)


def expect_refused(family, words):
    with pytest.raises(ValueError, match=re.escape(words)), registered(family):
        pass


DICTS = ("local", "rescale", "target", "merge", "join")
A_DICT = "must return a dict of tensors by name, got "
WRONG = {
    "nothing": (lambda found: None, "None"),
    "a list": (lambda found: [*found.values()], "list of Tensor"),
    "numbers": (lambda found: dict.fromkeys(found, 1.0), "a dict of 'own_0': float"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", DICTS)
def test_a_method_of_rows_returns_a_dict(method, wrong):
    right, (change, words) = getattr(Sums, method), WRONG[wrong]
    if wrong != "nothing" and method in ("target", "join"):
        words = ""  # other names
    family = family_with(**{method: lambda self, *given: change(right(self, *given))})
    expect_refused(family, f"Own.{method} {A_DICT}{words}")


@pytest.mark.parametrize("method", ["coefficient", "direct"])
def test_a_gradient_method_returns_a_tensor(method):
    family = family_with(**{method: lambda self, *given: None})
    expect_refused(family, f"Own.{method} must return a tensor, got None")


def test_finish_returns_two_dicts_of_numbers_per_token():
    expected = "Own.finish must return two dicts of tensors by name (values, merged), got "
    right = Sums.finish
    one = family_with(finish=lambda self, *given: right(self, *given)[0])
    expect_refused(one, f"{expected}a dict of 'own': Tensor")
    scalar = family_with(
        finish=lambda self, *given: ({"own": torch.ones(())}, right(self, *given)[1])
    )
    expect_refused(scalar, "Own.finish must return a number per token, [4], as 'own', got []")


def test_local_returns_the_rows_of_the_packet():
    right = Sums.local

    def misnamed(self, *given):
        found = right(self, *given)
        return {row.replace("own_1", "onw_1"): x for row, x in found.items()}

    words = "Own.local must return the rows that packet names, ['own_0', 'own_1', 'own_2'], got "
    expect_refused(family_with(local=misnamed), words + "['onw_1', 'own_0', 'own_2']")


def test_a_family_without_statistics_is_refused():
    family = family_with()
    family.statistics = ()
    expect_refused(family, "Own.statistics must not be empty")


# method -> how it can write to what other families read, and the name of that
WRITES = {
    "the softmax": ("local", lambda tile, softmax, rows: softmax.exp.pow_(2), "softmax.exp"),
    "logits": ("local", lambda tile, softmax, rows: tile.z.mul_(2), "tile.z"),
    "rows": ("merge", lambda rows, merging: rows["sum"].mul_(2), "rows['sum']"),
    "a maximum": ("merge", lambda rows, merging: merging.shift.add_(1), "merging.shift"),
    "sums": ("finish", lambda sums, joined: sums.pop("sum"), "sums['sum']"),
    "the whole": ("finish", lambda sums, joined: joined.whole.add_(1), "joined.whole"),
    "a factor": ("coefficient", lambda c, *others: c.mul_(2), "coefficient"),
    "weights": ("coefficient", lambda c, z, p, merged, grads: p.mul_(2), "weight"),
    "upstream": ("direct", lambda dz, tile, merged, grads: grads["lse"].mul_(2), "grads['lse']"),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_method_that_changes_what_others_read_is_refused(what):
    method, write, name = WRITES[what]
    right = getattr(Sums, method)

    def writing(self, *given):
        found = right(self, *given)
        write(*given)
        return found

    words = f"Own.{method} must not change what it gets"
    with (
        pytest.raises(ValueError, match=re.escape(words)) as caught,
        registered(family_with(**{method: writing})),
    ):
        pass
    assert name in str(caught.value)
    with torch.inference_mode():  # whose tensors do not say so
        expect_refused(family_with(**{method: writing}), words)


def test_a_change_in_place_that_has_no_room_is_named_too():
    def coefficient(self, coefficient, shifted, weight, merged, grads):
        return coefficient.add_(weight)

    words = r"Own.coefficient must not change what it gets, .* got RuntimeError: output with shape"
    with pytest.raises(ValueError, match=words), registered(family_with(coefficient=coefficient)):
        pass


@pytest.mark.parametrize("method, record", [("local", "Softmax"), ("join", "Joined")])
def test_a_field_that_a_record_does_not_have_is_told_those_there_are(method, record):
    def read(*given):
        return given[1].p

    fields = {"Softmax": ".z, .peak, .shifted, .exp, ", "Joined": ".shift, .top, "}
    words = f"{record} has no 'p': its fields are {fields[record]}"
    family = family_with(**{method: reading(method, read)})
    with pytest.raises(AttributeError, match=re.escape(words)), registered(family):
        pass


def test_a_maximum_without_a_merge_is_told_of_it():
    class Highest(Family):
        statistics = packet = ("own",)

        def local(self, tile, softmax, rows):
            return {"own": tile.z.amax(-1)}

        def finish(self, sums, joined):
            return {"own": sums["own"]}, {}

    words = r"look at .*local, and rows that are no sums, as a maximum, need a merge of their own"
    with pytest.raises(ValueError, match=words), registered(Highest()):
        pass


def test_a_maximum_whose_row_has_another_name_is_found_by_a_part_without_ids():
    class Highest(Family):
        statistics = ("own",)
        adds_up = False

        def __init__(self, row):
            self.packet, self.row = (row,), row

        def local(self, tile, softmax, rows):
            return {self.row: tile.z.amax(-1)}

        def merge(self, rows, merging):
            return {self.row: rows[self.row].amax(0)}

        def join(self, sums, joined):
            return sums

        def finish(self, sums, joined):
            return {"own": sums[self.row]}, {}

    words = r"got own = 0 with a part that has no ids .* that of a maximum ends in max"
    with pytest.raises(ValueError, match=words), registered(Highest("own_row")):
        pass
    with registered(Highest("own_max")):
        pass


def test_what_direct_gets_to_add_to_may_be_added_to_in_place():
    def adding(self, dz, tile, merged, grads):
        found = Sums.direct(self, dz, tile, merged, grads)
        return dz.copy_(found)

    with registered(family_with(direct=adding)):
        pass


@pytest.mark.parametrize("mixed", [lambda v: v - v.mean(), lambda v: v - v.max()])
def test_a_value_that_depends_on_other_tokens_is_found(mixed):
    def finish(self, sums, joined):
        values, kept = Sums.finish(self, sums, joined)
        return {name: mixed(x) for name, x in values.items()}, kept

    words = "of half of the tokens (each must be computed by itself)"
    expect_refused(family_with(finish=finish), words)


def test_an_attribute_that_gets_no_gradient_is_refused():
    family = family_with()
    family.cost = torch.nn.Parameter(torch.ones(3))
    expect_refused(family, "Own.cost gets no gradient, so it must not require one: detach it")


def test_a_parameter_that_a_method_reads_gets_no_gradient_and_is_refused():
    gain = torch.nn.Linear(1, 1, bias=False)

    def local(self, tile, softmax, rows):
        return {"own_0": tile.z.nan_to_num(neginf=0.0).sum(-1) * gain.weight[0, 0]}

    expect_refused(family_with(local=local), "Own.local must return constants, got a result that")


def raw_family():
    """sum p^1.5 of exponentials that are relative to nothing."""

    class Raw(Family):
        statistics = packet = ("raw",)

        def local(self, tile, softmax, rows):
            return {"raw": (tile.z.exp() ** 1.5).sum(-1)}

        def finish(self, sums, joined):
            lse = joined.top + joined.log_sum
            return {"raw": sums["raw"] * (-1.5 * lse).exp()}, {}

    return Raw()


def test_exponentials_that_overflow_in_fp32_are_a_warning():
    words = "'raw' of family Raw is inf of fp32 logits and .* where all logits were moved by 100"
    with pytest.warns(UserWarning, match=words), registered(raw_family()):
        pass


@pytest.mark.parametrize("named", [(), ("own_p2",)])
def test_a_gradient_that_gradients_does_not_name_is_found(named):
    from test_registration import Squares

    family = Squares()
    family.gradients = named
    missing = "own_p2" if not named else "own_z2"
    expect_refused(
        family,
        "Squares.gradients must name the statistics of which methods have the gradient, got "
        f"{named!r}, but {missing!r}",
    )


# fields that are None in calls without labels -> a method that takes them for tensors
OF_LABELS = {
    "joined.labels": ("join", lambda sums, joined: joined.labels.clamp(min=0)),
    "joined.target": ("finish", lambda sums, joined: joined.target - joined.top),
    "joined.offset": ("finish", lambda sums, joined: torch.exp(joined.offset)),
    "joined.p_target": ("join", lambda sums, joined: joined.p_target / joined.whole),
    "tile.target": ("local", lambda tile, softmax, rows: tile.target[:, None]),
    "softmax.owned": ("local", lambda tile, softmax, rows: torch.where(softmax.owned, 1, 0)),
    "softmax.column": ("local", lambda tile, softmax, rows: tile.z.gather(1, softmax.column)),
}


def reading(method, read, base=Sums):
    right = getattr(base, method)

    def function(self, *given):
        read(*given)
        return right(self, *given)

    return function


@pytest.mark.parametrize("field", OF_LABELS)
def test_a_method_that_needs_labels_in_every_call_is_named_with_both_remedies(field):
    method, read = OF_LABELS[field]
    function = reading(method, read)
    words = f"Own.{method} must do without {field}, which are None in calls without labels: ask `if"
    expect_refused(family_with(**{method: function}), words)
    with_labels = {"wanted": lambda self, call: call.has_labels and Sums.wanted(self, call)}
    with registered(family_with(**{method: function}, **with_labels)):
        pass


@pytest.mark.parametrize("method", ["local", "direct"])
@pytest.mark.parametrize("needs", [True, False])
def test_logits_of_labels_are_there_in_local_of_a_family_that_needs_them(method, needs):
    def read(*given):
        tile = given[0] if method == "local" else given[1]
        return tile.label_logits[:, None]

    wanted = lambda self, call: call.has_labels and Sums.wanted(self, call)  # noqa: E731
    family = family_with(**{method: reading(method, read)}, needs_label_logits=needs, wanted=wanted)
    if needs and method == "local":
        with registered(family):
            return
    needed = "" if needs else "needs needs_label_logits = True, and "
    words = f"Own.{method} must do without tile.label_logits, which {needed}`local` alone has"
    expect_refused(family, words)


def test_a_family_that_needs_logits_of_labels_is_wanted_with_labels_alone():
    words = "Own.wanted must return False for a call without labels, which has no logits of labels"
    expect_refused(family_with(needs_label_logits=True), words)


def test_an_error_of_a_method_that_is_about_nothing_absent_stays_what_it_is():
    def local(self, tile, softmax, rows):
        return None if tile.label_logits is None and len(3) else {}

    with pytest.raises(TypeError, match="'int' has no len"), registered(family_with(local=local)):
        pass


NOT_WANTED = {
    "never": lambda self, call: False,
    "without labels alone": lambda self, call: not call.has_labels,
    "two statistics alone": lambda self, call: len(call.want) > 1,
}


@pytest.mark.parametrize("when", NOT_WANTED)
def test_a_family_that_a_call_which_wants_it_leaves_out_is_refused(when):
    words = "Own.wanted must return True for a call with labels that wants 'own', got False"
    expect_refused(family_with(wanted=NOT_WANTED[when]), words)


@pytest.mark.parametrize(
    ("left", "words"), [(0, "['own'], got no ['own']"), (1, "['own_0', 'own_1', 'own_2']")]
)
def test_what_finish_leaves_out_is_named_with_its_family(left, words):
    def finish(self, sums, joined):
        found = list(Sums.finish(self, sums, joined))
        found[left] = {}
        return found

    expect_refused(family_with(finish=finish), f"Own.finish must return {words}")


class WithoutDevice(Family):
    """Its module has no module of device functions beside it."""

    statistics = packet = ("plain",)

    def local(self, tile, softmax, rows):
        return {"plain": softmax.exp.sum(-1)}

    def rescale(self, rows, drop, factor):
        return {"plain": factor * rows["plain"]}

    def target(self, p, offset):
        return {"plain": p}

    def finish(self, sums, joined):
        return {"plain": sums["plain"] / joined.whole}, {}


def test_a_family_without_device_functions_is_named_with_both_remedies(device):
    logits = torch.randn(3, 8, device=device)
    with registered(WithoutDevice()):
        found = hl.vocab_statistics(logits, want=("plain",), options=OPTIONS)
        assert torch.allclose(found.plain, torch.ones_like(found.plain))
        words = r"family WithoutDevice \(plain\) must have `device`, .*give it `device`.*backend='torch'"
        with pytest.raises(NotImplementedError, match=words):
            hl.vocab_statistics(logits, want=("plain",), options=hl.Options(backend="triton"))


def test_a_statistic_that_nothing_wanted_says_how_to_want_it():
    with registered(WithoutDevice()):
        stats = hl.vocab_statistics(torch.zeros(1, 4), options=OPTIONS)
        with pytest.raises(AttributeError, match=r"no 'plain': .* needs want=\('plain',\)"):
            _ = stats.plain


class Excess(Family):
    """The sum of what logits have above a threshold, squared: flat where they have nothing."""

    statistics = gradients = packet = ("excess",)

    def __init__(self, threshold, factor=2.0):
        self.threshold, self.factor = float(threshold), factor

    def above(self, z):
        return torch.relu(z.masked_fill(z == -torch.inf, 0.0) - self.threshold)

    def local(self, tile, softmax, rows):
        return {"excess": row_sum(self.above(tile.z) ** 2)}

    def finish(self, sums, joined):
        return {"excess": sums["excess"]}, {}

    def direct(self, dz, tile, merged, grads):
        if "excess" not in grads:
            return dz
        return dz + self.factor * grads["excess"] * self.above(tile.z)


class ExcessWithoutLabel(Excess):
    def local(self, tile, softmax, rows):
        return {"excess": row_sum(self.above(softmax.z) ** 2)}


@pytest.mark.parametrize("threshold", [1, 2.5, 3, 5, 10, 30, 200])
def test_a_gradient_that_is_wrong_at_larger_logits_is_found(threshold):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with registered(Excess(threshold)):
            pass
    words = "Excess must agree, got the gradient of lse + excess"
    for factor in (1.0, 0.0):
        expect_refused(Excess(threshold, factor), words)
    words = "ExcessWithoutLabel must agree, got excess"
    expect_refused(ExcessWithoutLabel(threshold), words)


class BestOther(Family):
    """The largest logit of other ids than the label."""

    statistics = gradients = ("best_other",)
    packet = merged = ("best_other_max",)
    adds_up = False

    def wanted(self, call):
        return call.has_labels and super().wanted(call)

    def local(self, tile, softmax, rows):
        return {"best_other_max": softmax.peak}

    def merge(self, rows, merging):
        return {"best_other_max": rows["best_other_max"].amax(0)}

    def join(self, sums, joined):
        return sums

    def finish(self, sums, joined):
        largest = sums["best_other_max"]
        return {"best_other": largest}, {"best_other_max": largest}

    def is_largest(self, tile, merged):
        is_label = tile.target[:, None] == torch.arange(tile.z.shape[1])
        return (tile.z == merged["best_other_max"]) & ~is_label

    def direct(self, dz, tile, merged, grads):
        if "best_other" not in grads:
            return dz
        return dz + grads["best_other"] * self.is_largest(tile, merged)


class BestOtherOrLabel(BestOther):
    def is_largest(self, tile, merged):
        return tile.z == merged["best_other_max"]


def test_a_gradient_that_is_wrong_where_the_label_is_not_alone_is_found():
    """Both are right where no two logits are equal."""
    with registered(BestOther()):
        pass
    words = "by finite differences where the label's logit equals the largest other one"
    expect_refused(BestOtherOrLabel(), words)


KEPT = {}


class KeepsItsValue(Sums):
    """Its gradient reads what the last forward has left behind."""

    def __init__(self, name, parts):
        super().__init__(name, parts)
        self.merged = ()

    def keep(self, value):
        self.value = value

    def kept(self):
        return self.value

    def finish(self, sums, joined):
        values, rows = super().finish(sums, joined)
        self.keep(rows)
        return values, {}

    def coefficient(self, total, shifted, weight, merged, grads):
        rows = {name: x[:, None].to(weight) for name, x in self.kept().items()}
        return super().coefficient(total, shifted, weight, rows, grads)


class KeepsItElsewhere(KeepsItsValue):
    def keep(self, value):
        KEPT["value"] = value

    def kept(self):
        return KEPT["value"]


@pytest.mark.parametrize("kind", [KeepsItsValue, KeepsItElsewhere])
def test_a_family_keeps_nothing_between_forward_and_backward(kind):
    words = f"family {kind.__name__} must keep nothing between a forward and its backward but rows"
    expect_refused(kind("own", PARTS[:1]), words)


def test_an_upstream_gradient_of_lse_is_no_more_there_than_any_other():
    def coefficient(self, total, shifted, weight, merged, grads):
        total = Sums.coefficient(self, total, shifted, weight, merged, grads)
        return total + 0 * grads["lse"]

    expect_refused(family_with(coefficient=coefficient), "coefficient reads grads['lse'], but")


class BestOtherOrAbove(BestOther):
    def is_largest(self, tile, merged):
        is_label = tile.target[:, None] == torch.arange(tile.z.shape[1])
        return (tile.z >= merged["best_other_max"]) & ~is_label


@pytest.mark.parametrize("kind", [BestOther, BestOtherOrAbove])
def test_a_gradient_that_compares_logits_with_those_of_the_forward_is_a_warning(kind):
    words = (
        f"gradient of 'best_other' of family {kind.__name__} is another where logits differ "
        "from those of the forward in the last bit"
    )
    with pytest.warns(UserWarning, match=words), registered(kind()):
        pass


class Best(BestOther):
    """The largest logit of all ids, which has a kink where two of them are the largest."""

    def finish(self, sums, joined):
        return {"best_other": joined.top}, {"best_other_max": joined.top}

    def is_largest(self, tile, merged):
        return tile.z == merged["best_other_max"]


def test_a_kink_where_two_logits_are_equal_is_no_error():
    with registered(Best()):
        pass


class Total(Family):
    """The sum of z."""

    statistics = gradients = packet = ("own_total",)

    def local(self, tile, softmax, rows):
        return {"own_total": row_sum(tile.z.masked_fill(tile.z == -torch.inf, 0.0))}

    def finish(self, sums, joined):
        return {"own_total": sums["own_total"]}, {}

    def direct(self, dz, tile, merged, grads):
        return dz + grads.get("own_total", 0.0)


@pytest.mark.parametrize("wrong", ["number", "nan"])
def test_a_gradient_where_no_id_is_names_what_to_write(wrong):
    methods = {}
    if wrong == "nan":
        methods["direct"] = lambda self, dz, tile, merged, grads: dz + tile.z * 0
    found = "the gradient of lse + own_total = " + ("nan" if wrong == "nan" else "0.625")
    words = f"must leave the gradient 0 where a logit is -inf, got {found} there: what direct and"
    expect_refused(type("Own", (Total,), methods)(), words)


def test_a_statistic_that_is_constant_in_all_tries_is_a_warning():
    words = r"statistics \['excess'\] of family Excess were constant .* \(\|z\| up to 268\)"
    with pytest.warns(UserWarning, match=words), registered(Excess(300)):
        pass


def test_a_kink_and_an_overflow_at_larger_logits_are_no_error():
    class Kink(Excess):
        def above(self, z):
            return torch.relu(z.masked_fill(z == -torch.inf, 0.0) - self.threshold).sqrt()

        def direct(self, dz, tile, merged, grads):
            is_above = tile.z > self.threshold
            return dz + grads["excess"] * is_above if "excess" in grads else dz

    class Exponential(Excess):
        def above(self, z):
            return torch.exp(8 * z)

        def direct(self, dz, tile, merged, grads):
            slope = 16 * self.above(tile.z) ** 2
            return dz + grads["excess"] * slope if "excess" in grads else dz

    class Bounded(Excess):
        def above(self, z):
            if z.max() > 20:
                raise ValueError("logits must be at most 20")
            return super().above(z)

    # beside the number 13.27 / 0.8 of the larger logits
    for family in (Kink(16.58), Exponential(0), Bounded(1)):
        with registered(family):
            pass


def test_an_error_of_a_method_has_a_note_that_names_the_method():
    def finish(self, sums, joined):
        return {"own": sums["own_0"] @ joined.whole[:3]}, {}

    with pytest.raises(RuntimeError) as caught, registered(family_with(finish=finish)):
        pass
    words = "in Own.finish(sums, joined), which register_statistic tries with "
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].startswith(words)
    local = lambda self, tile, softmax: {}  # noqa: E731
    with pytest.raises(TypeError, match="takes 3") as caught, registered(family_with(local=local)):
        pass
    if sys.version_info >= (3, 11):
        assert "in Own.local(tile, softmax, rows)" in caught.value.__notes__[0]


def test_an_error_of_a_table_that_was_not_cut_says_how_to_cut_it():
    def local(self, tile, softmax, rows):
        return {"own_0": (tile.z * torch.arange(20.0)).sum(-1)}

    with pytest.raises(RuntimeError) as caught, registered(family_with(local=local)):
        pass
    if sys.version_info >= (3, 11):
        assert "table[tile.first_id : tile.first_id + " in caught.value.__notes__[0]


def test_methods_may_call_each_other_by_names_of_arguments():
    def merge(self, rows, merging):
        found = self.rescale(rows, drop=merging.drop, factor=merging.factor)
        return {name: x.sum(0) for name, x in found.items()}

    with registered(family_with(merge=merge)):
        pass


# a row that a method reads and that is not there -> what to write
READ = {
    "merged['excess']": "name it in Own.merged and return it from finish",
    "merged['lse']": "name it in Own.merged and return it from finish, by a name of its own such as "
    "'excess_lse'",
    "grads['excess']": "ask whether an upstream gradient is there, `if 'excess' in grads`",
}


@pytest.mark.parametrize("read", READ)
def test_a_row_that_is_not_there_is_told_from_an_upstream_gradient(read):
    def direct(self, dz, tile, merged, grads):
        if read.startswith("merged") and "excess" not in grads:
            return dz
        factor = eval(read, {}, {"merged": merged, "grads": grads})
        return dz + 2 * factor * self.above(tile.z)

    family = type("Own", (Excess,), {"direct": direct})(1)
    words = f"Own.direct reads {read}, but {read[:-2].split('[')[0]} has no row "
    expect_refused(family, words)
    with pytest.raises(ValueError) as caught, registered(family):
        pass
    assert str(caught.value).endswith(READ[read])


def test_a_method_may_handle_a_row_that_is_not_there_itself():
    def direct(self, dz, tile, merged, grads):
        try:
            upstream = grads["excess"]
        except KeyError:
            return dz
        return dz + 2 * upstream * self.above(tile.z)

    with registered(type("Own", (Excess,), {"direct": direct})(1)):
        pass


def test_a_packet_that_is_forgotten_is_told():
    family = type("Own", (Excess,), {"packet": ()})(1)
    words = (
        "Own.packet must name the rows that Own.local returns, got (): write packet = ('excess',)"
    )
    expect_refused(family, words)


def test_a_sum_that_is_not_there_is_told():
    finish = lambda self, sums, joined: ({"excess": sums["exces"]}, {})  # noqa: E731
    words = "Own.finish reads sums['exces'], but sums has no row 'exces': name it in Own.packet"
    expect_refused(type("Own", (Excess,), {"finish": finish})(1), words)


def test_the_sums_of_others_are_not_returned():
    finish = lambda self, sums, joined: (dict(sums, excess=sums["excess"]), {})  # noqa: E731
    family = type("Own", (Excess,), {"finish": finish})(1)
    words = "Own.finish must return rows of its own, got ['logits_at', 'owners'] of other families"
    expect_refused(family, words)
    with pytest.raises(ValueError, match=r"return \['excess'\] alone"), registered(family):
        pass


class Cube(Family):
    """A right family of one statistic."""

    statistics = gradients = packet = ("cube",)

    def finite(self, tile):
        return tile.z.masked_fill(tile.z == -torch.inf, 0)

    def local(self, tile, softmax, rows):
        return {"cube": row_sum(self.finite(tile) ** 3)}

    def finish(self, sums, joined):
        return {"cube": sums["cube"]}, {}

    def direct(self, dz, tile, merged, grads):
        return dz + 3 * grads["cube"] * self.finite(tile) ** 2 if "cube" in grads else dz


def without(method, other=None, **attributes):
    """A family of one statistic that lacks a method, or has it by another name."""
    given = {name: value for name, value in vars(Cube).items() if name[0] != "_"} | attributes
    moved = given.pop(method)
    if other is not None:
        given[other] = moved
    return type("Own", (Family,), given)()


def test_a_misspelt_method_is_named():
    words = "Own must have methods of its own, got no "
    gradient = f"{words}coefficient or direct or scaled"
    expect_refused(without("direct", "dirct"), f"{gradient}, but 'dirct': did you mean 'direct'?")
    local = f"{words}local, but 'locale': did you mean 'local'?"
    expect_refused(without("local", "locale"), local)
    expect_refused(without("finish"), "got no finish")


def test_a_gradient_without_a_method_names_both_ways_out():
    words = "scaled: write one of these, or gradients = () for statistics without a gradient"
    expect_refused(without("direct"), words)
    with registered(without("direct", gradients=())):
        pass


def test_a_row_of_the_package_is_told_as_one():
    def renamed(name, row):
        family = without("direct", gradients=(), statistics=(name,), packet=(row,))
        type(family).local = lambda self, tile, softmax, rows: {row: row_sum(self.finite(tile))}
        type(family).finish = lambda self, sums, joined: ({name: sums[row]}, {})
        return family

    package = "got 'squares', which CollisionFamily (collision) has, a row of the package's own: "
    choose = f"{package}choose another name for it, such as 'own_squares'"
    expect_refused(renamed("squares", "squares"), choose)
    expect_refused(renamed("own", "squares"), f"{package}name rows after the statistic, ('own',)")
    with registered(renamed("squares", "own_squares")), registered(renamed("own", "own")):
        pass
