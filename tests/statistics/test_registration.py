"""What is registered gives right numbers whatever its names and its order on ranks, or is refused
with the reason."""

import os
import re

import energy_statistic
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from own_families import WAYS, Sums, broken, registered
from pages import marked_block
from ranks import on_ranks

import tp_headloss as hl
from tp_headloss.engine.trial import LABELS, Trial, try_family
from tp_headloss.engine.untried import try_larger
from tp_headloss.statistics import BUILT_IN, families_with
from tp_headloss.statistics.family import Family, row_sum

V, N = 40, 5
POWER, MOMENT, SURPRISE = ("power", 1.5, 1.0), ("moment", 2, 1.0), ("surprise", 1.0, 1.0)
NAMES = ("aa", "bb", "cc", "squares_of_mine", "z2")


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(N, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[0] = logits[0].argmax()
    return logits.to(dtype), labels


def check(families, want, labelled=True):
    """Compare values and gradients of registered families, beside an entropy, with float64 of
    torch."""
    logits, labels = problem()
    leaf, z = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    options = hl.Options(backend="torch")
    stats = hl.vocab_statistics(leaf, labels if labelled else None, want=want, options=options)
    loss, expected_loss = 0.0, 0.0
    for i, family in enumerate(families):
        value, expected = getattr(stats, family.name), family.truth(z)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
        loss, expected_loss = loss + (i + 1) * value.sum(), expected_loss + (i + 1) * expected.sum()
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-9, atol=1e-9)
    (loss + stats.entropy.sum()).backward()
    (expected_loss + entropy.sum()).backward()
    torch.testing.assert_close(leaf.grad, z.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", BUILT_IN, ids=lambda family: type(family).__name__)
def test_families_of_the_package_pass_the_check(family):
    trial = Trial(family, BUILT_IN)
    try_family(trial)
    try_larger(trial)
    named = trial.values(trial.request(LABELS)).keys()
    assert {*family.gradients} & named <= trial.moving


def test_the_example_passes_the_check_in_fp32_too():
    try_family(Trial(energy_statistic.Energy(), families_with(energy_statistic.Energy())))

    class Rounded(Sums):
        def local(self, tile, softmax, rows):
            return {row: x.float() for row, x in super().local(tile, softmax, rows).items()}

    with registered(Rounded("rounded", (POWER, MOMENT, SURPRISE))):
        pass


def test_what_a_registration_runs_is_small_and_on_the_cpu():
    with torch.device("meta"), registered(Sums("own", (POWER,))):
        pass
    made = []

    class Counted(Sums):
        def local(self, tile, softmax, rows):
            made.append(tile.z.numel())
            return super().local(tile, softmax, rows)

    with registered(Counted("own", (POWER,))):
        assert len(made) <= 220 and sum(made) <= 20_000


def outputs_of_page(group, device):
    """Values and gradients of the guide's statistics, of this rank's columns."""
    scope = {}
    with registered():
        exec(marked_block("run", "renyi"), scope)
        logits, labels = problem(torch.float32)
        shard = hl.VocabShard.from_group(group, V)
        leaf = logits[:, shard.start : shard.stop].clone().to(device).requires_grad_()
        want = "renyi_2", "renyi_1_5", "collision"
        stats = hl.vocab_statistics(
            leaf, labels.to(device), shard=shard, want=want, options=hl.Options(backend="torch")
        )
        (stats.renyi_2 + 2 * stats.renyi_1_5 + stats.collision).sum().backward()
        values = [stats.renyi_2, stats.renyi_1_5, stats.collision]
        return torch.stack(values).detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_guide_has_two_instances_of_one_class_and_they_are_right(ranks, capsys):
    results = on_ranks(ranks, outputs_of_page)
    z = problem()[0].requires_grad_()
    p = z.softmax(-1)
    orders = [(p**order).sum(-1).log() / (1 - order) for order in (2.0, 1.5)]
    collision = p.square().sum(-1)
    (orders[0] + 2 * orders[1] + collision).sum().backward()
    for values, _ in results:
        torch.testing.assert_close(
            values.double(), torch.stack([*orders, collision]).detach(), rtol=1e-5, atol=1e-5
        )
    grad = torch.cat([grad for _, grad in results], 1).double()
    torch.testing.assert_close(grad, z.grad, rtol=1e-4, atol=1e-5)
    assert ranks > 1 or capsys.readouterr().out == "tensor([8.]) tensor([8.])\n"


@pytest.mark.parametrize("order", [0.3, 0.5, 0.9, 1.1, 3.0])
def test_the_guides_statistic_is_right_for_orders_on_both_sides_of_1(order):
    scope = {}
    with registered():
        exec(marked_block("run", "renyi"), scope)
        hl.register_statistic(scope["Renyi"](order, "renyi"))
        logits, _ = problem()
        logits[:, 3] = -torch.inf
        leaf, z = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        found = hl.vocab_statistics(
            leaf, want=("renyi",), options=hl.Options(backend="torch")
        ).renyi
    expected = (order * z.log_softmax(-1)).exp().sum(-1).log() / (1 - order)
    torch.testing.assert_close(found, expected)
    (found.sum() + 0 * leaf[:, 0].sum()).backward()
    kept = z[:, [i for i in range(V) if i != 3]]
    of_kept = (order * kept.log_softmax(-1)).exp().sum(-1).log() / (1 - order)
    (slope,) = torch.autograd.grad(of_kept.sum(), z)
    torch.testing.assert_close(leaf.grad, slope)


def costs_of_page(group, device, labelled):
    """Values and gradients of the guide's expected costs, of this rank's columns."""
    scope = {}
    with registered():
        exec(marked_block("run", "renyi"), scope)
        exec(marked_block("run", "cost"), scope)
    logits, labels = problem(torch.float32)
    labels[1], labels[2] = -100, V  # ignored, and bad
    shard = hl.VocabShard.from_group(group, V)
    leaf = logits[:, shard.start : shard.stop].clone().to(device).requires_grad_()
    with registered(scope["Cost"](torch.arange(float(V)) ** 0.5)):
        cost = hl.vocab_statistics(
            leaf,
            labels.to(device) if labelled else None,
            shard=shard,
            want=("cost",),
            options=hl.Options(backend="torch"),
        ).cost
    cost.nan_to_num().sum().backward()
    return cost.detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_guides_weights_of_ids_are_right_with_labels_and_without(ranks, labelled):
    results = on_ranks(ranks, costs_of_page, labelled)
    z = problem()[0].requires_grad_()
    expected = z.softmax(-1) @ torch.arange(float(V)).double().sqrt()
    expected.sum().backward()
    known = [0, 3, 4] if labelled else [0, 1, 2, 3, 4]
    grad = torch.cat([grad for _, grad in results], 1).double()
    torch.testing.assert_close(grad[known], z.grad[known], rtol=1e-4, atol=1e-5)
    for values, _ in results:
        torch.testing.assert_close(
            values[known].double(), expected.detach()[known], rtol=1e-5, atol=1e-5
        )
        assert not labelled or (values[1] == 0 and values[2].isnan())


def margins_of_page(group, device):
    """Values and gradients of the guide's largest other logit, of this rank's columns."""
    scope = {"torch": torch}
    with registered():
        exec(marked_block("run", "renyi"), scope)
        scope |= {"HeadLoss": hl.HeadLoss, "Term": hl.Term}
        exec(marked_block("run", "maximum"), scope)
        logits, labels = problem(torch.float32)
        labels[1] = -100
        shard = hl.VocabShard.from_group(group, V)
        leaf = logits[:, shard.start : shard.stop].clone().to(device).requires_grad_()
        head = hl.HeadLoss(scope["margin"], options=hl.Options(backend="torch"))
        out = head(leaf, labels.to(device), shard=shard)
        out.loss.backward()
        return out.loss.detach().cpu(), leaf.grad.cpu()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_guides_maximum_is_that_of_the_other_ids(ranks):
    results = on_ranks(ranks, margins_of_page)
    logits, labels = problem()
    z = logits.requires_grad_()
    of_label = z.gather(1, labels[:, None])
    best = z.scatter(1, labels[:, None], -torch.inf).amax(1)
    values = torch.relu(1 - of_label[:, 0] + best)
    expected = values[[0, 2, 3, 4]].mean()
    expected.backward()
    for loss, _ in results:
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    grad = torch.cat([grad for _, grad in results], 1).double()
    torch.testing.assert_close(grad, z.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a family without device functions")
def test_the_guides_maximum_keeps_its_gradient_where_logits_are_made_twice():
    """These sizes have a last block of one token, whose product is another one than the first, in
    the last bit."""
    scope = {"torch": torch}
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 128, generator=generator) for n in (257, 1000))
    hidden.requires_grad_()
    labels = torch.zeros(257, dtype=torch.int64)
    with registered():
        exec(marked_block("run", "renyi"), scope)
        scope |= {"HeadLoss": hl.HeadLoss, "Term": hl.Term}
        exec(marked_block("run", "maximum"), scope)
        linear = hl.Linear("recompute", budget=1 << 20)
        given = {"want": ("best_other",), "linear": linear}
        stats = hl.linear_vocab_statistics(hidden, weight, labels, **given)
        stats.best_other.sum().backward()
    best = (hidden.detach() @ weight[1:].t()).argmax(1) + 1
    torch.testing.assert_close(hidden.grad, weight[best])


