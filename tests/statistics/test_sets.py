"""Statistics over sets of ids against float64: values, gradients, layouts of sets and of tokens,
exactness."""

import re
from unittest import mock

import oracle
import pytest
import torch
import torch.nn.functional as F
from collectives import counted_collectives
from ranks import on_ranks
from sets_problem import NAMES, N, V, gradient, listed, padded, ragged, rows, truth

from tp_headloss import IdSets, Options, VocabShard, vocab_statistics
from tp_headloss.arguments import id_sets
from tp_headloss.engine.backend import load_backend
from tp_headloss.integrations.sampling_masks import from_vllm

FORMS = {"padded": padded, "masked": lambda s: padded(s, filler=V + 7), "csr": ragged,
         "int32": lambda s: ragged(s, torch.int32)}  # fmt: skip
OTHERS = ("lse", "log_prob", "entropy")


def upstream(names):
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(N, generator=generator) for name in (*NAMES, *OTHERS)}
    return {name: drawn[name] for name in names}


def run(group, device, backend, form, names):
    x, labels, sets = rows()
    shard = VocabShard.from_group(group, V, 256)
    local = (
        F.pad(x, (0, 56), value=40.0)[:, shard.start : shard.stop]
        .to(device)
        .clone()
        .requires_grad_()
    )
    given = {"shard": shard, "sets": FORMS[form](sets).to(device)}
    given["options"] = Options(backend=backend, transport="gather")
    with counted_collectives() as events:
        stats = vocab_statistics(local, labels.to(device), want=(*NAMES, "entropy"), **given)
    sum(
        (getattr(stats, name) * g.to(device)).sum() for name, g in upstream(names).items()
    ).backward()
    values = {name: getattr(stats, name).detach().cpu() for name in (*NAMES, *OTHERS)}
    return values, local.grad.cpu(), sum(events.values())


def expected(names):
    x, labels, sets = rows()
    z, slope = oracle.transform(x)
    valid, safe = labels != -100, labels.clamp(min=0)
    values = truth(z, safe, sets)
    dx = gradient(z, slope, safe, sets, {k: g.double() for k, g in upstream(names).items()})
    return {k: torch.where(valid, v, 0.0) for k, v in values.items()}, torch.where(
        valid[:, None], dx, 0.0
    )


def check(results, names):
    values, dx = expected(names)
    for got, _, collectives in results:
        assert collectives == int(len(results) > 1)
        for name, value in values.items():
            assert torch.equal(got[name], results[0][0][name])
            torch.testing.assert_close(got[name].double(), value, rtol=3e-6, atol=3e-6)
        assert (got["set_log_prob"] <= 0).all() and (got["set_log_mass"] <= 0).all()
    grad = torch.cat([grad for _, grad, _ in results], 1)
    torch.testing.assert_close(grad[:, :V].double(), dx, rtol=2e-5, atol=2e-6)
    assert not grad[:, V:].any() and dx.abs().max() > 0.1