def test_check_finds_a_registered_statistic_that_is_written_without_a_word():
    def doubled(stats):
        return stats.own.data.mul_(2)

    x, labels = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    with registered():
        hl.register_statistic(renamed())
        term = hl.Term("a", lambda stats: doubled(stats) * stats.lse, want=("own",))
        head = hl.HeadLoss(term, options=hl.Options(check=True, backend="torch"))
        with pytest.raises(RuntimeError, match="must not change them in place"):
            head(x, labels)


def renamed(**names):
    """A family of one statistic with other names in some fields."""
    family = Sums("own", (POWER,))
    for field, value in names.items():
        setattr(family, field, value)
    return family


TAKEN = {
    "a packet row of a built-in family": (
        {"packet": ("squares",)},
        r"packet rows of Sums \(own\) .* got 'squares', which CollisionFamily \(collision\) has, a row of .*: "
        r".* \('own',\)",
    ),
    "the softmax's rows": (
        {"packet": ("sum",)},
        r"got 'sum', which SoftmaxFamily \(every call\) has",
    ),
    "a merged row": (
        {"merged": ("collision",)},
        r"merged rows .* 'collision', which CollisionFamily",
    ),
    "what carriers count": ({"packet": ("owners",)}, "got 'owners', which every call has"),
    "a merged mean of the second exchange": (
        {"merged": ("gap",)},
        "got 'gap', which TeacherFamily",
    ),
    "a maximum that would be added up": (
        {"packet": ("own_max",)},
        "`merge` of its own for the packet row 'own_max'",
    ),
    "a row that ranks would not add up": (
        {"packet": ("own_shift",)},
        "for the packet row 'own_shift'",
    ),
    "a string": (
        {"packet": "own"},
        r"Sums.packet must be a tuple of names such as \('energy',\), got 'own'",
    ),
    "a set": ({"packet": {"own"}}, "Sums.packet must be a tuple of names"),
    "no name": (
        {"statistics": ("own 2",)},
        r"Sums.statistics must be a tuple of names .* got \('own 2',\)",
    ),
    "a keyword": ({"statistics": ("lambda",)}, "Sums.statistics must be a tuple of names"),
    "a gradient of nothing": (
        {"gradients": ("onw",)},
        r"gradients must be among its statistics \['own'\], got",
    ),
}
ATTRIBUTES = (
    "valid",
    "labels",
    "vocab_size",
    "registered",
    "lse",
    "hits",
    "mass",
    "correct",
    "count",
    "owners",
    "ids",
)


@pytest.mark.parametrize("case", TAKEN)
def test_a_row_or_name_that_is_taken_is_an_error(case):
    names, words = TAKEN[case]
    with pytest.raises(ValueError, match=words), registered(renamed(**names)):
        pass


@pytest.mark.parametrize("name", [*ATTRIBUTES, "entropy", "jsd", "log_probs_at"])
def test_a_statistic_cannot_have_the_name_of_an_attribute_of_the_results(name):
    with (
        pytest.raises(ValueError, match=rf"of which \['{name}'\] are names of the package itself"),
        registered(Sums(name, (POWER,))),
    ):
        pass


def test_rows_of_two_registered_families_are_apart():
    first, second = Sums("first", (POWER,)), Sums("second", (MOMENT,))
    second.packet = first.packet
    words = r"Sums \(second\) must have names of their own, got 'first_0', which Sums \(first\) has"
    with registered(first):
        with pytest.raises(ValueError, match=words):
            hl.register_statistic(second)
        # a refused family leaves nothing
        assert hl.statistics.FAMILIES[len(BUILT_IN) :] == (first,)


class Cube(Family):
    """The guide's other example."""

    statistics = gradients = packet = ("cube",)

    def absent(self, z):
        return z.masked_fill(z == -torch.inf, 0)

    def local(self, tile, softmax, rows):
        return {"cube": self.absent(tile.z).pow(3).sum(-1)}

    def finish(self, sums, joined):
        return {"cube": sums["cube"]}, {}

    def direct(self, dz, tile, merged, grads):
        return dz + 3 * grads["cube"] * self.absent(tile.z) ** 2 if "cube" in grads else dz