UPSTREAM = [("set_log_prob",), ("set_entropy",), ("set_log_mass",), (*NAMES, *OTHERS)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("names", UPSTREAM, ids=len)
def test_values_and_gradients_equal_float64(world_size, names, backend):
    if backend == "triton" and (world_size == 2) != (len(names) > 1):
        world_size = 1
    form = {1: "csr", 2: "padded", 4: "int32"}[world_size]
    check(on_ranks(world_size, run, backend, form, names), names)


def test_all_ways_to_write_sets_give_the_same_bits(backend, device):
    """And all numbers of ranks, whose chunks are the same."""
    first = run(None, device, backend, "padded", UPSTREAM[-1])
    for form in ("masked", "csr", "int32"):
        values, grad, _ = run(None, device, backend, form, UPSTREAM[-1])
        assert torch.equal(grad, first[1]) and all(
            torch.equal(values[name], first[0][name]) for name in NAMES
        )
    if backend == "torch":
        for world_size in (2, 4):
            results = on_ranks(world_size, run, backend, "csr", UPSTREAM[-1])
            assert torch.equal(torch.cat([grad for _, grad, _ in results], 1), first[1])
            assert all(torch.equal(results[0][0][name], first[0][name]) for name in NAMES)


def test_a_confident_token_is_exact_to_a_few_ulp(backend, device):
    (values, *_), (want, _) = run(None, device, backend, "csr", NAMES), expected(NAMES)
    assert (want["set_log_prob"][[6, 7]] > -1e-8).all() and want["set_log_prob"][1] == 0
    error = (values["set_log_prob"].double() - want["set_log_prob"]).abs()
    assert (error <= 40 * oracle.ulp(want["set_log_prob"]))[[1, 6, 7]].all()


def test_a_set_of_16_and_one_of_20000_in_one_batch(options, device):
    size, vocab, generator = 20_000, 20_500, torch.Generator().manual_seed(2)
    x = torch.randn(2, vocab, generator=generator)
    sets = [list(range(40, 56)), list(range(0, size))]
    labels = torch.tensor([50, size - 1])
    local = x.to(device).clone().requires_grad_()
    stats = vocab_statistics(
        local, labels.to(device), want=NAMES, sets=ragged(sets).to(device), options=options
    )
    (stats.set_log_prob + stats.set_log_mass).sum().backward()
    z = x.double()
    for name, value in truth(z, labels, sets).items():
        torch.testing.assert_close(
            getattr(stats, name).detach().cpu().double(), value, rtol=2e-6, atol=2e-6
        )
    ones = torch.ones(2).double()
    dx = gradient(z, torch.ones_like(z), labels, sets, {"set_log_prob": ones, "set_log_mass": ones})
    torch.testing.assert_close(local.grad.cpu().double(), dx, rtol=2e-5, atol=2e-7)


def test_kernels_get_each_id_once_and_ascending(device, monkeypatch):
    """Ids in any order, repeated within and beyond what a program looks at together, in several
    sets of a program."""
    triton = load_backend("triton")
    monkeypatch.setattr(triton, "SETS_PROGRAMS", 3)
    generator, vocab = torch.Generator().manual_seed(0), 40_000
    sets = [
        torch.randint(-1, n, (n,), generator=generator) for n in (700, 5, 0, 1300, 257, 256, vocab)
    ]
    sets[1], sets[4] = torch.arange(5), torch.arange(2600) // 2
    sets[5][3] = vocab  # unknown
    sets.append(torch.tensor([0, 31, 32, vocab - 1, -1, -1]))
    sets.append(torch.tensor([7, -1, 9]))
    sets.append(torch.tensor([3, 3, 9]))
    sets.append(torch.tensor([4, 2]))
    # and the last round has no set for two of the programs
    sets += [torch.arange(1500), torch.arange(1500)]
    sets[11][700], sets[12][700] = -1, vocab
    ids, ends = torch.cat(sets), torch.tensor([0, *map(len, sets)]).cumsum(0)
    beyond = torch.tensor([[0, len(ids)]] * 2)  # what those two must not read
    spans = torch.cat([torch.stack([ends[:-1], ends[1:]], 1), beyond]).to(device)[: len(sets)]
    few = [i for i, own in enumerate(sets) if len(own) <= 1000]
    for some, most in ((range(len(sets)), None), (range(len(sets)), vocab), (few, 1000)):
        given = spans if len(some) == len(sets) else spans[some]
        entries, known = triton.known_sets(ids.to(device), given, vocab, most)
        for n, (begin, end) in zip(some, known.tolist()):
            assert begin == spans[n, 0]
            assert entries[begin:end].tolist() == (
                [] if n in (5, 12) else sorted(set(sets[n].tolist()) - {-1})
            )


@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0)])
def test_sets_of_no_tokens_and_of_no_ids(shape, options, device):
    x, ids = (
        torch.zeros(shape[0], V, device=device),
        torch.zeros(shape, dtype=torch.long, device=device),
    )
    stats = vocab_statistics(x, want=("set_log_mass",), sets=IdSets(ids), options=options)
    assert stats.set_log_mass.shape == shape[:1] and stats.set_log_mass.isnan().all()