def test_an_id_without_a_logit_must_add_nothing():
    with registered(Cube()):
        logits = torch.tensor([[1.0, 2.0, -torch.inf]])
        options = hl.Options(backend="torch")
        assert hl.vocab_statistics(logits, want=("cube",), options=options).cube == 9
    careless = type("Careless", (Cube,), {"absent": lambda self, z: z})()
    with (
        pytest.raises(ValueError, match=r"an id more, whose logit is -inf, .*: look at local$"),
        registered(careless),
    ):
        pass


def every_row(self, rows, merging):
    return {row: x.sum(0) for row, x in rows.items()}


OF_OTHERS = {
    "merge": (
        every_row,
        r"Own.merge must return rows of its own, got \['max', 'owner', 'sum', 'target'\]",
    ),
    "rescale": (
        lambda self, rows, drop, factor: {row: x * factor for row, x in rows.items()},
        r"Own.rescale must return the rows .* of its packet alone, got \['max', ",
    ),
    "finish": (
        lambda self, sums, joined: ({"own": joined.whole, "lse": joined.whole}, {}),
        r"Own.finish must return rows of its own, got \['lse'\]",
    ),
}


@pytest.mark.parametrize("method", OF_OTHERS)
def test_results_that_would_replace_those_of_other_families_are_refused(method):
    function, words = OF_OTHERS[method]
    family = type("Own", (Sums,), {method: function})("own", (POWER,))
    with pytest.raises(ValueError, match=words), registered(family):
        pass


def test_merged_rows_of_other_families_are_refused():
    class Own(Sums):
        def finish(self, sums, joined):
            values, merged = super().finish(sums, joined)
            return values, merged | {"shift": joined.top}

    with (
        pytest.raises(ValueError, match=r"Own.finish must return .* got \['shift'\]"),
        registered(Own("own", (POWER,))),
    ):
        pass


def test_an_upstream_gradient_that_is_not_there_is_looked_for():
    class Own(Sums):
        def coefficient(self, coefficient, shifted, weight, merged, grads):
            return coefficient + grads[self.name] * 1.5 * (weight**0.5 - merged["own_0"])

    words = "Own.coefficient reads grads.'own'., .* so ask .* `if 'own' in grads`"
    with pytest.raises(ValueError, match=words), registered(Own("own", (POWER,))):
        pass


class Largest(Family):
    """The largest logit besides the label's: no sum, and other without a label."""

    statistics = ("largest",)
    packet = ("own_max",)
    adds_up = False

    def local(self, tile, softmax, rows):
        return {"own_max": softmax.peak}

    def merge(self, rows, merging):
        return {"own_shift": rows["own_max"].amax(0)}

    def join(self, sums, joined):
        return sums

    def finish(self, sums, joined):
        return {"largest": sums["own_shift"]}, {}

    def wanted(self, call):
        return call.has_labels and super().wanted(call)


class Count(Largest):
    """Rows that are merged by their largest, which "sum" would add up."""

    packet = ("largest_row",)

    def local(self, tile, softmax, rows):
        return {"largest_row": softmax.peak}

    def merge(self, rows, merging):
        row = rows["largest_row"]  # 0 of a part without ids
        return {"largest_row": row.where(row != 0, -torch.inf).amax(0)}

    def finish(self, sums, joined):
        return {"largest": sums["largest_row"]}, {}


def test_what_ranks_cannot_add_up_needs_another_transport():
    logits, labels = problem()
    others = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    for family in (Largest(), Count()):
        with registered(family):
            given = {"want": ("largest",), "options": hl.Options(backend="torch")}
            assert torch.equal(hl.vocab_statistics(logits, labels, **given).largest, others)
            given["options"] = hl.Options(backend="torch", transport="sum")
            with pytest.raises(
                ValueError, match="largest is not a sum: it needs transport='gather', got 'sum'"
            ):
                hl.vocab_statistics(logits, labels, **given)
    adding = type("Adding", (Count,), {"adds_up": True})()
    with (
        pytest.raises(
            ValueError, match=r"ranks added up \(.* or adds_up = False\) .* look at merge"
        ),
        registered(adding),
    ):
        pass


def test_a_statistic_about_the_label_is_wanted_with_labels_alone():
    always = type("Always", (Largest,), {"wanted": Family.wanted})()
    words = "with a label and .* without .*`wanted` with labels only.*: look at target"
    with pytest.raises(ValueError, match=words), registered(always):
        pass


def test_a_table_must_be_looked_up_by_ids_alone_not_by_labels_that_are_ignored():
    class Costs(Family):
        statistics = packet = ("costs",)

        def wanted(self, call):
            return call.has_labels and super().wanted(call)

        def finish(self, sums, joined):
            costs = torch.arange(9.0)[self.ids(joined.labels)]
            return {"costs": 0 * sums["costs"] + costs}, {}

        def local(self, tile, softmax, rows):
            return {"costs": torch.zeros_like(tile.z[:, 0])}

        def ids(self, labels):
            return labels.clamp(min=0)

    with registered(Costs()):
        found = hl.vocab_statistics(torch.zeros(2, 9), torch.tensor([3, -100]), want=("costs",))
    assert found.costs.tolist() == [3, 0]
    raw = type("Raw", (Costs,), {"ids": lambda self, labels: labels})()
    words = r"Raw must take labels that are ignored, such as -100, got IndexError: .*clamp\(min=0\)"
    with pytest.raises(ValueError, match=words), registered(raw):
        pass


@pytest.mark.parametrize("device", ["cuda", torch.device("cpu"), None, lambda self: torch])
def test_device_functions_are_a_module(device):
    owner = type("Own", (Sums,), {"device": device})
    words = "Own.device must be a module that has STATISTICS, MERGE, GRADIENT, or a property"
    with pytest.raises(ValueError, match=words), registered(owner("own", (POWER,))):
        pass
    for right in (energy_statistic.Energy.device, property(lambda self: torch)):
        with registered(type("Own", (Sums,), {"device": right})("own", (POWER,))):
            pass


def test_a_statistic_about_the_label_is_refused_in_calls_without_labels():
    with (
        registered(Largest()),
        pytest.raises(ValueError, match="largest is that of a label, got no labels"),
    ):
        hl.vocab_statistics(torch.zeros(2, 3), want=("largest",))