UNSOUND = {
    "counts": ([1] * 6, 6, "got [1, 1, 1, 1, 1, 1]: counts? Pass torch.nn.functional.pad(counts."),
    "counts after a 0": (
        [0, 2, 4],
        6,
        "counts? Pass torch.nn.functional.pad(counts.cumsum(0), (1, ",
    ),
    "a later part": ([2, 4, 5], 6, ": of a part of the ids? Pass ids[2:5] and offsets - 2"),
    "ends alone": (
        [2, 4, 6],
        6,
        ": ends alone? Pass torch.nn.functional.pad(ends, (1, 0))",
    ),
    "a first part": ([0, 4, 5], 6, ": of a part of the ids? Pass ids[0:5] and offsets - 0"),
    "descending": (
        [0, 4, 2, 6],
        6,
        "ascending from 0 to 6, so that each id is in one set, got [0,",
    ),
    "beyond the ids": ([0, 4, 9], 6, "from 0 to 6, so that each id is in one set, got [0, 4, 9]"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_offsets_that_leave_ids_out_are_refused_on_cpus(case):
    offsets, count, words = UNSOUND[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        IdSets.from_csr(torch.arange(count), torch.tensor(offsets))


def test_what_the_error_of_counts_advises_are_the_sets():
    counts = torch.tensor([1, 2, 0, 3])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    assert IdSets.from_csr(torch.arange(6), offsets).tolist() == [[0], [1, 2], [], [3, 4, 5]]


def test_what_the_error_of_a_mask_of_the_vocabulary_advises_are_its_sets():
    mask = torch.zeros(2, 2, 5, dtype=torch.bool)
    mask[0, 0, [1, 4]] = mask[1, 0, 3] = mask[1, 1] = True
    offsets = "torch.nn.functional.pad(mask.sum(-1).flatten().cumsum(0), (1, 0))"
    write = f"IdSets.from_csr(mask.nonzero()[:, -1], {offsets})"
    with pytest.raises(TypeError, match=re.escape(f"of a mask [.., V] write {write}")):
        IdSets(mask)
    sets = eval(write, {"mask": mask, "torch": torch, "IdSets": IdSets})
    assert sets.tolist() == [[1, 4], [], [3], [0, 1, 2, 3, 4]]


LISTS = [[3, 5], [7]]
OF_LISTS = "got list: write torch.tensor(..), of lists of different lengths, one for each token, "
GIVEN_AS_LISTS = {
    "sets": (lambda: IdSets([[3, 5], [7, -1]]), OF_LISTS),
    "uneven sets": (lambda: IdSets(LISTS), "got list: write integrations.sampling_masks.from_vllm"),
    "flat ids": (lambda: IdSets.from_csr([3, 5, 7], [0, 2, 3]), OF_LISTS),
    "offsets": (
        lambda: IdSets.from_csr(torch.arange(3), [0, 2, 3]),
        "offsets must be a tensor, got list: write torch.tensor(..)",
    ),
}


@pytest.mark.parametrize("name", GIVEN_AS_LISTS)
def test_lists_of_ids_name_what_reads_them(name):
    call, words = GIVEN_AS_LISTS[name]
    with pytest.raises(TypeError, match=re.escape(words)) as error:
        call()
    if words == OF_LISTS:
        assert str(error.value).endswith("integrations.sampling_masks.from_vllm([lists])")
        assert from_vllm([LISTS]).tolist() == LISTS


def test_sets_of_other_tokens_are_joined_as_the_error_advises():
    short, long = IdSets(torch.ones(2, 3, 4).long()), IdSets(torch.ones(2, 5, 4).long())
    words = "equal shapes but for dim 0, got [[2, 3], [2, 5]]: pad the shorter ones with empty"
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        IdSets.cat([short, long])
    assert str(error.value).endswith(
        "those of tokens [2, 3] by sets[torch.ones(2, 3, dtype=torch.bool)]"
    )
    flat = [x[torch.ones(x.ids.shape[:-1], dtype=torch.bool)] for x in (short, long)]
    assert len(IdSets.cat(flat)) == 16
    assert IdSets.cat([short, long], 1).ids.shape == (2, 8, 4)


def test_sets_never_overlap_and_never_leave_the_ids():
    with mock.patch.object(id_sets, "expect_offsets"):  # as on GPUs, which nothing waits for
        spans = IdSets.from_csr(torch.arange(5), torch.tensor([0, 2, 4, 2, 3, 4, 9])).spans
    assert spans.tolist() == [[0, 2], [2, 4], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert IdSets.from_csr(torch.arange(5), torch.tensor([0, 0, 3, 5])).spans.tolist() == [
        [0, 0],
        [0, 3],
        [3, 5],
    ]


def pieces():
    """Sets of 2, 3 and 1 tokens, as lists, and as `IdSets` in two forms."""
    parts = [[4, 1], [7]], [[2], [], [9, 8, 3]], [[5, 6]]
    return parts, {"padded": [padded(p) for p in parts], "masked": [padded(p, V) for p in parts],
                   "csr": [ragged(p) for p in parts], "both": [padded(parts[0]), *map(ragged, parts[1:])]}  # fmt: skip


def test_sets_are_compared_searched_and_gone_through_as_what_they_are():
    sets = IdSets(torch.tensor([[5, 6], [7, -1]]))
    assert [each.tolist() for each in sets] == [[[5, 6]], [[7]]]
    assert sets != "sets" and sets in [sets] and len({sets, sets[0]}) == 2
    for wrong, said in (
        (lambda: 5 in sets, r"sets.contains\(labels\)"),
        (lambda: sets == sets[:], "compare their .tolist"),
        (lambda: sets != sets[:], "compare their .tolist"),
        (lambda: list(sets[0]), "one token have no length"),
    ):
        with pytest.raises(TypeError, match=said):
            wrong()


@pytest.mark.parametrize("form", ["padded", "masked", "csr", "both"])
def test_joined_sets_are_those_of_their_parts_in_order(form):
    lists, forms = pieces()
    whole = IdSets.cat(forms[form])
    assert listed(whole) == [row for part in lists for row in part] and len(whole) == 6
    assert (whole.spans is None) == (form in ("padded", "masked"))
    steps = [sets[:1] for sets in forms[form]]
    assert (
        listed(IdSets.stack(steps)) == listed(IdSets.stack(steps, 1)) == [part[0] for part in lists]
    )
    assert [len(IdSets.stack(steps, dim)) for dim in (0, 1, -1, -2)] == [3, 1, 1, 3]
    square = IdSets.stack([whole, whole], 1)
    assert listed(square) == [row for part in lists for row in part for _ in range(2)]
    for dim in (1, -1):
        assert listed(IdSets.cat([square, square], dim)[0]) == 4 * [lists[0][0]]
    with pytest.raises(ValueError, match="at least one"):
        IdSets.cat([])
    for dim in (1, -2):
        with pytest.raises(
            IndexError, match=rf"dim must be in \[-1, 1\) for sets of tokens \[2\], got {dim}"
        ):
            IdSets.cat(forms[form], dim)
    with pytest.raises(
        IndexError, match=r"dim must be in \[-2, 2\) for sets of tokens \[1\], got 2"
    ):
        IdSets.stack(steps, 2)
    with pytest.raises(ValueError, match=r"tokens of matching shapes, got \[\[2\], \[3\], \[1\]\]"):
        IdSets.stack(forms[form])
    with pytest.raises(ValueError, match=r"tokens of matching shapes, got \[\[6, 2\], \[6\]\]"):
        IdSets.cat([square, whole])


@pytest.mark.parametrize("form", ["padded", "masked", "csr", "both"])
def test_sets_are_read_back_as_lists(form, device):
    lists, forms = pieces()
    flat = [row for part in lists for row in part]
    whole = IdSets.cat([sets.to(device) for sets in forms[form]])
    assert whole.tolist() == flat and IdSets.stack([whole[:3], whole[3:]]).tolist() == flat
    assert whole[torch.tensor([4, 0, 3])].tolist() == [flat[4], flat[0], []]
    assert forms[form][1].to(device).tolist() == lists[1]
    assert IdSets(torch.zeros(2, 0, dtype=torch.long, device=device)).tolist() == [[], []]


@pytest.mark.parametrize("form", ["padded", "masked", "csr", "both"])
def test_sets_are_cut_as_tensors_are(form, device):
    lists, forms = pieces()
    flat = [row for part in lists for row in part]
    whole = IdSets.cat([sets.to(device) for sets in forms[form]])
    table = IdSets.stack([whole, whole[torch.arange(5, -1, -1)]])  # [2, 6]
    numbers = torch.stack([torch.arange(6), torch.arange(5, -1, -1)])
    for key in (0, slice(1, None), (slice(None), slice(2, 4)), (..., slice(3)), (1, 2), numbers > 2, [1, 0],
                torch.tensor([1]), (None, 0), (slice(None), 3)):  # fmt: skip
        cut = table[key]
        assert listed(cut) == [flat[i] for i in numbers[key].flatten()]
        if cut.spans is not None and (
            isinstance(key, list) or getattr(key, "dtype", None) == torch.int64
        ):
            # none is shared
            assert int((cut.spans[..., 1] - cut.spans[..., 0]).sum()) == len(cut.ids)
        if numbers[key].dim():
            assert len(cut) == len(numbers[key])
    with pytest.raises(TypeError, match="no length"):
        len(whole[0])
    with pytest.raises(IndexError):
        whole[6]
    with pytest.raises(IndexError):
        table[0, 0, 0]  # of ids, not of tokens
    assert len(list(whole)) == 6


def test_statistics_of_cut_and_joined_sets(options, device):
    """Ragged sets that are out of order in memory, and one of them twice."""
    x, labels, sets = rows()
    del sets[2][-2:]
    labels[2] = sets[2][0]
    order = torch.tensor([3, 0, 0, 8, 7, 1])
    whole = IdSets.cat([ragged(sets[:4]), ragged(sets[4:])]).to(device)
    local = x[order].to(device).requires_grad_()
    stats = vocab_statistics(
        local, labels[order].to(device), want=NAMES, sets=whole[order.to(device)], options=options
    )
    for name, value in truth(x.double(), labels, sets).items():
        torch.testing.assert_close(
            getattr(stats, name).detach().cpu().double(), value[order], rtol=3e-6, atol=3e-6
        )
    weights = {"set_log_prob": torch.arange(1.0, 7.0)}
    (grad,) = torch.autograd.grad(stats.set_log_prob, local, weights["set_log_prob"].to(device))
    z = x[order].double()
    dx = gradient(z, torch.ones_like(z), labels[order], [sets[i] for i in order], weights)
    torch.testing.assert_close(grad.cpu().double(), dx, rtol=2e-5, atol=2e-6)


def test_padded_ids_of_any_stride(options, device):
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.tensor([1, 1], device=device)
    wide = torch.tensor([[1, 2, 3, 4], [5, 6, 1, 7]], device=device)
    for ids in (wide[:, ::2], wide[:1, :1].expand(2, 1)):
        found, expected = (
            vocab_statistics(x, labels, want=NAMES, sets=IdSets(given), options=options)
            for given in (ids, ids.clone(memory_format=torch.contiguous_format))
        )
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in NAMES)
        assert found.set_log_prob.isfinite().all()


@pytest.mark.parametrize("form", ["padded", "masked", "csr"])
def test_sets_of_sampled_tokens_are_spread_over_all(form, device):
    where = torch.tensor([[False, True, True, False], [True, False, False, True]], device=device)
    lists = [[4, 1], [7], [2, 9, 8], [0]]
    sets = FORMS[form](lists).to(device)
    spread = sets.scatter(where)
    assert (
        listed(spread) == [[], [4, 1], [7], [], [2, 9, 8], [], [], [0]]
        and listed(spread[where]) == lists
    )
    table = IdSets.stack([sets[:2], sets[2:]])
    assert listed(table.scatter(where)) == listed(spread)
    with pytest.raises(TypeError, match=r"where must be .*tensor"):
        sets.scatter([True])
    with pytest.raises(TypeError, match=r"move to a device, got the dtype torch\.int32"):
        sets.to(torch.int32)
    with pytest.raises(ValueError, match="as many tokens as there are sets, 4, got 8"):
        sets.scatter(torch.ones(8, dtype=torch.bool, device=device))
    labels = torch.tensor([[-100, 1, 9, 7], [8, 0, -1, 0]], device=device)
    assert spread.contains(labels).tolist() == [
        [False, True, False, False],
        [True, False, False, True],
    ]
    none = IdSets.cat([padded([[-1, 3]]), ragged([[-1]])]).to(device)
    assert not none.contains(torch.tensor([-1, -1], device=device)).any()