def test_a_family_without_relative_rows_may_name_its_merged_sums_otherwise():
    class Top(Family):
        statistics = gradients = ("largest",)
        packet, merged, adds_up = ("tilemax",), ("top",), False

        def local(self, tile, softmax, rows):
            return {"tilemax": tile.z.amax(-1)}

        def merge(self, rows, merging):
            return {"tileshift": rows["tilemax"].amax(0)}

        def finish(self, sums, joined):
            return {"largest": sums["tileshift"]}, {"top": sums["tileshift"]}

        def direct(self, dz, tile, merged, grads):
            if "largest" not in grads:
                return dz
            return dz + grads["largest"] * (tile.z == merged["top"])

    logits = torch.randn(4, 9).double()
    with registered(Top()):
        stats = hl.vocab_statistics(logits, torch.arange(4), want=("largest",))
    assert torch.equal(stats.largest.double(), logits.amax(-1).float().double())


@pytest.mark.parametrize("labelled", [True, False])
def test_a_gradient_that_is_wrong_with_or_without_labels_alone_is_found(labelled):
    class Own(Sums):
        def finish(self, sums, joined):
            values, merged = super().finish(sums, joined)
            factor = 2 if labelled == (joined.target is not None) else 1
            return values, {row: factor * x for row, x in merged.items()}

    with (
        pytest.raises(ValueError, match=r"the gradient of lse \+ own = .* look at coefficient"),
        registered(Own("own", (POWER,))),
    ):
        pass


def test_an_infinite_or_unknown_value_is_no_disagreement():
    class Own(Sums):
        coefficient, direct = Family.coefficient, Family.direct

        def finish(self, sums, joined):
            values, merged = super().finish(sums, joined)
            return {"own": torch.where(joined.top > 2, torch.nan, values["own"])}, merged

    family = Own("own", (POWER,))
    family.gradients = ()
    with registered(family):
        pass


def values_of_ranks(group, device, orders, transport):
    """Three statistics of families that this rank registers in its own order."""
    families = {name: Sums(name, (part,)) for name, part in zip(NAMES, (POWER, MOMENT, SURPRISE))}
    logits, labels = problem(torch.float32)
    shard = hl.VocabShard.from_group(group, V)
    rank = torch.distributed.get_rank(group)
    with registered(*[families[name] for name in orders[rank]]):
        here = logits[:, shard.start : shard.stop].to(device)
        options = hl.Options(backend="torch", transport=transport)
        stats = hl.vocab_statistics(
            here, labels.to(device), shard=shard, want=NAMES[:3], options=options
        )
        return torch.stack([getattr(stats, name) for name in NAMES[:3]]).cpu()


@pytest.mark.parametrize("transport", ["gather", "sum"])
def test_ranks_register_in_any_order(transport):
    z = problem()[0]
    truth = torch.stack([Sums("own", (part,)).truth(z) for part in (POWER, MOMENT, SURPRISE)])
    for second in (("bb", "aa", "cc"), ("cc", "bb", "aa"), ("zz", "aa", "bb", "cc")[1:]):
        for values in on_ranks(2, values_of_ranks, (NAMES[:3], second), transport):
            torch.testing.assert_close(values.double(), truth, rtol=1e-5, atol=1e-5)


def test_rows_that_come_from_a_set_have_one_order():
    class Unordered(Sums):
        def packet_rows(self, call):
            return tuple(reversed(self.packet))

    parts = (POWER, MOMENT)
    layouts = []
    for family in (Sums("own", parts), Unordered("own", parts)):
        with registered(family):
            layouts.append(hl.statistics.layout_of(True, ("own",)).packet)
    assert layouts[0] == layouts[1]


PARTS = st.one_of(
    st.tuples(
        st.just("power"), st.sampled_from([1.5, 2.0, 3.0]), st.sampled_from([-2.0, 0.5, 1.0])
    ),
    st.tuples(st.just("moment"), st.sampled_from([1, 2, 3]), st.sampled_from([-2.0, 0.5, 1.0])),
    st.tuples(st.just("surprise"), st.just(1.0), st.sampled_from([-2.0, 0.5, 1.0])),
)
FAMILIES = st.lists(st.tuples(st.sampled_from(NAMES), st.lists(PARTS, min_size=1, max_size=3)), min_size=1, max_size=3,
                    unique_by=lambda family: family[0])  # fmt: skip


def examples(count):
    return settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@seed(0)
@examples(25 if os.environ.get("TP_HEADLOSS_FULL") else 10)
@given(FAMILIES, st.randoms(use_true_random=False), st.booleans())
def test_random_families_in_random_orders_are_right(drawn, random, labelled):
    families = [Sums(name, tuple(parts)) for name, parts in drawn]
    want = [family.name for family in families] + ["entropy"]
    random.shuffle(want)
    with registered(*families):
        check(families, tuple(want), labelled)


BROKEN = [(method, way) for method, ways in WAYS.items() for way in ways]


@seed(0)
@examples(80)
@given(st.sampled_from(BROKEN), st.lists(PARTS, min_size=1, max_size=3))
def test_a_wrong_method_is_named_or_the_numbers_are_right(how, parts):
    method, way = how
    family = broken(Sums("own", tuple(parts)), method, way)
    try:
        with registered(family):
            for labelled in (True, False):
                check([family], ("own", "entropy"), labelled)
    except ValueError as error:
        assert re.search(
            rf"methods of family Broken must agree.*look at .*\b{method}\b", str(error)
        ), error


@pytest.mark.parametrize(("method", "way"), BROKEN)
def test_a_wrong_method_of_a_family_with_every_kind_of_row_is_found(method, way):
    family = broken(Sums("own", (POWER, MOMENT, SURPRISE)), method, way)
    with pytest.raises(ValueError, match=rf"look at .*\b{method}\b"), registered(family):
        pass


class Squares(Family):
    """sum of p^2 and sum of z^2, whose methods may replace what they get, and look at logits of
    labels."""

    statistics = gradients = packet = merged = ("own_p2", "own_z2")

    def __init__(self, replaces: str | None = None, looks: bool = False):
        self.replaces, self.needs_label_logits = replaces, looks

    def wanted(self, call):
        return super().wanted(call) and (call.has_labels or not self.needs_label_logits)

    def local(self, tile, softmax, rows):
        z = tile.z.masked_fill(tile.z == -torch.inf, 0.0)
        return {"own_p2": row_sum(softmax.exp**2), "own_z2": row_sum(z**2)}

    def rescale(self, rows, drop, factor):
        return {"own_p2": factor**2 * rows["own_p2"], "own_z2": rows["own_z2"]}

    def target(self, p, offset):
        return {"own_p2": p**2}

    def finish(self, sums, joined):
        values = {"own_p2": sums["own_p2"] / joined.whole**2, "own_z2": sums["own_z2"]}
        return values, values

    def coefficient(self, coefficient, shifted, weight, merged, grads):
        if "own_p2" not in grads:
            return coefficient
        own = grads["own_p2"] * 2 * (weight - merged["own_p2"])
        return own if self.replaces == "coefficient" else coefficient + own

    def direct(self, dz, tile, merged, grads):
        if "own_z2" not in grads:
            return dz
        z = tile.z.masked_fill(tile.z == -torch.inf, 0.0)
        own = grads["own_z2"] * 2 * z
        if self.needs_label_logits:
            own = own + 0 * tile.label_logits[:, None]
        return own if self.replaces == "direct" else dz + own


@pytest.mark.parametrize("method", ["coefficient", "direct"])
def test_a_method_that_replaces_the_gradients_of_others_is_found(method):
    with pytest.raises(
        ValueError, match=r"the gradient of lse \+ own_.* look at coefficient, direct"
    ):
        hl.register_statistic(Squares(replaces=method))


def test_logits_of_labels_are_for_sums_alone():
    with pytest.raises(
        ValueError, match=r"must do without tile.label_logits, which `local` alone has"
    ):
        hl.register_statistic(Squares(looks=True))
