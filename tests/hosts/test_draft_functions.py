"""Functions of SpecForge and speculators against their formulas in float64, over a draft's
vocabulary that is sharded evenly, unevenly, and with padding. tests/hosts/specforge_cases.py and
speculators_cases.py have both hosts themselves."""

import doctest
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from trainer_problem import close, close_grads

from tp_headloss import VocabShard
from tp_headloss.integrations import specforge, speculators

B, S, V, V_T, H, H_T = 2, 6, 22, 50, 5, 7
CUTS = {  # bounds of two ranks, columns that exist beyond V
    "one rank": [0, V],
    "even": [0, 11, V],
    "uneven": [0, 15, V],
    "padded": [0, 12, 24],
    "empty": [0, V, 24],  # the second rank has padding alone
}
OPTIONS = {"ttt_step": 2, "ttt_step_loss_decay": 0.8}
CONFIG = (
    '{"kl_div": 0.5, "rkl": 0.1, "jsd": 0.2, "ce": 0.3, "tv": 0.4, "nla": 0.6, "lk_hybrid": 0.7}'
)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def data():
    """Logits of draft and target [B, S, V] over the draft's ids, the target's others [B, S, V_T - V],
    and a mask [B, S]."""
    mask = (torch.arange(B * S) % 4 != 1).view(B, S)
    target = 2 * draw(B, S, V_T)[..., :V]
    draft = draw(B, S, V) + 0.7 * (target + target.roll(-2, 1))  # often right, also at step 2
    return draft, target, 2 * draw(B, S, V_T - V), mask


def heads():
    """Hidden states and heads of draft and target, at step 2 alike."""
    target, target_weight = draw(B, S, H_T), draw(V, H_T)
    return target.roll(-2, 1)[..., :H], target_weight[:, :H], target, target_weight


def shard_of(group, cut):
    bounds = CUTS[cut]
    rank = 0 if group is None else group.rank()
    return VocabShard(bounds[rank], bounds[rank + 1], V, group)


def own(x, shard, dim=-1, fill=30.0):
    """This rank's part of x; padding would win if it took part."""
    padding = max(shard.stop - V, 0)
    x = x.movedim(dim, -1)
    x = torch.cat([x, x.new_full((*x.shape[:-1], padding), fill)], -1)
    return x[..., shard.start : shard.stop].movedim(-1, dim).contiguous()


def ranks_of(cut):
    return len(CUTS[cut]) - 1


def rates(draft, probabilities):
    return torch.minimum(draft.softmax(-1), probabilities).sum(-1)


def losses_of(name, draft, target):
    """A loss of speculators [B, S]."""
    q, p = draft.log_softmax(-1), target.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    if name == "kl_div":
        return kl
    if name == "rkl":
        return (q.exp() * (q - p)).sum(-1)
    if name == "jsd":
        m = ((p.exp() + q.exp()) / 2).log()
        return ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2
    if name == "ce":
        return -q.gather(-1, target.argmax(-1)[..., None])[..., 0]
    rate = rates(draft, p.exp())
    if name == "tv":
        return 1 - rate
    if name == "nla":
        return -rate.log()
    share = (-3 * rate.detach()).exp()
    return share * kl + (1 - share) * (1 - rate)


def speculators_loss(group, device, cut, name):
    draft, target, _, _ = data()
    shard = shard_of(group, cut)
    x = own(draft, shard).to(device).requires_grad_()
    loss, weight = speculators.resolve_loss_config(name, shard=shard)[name]
    values = loss(x, own(target, shard).to(device))
    (values * torch.linspace(-1, 2, B * S).view(B, S).to(device)).sum().backward()
    assert weight == 1.0
    return values.detach(), x.grad


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"])
def test_losses_of_speculators(name, cut):
    draft, target, _, _ = (x.double() for x in data())
    draft.requires_grad_()
    expected = losses_of(name, draft, target)
    (expected * torch.linspace(-1, 2, B * S).double().view(B, S)).sum().backward()
    results = on_ranks(ranks_of(cut), speculators_loss, cut, name)
    for values, _ in results:
        close(values, expected, atol=3e-6)
    grads = torch.cat([grad.cpu() for _, grad in results], -1)
    close_grads([grads[..., :V]], draft.grad, torch.float32)
    assert not grads[..., V:].any()


def metrics_run(group, device, cut, from_hidden):
    shard = shard_of(group, cut)
    draft, target, _, mask = data()
    options = {"shard": shard}
    if from_hidden:
        draft, weight, target, target_weight = heads()
        options["weight"] = own(weight, shard, 0).to(device).requires_grad_()
        options["target_weight"] = own(target_weight, shard, 0).to(device)
    else:
        draft, target = own(draft, shard), own(target, shard)
    x, so_far = draft.to(device).requires_grad_(), mask.clone().to(device)
    so_far[0] = True
    config = speculators.resolve_loss_config(CONFIG, "eager", shard=shard)
    given = x, target.to(device), mask.to(device), so_far
    loss, metrics = speculators.compute_metrics(*given, **OPTIONS, loss_config=config, **options)
    loss.backward()
    grads = x.grad, options["weight"].grad if from_hidden else None
    return loss.detach(), metrics, so_far, *grads


def metrics_expected(draft, target, mask):
    """Loss, metrics and prev_correct of step 2."""
    so_far = mask.clone()
    so_far[0] = True
    draft, target, now = draft[:, :-2], target[:, 2:], mask[:, 2:].double()
    config = speculators.resolve_loss_config(CONFIG)
    terms = {
        f"{name}_loss": ((losses_of(name, draft, target) * now).sum(1) * 0.64 / now.sum(1)).mean()
        for name in config
    }
    loss = sum(weight * term for (_, weight), term in zip(config.values(), terms.values()))
    before = so_far[:, :-2].sum()
    correct = (draft.argmax(-1) == target.argmax(-1)) & so_far[:, :-2]
    so_far[:, :-2] = correct
    found = (correct * now).sum()
    accepted = (rates(draft, target.softmax(-1)) * now).sum()
    pairs = {"loss": (loss, 1), **{name: (term, 1) for name, term in terms.items()}}
    pairs |= {"full_acc": (found, now.sum()), "cond_acc": (found, before)}
    return loss, pairs | {"accept_rate": (accepted, now.sum())}, so_far


@pytest.mark.parametrize("from_hidden", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_metrics_of_speculators(cut, from_hidden):
    mask = data()[3]
    if from_hidden:
        hidden, weight, target_hidden, target_weight = (x.double() for x in heads())
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        draft, target = hidden @ weight.T, target_hidden @ target_weight.T
    else:
        draft, target = (x.double() for x in data()[:2])
        leaves = [draft.requires_grad_()]
    loss, pairs, so_far = metrics_expected(draft, target, mask)
    assert 0 < pairs["full_acc"][0] < pairs["full_acc"][1]
    grads = torch.autograd.grad(loss, leaves)
    results = on_ranks(ranks_of(cut), metrics_run, cut, from_hidden)
    for found, metrics, found_so_far, *_ in results:
        close(found, loss, rtol=2e-5)  # speculators adds 1e-5 to the number of tokens
        assert len(metrics) == 2 * len(pairs) and torch.equal(found_so_far.cpu(), so_far)
        for name, (value, total) in pairs.items():
            close(metrics[f"{name}_2_sum"], torch.as_tensor(value).double(), rtol=2e-5)
            assert float(metrics[f"{name}_2_total"]) == float(total), name
    if from_hidden:
        close(results[0][3], grads[0], rtol=1e-4, atol=1e-6)
        joined, expected = torch.cat([r[4].cpu() for r in results]), grads[1]
        close(joined[:V], expected, rtol=1e-4, atol=1e-6)
    else:
        joined = torch.cat([r[3].cpu() for r in results], -1)
        close(joined[..., :V], grads[0], rtol=1e-4, atol=1e-6)


LK = {None: (None, 1.0, 1.0), "alpha": ("alpha", 1.0, 1.0), "lambda": ("lambda", 0.9, 2.0)}


def target_probabilities():
    """target_p and target_p_on_draft [B, S, V] in float64."""
    _, target, others, _ = data()
    whole = torch.cat([target, others], -1).double().softmax(-1)[..., :V]
    return target.double().softmax(-1), whole


def both_reductions(local_correct, local_denom):
    """Of two ranks that have the same tokens, for all that a test sees."""
    return 2 * local_correct, 2 * local_denom


def specforge_run(group, device, cut, kind):
    shard = shard_of(group, cut)
    target_p, on_draft = (own(x.float(), shard).to(device) for x in target_probabilities())
    x = own(data()[0], shard).to(device).requires_grad_()
    mask = data()[3][..., None].int().to(device)
    lk_loss_type, kl_scale, kl_decay = LK[kind]
    model = SimpleNamespace(lk_loss_type=lk_loss_type, kl_scale=kl_scale, kl_decay=kl_decay)
    model.draft_model = SimpleNamespace(d2t=torch.arange(V, device=device))  # id i is 2 i
    adapter = SimpleNamespace(reduce_metrics=both_reductions, reduce_loss=lambda loss: 3 * loss)
    ids = 2 * data()[1].argmax(-1).to(device)
    outs = specforge.acc_and_loss(
        model,
        logits=x,
        target_p=target_p,
        target_p_on_draft=on_draft,
        target_token_ids=ids,
        position_mask=mask,
        loss_mask=torch.ones_like(mask),
        adapter=adapter,
        shard=shard,
    )
    outs[2].backward()
    return [out.detach() for out in outs], x.grad


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", LK)
def test_a_step_of_specforge(kind, cut):
    draft, target, _, mask = data()
    draft = draft.double().requires_grad_()
    target_p, on_draft = target_probabilities()
    alphas = rates(draft, on_draft)
    assert (alphas < on_draft.sum(-1)).all() and on_draft.sum(-1).max() < 0.95
    rate = (alphas * mask).sum() / mask.sum()
    kl = 3 * (-(target_p * draft.log_softmax(-1)).sum(-1) * mask).mean()
    share = 0.9 * (-2 * rate.detach()).exp()
    loss = {
        None: kl,
        "alpha": -(alphas.log() * mask).sum() / mask.sum(),
        "lambda": share * kl + (1 - share) * (1 - rate),
    }[kind]
    loss.backward()
    correct = (draft.argmax(-1) == target.argmax(-1)).sum()
    assert 0 < correct < B * S
    expected = [correct / (B * S), rate, loss, 2 * correct, torch.tensor(2 * B * S), loss]
    expected.append(torch.tensor(B * S))
    results = on_ranks(ranks_of(cut), specforge_run, cut, kind)
    for outs, _ in results:
        for out, value in zip(outs, expected, strict=True):
            close(out, value.double(), atol=5e-6)
    grads = torch.cat([grad.cpu() for _, grad in results], -1)
    close(grads[..., :V], draft.grad, rtol=1e-4, atol=1e-6)
    assert not grads[..., V:].any()


T2D = torch.arange(V_T) % 2 == 0
T2D[-V_T + 2 * V :] = False  # V of them
TARGET_CUT = [0, 20, V_T]


def target_run(group, device, cut, rows_given):
    draft_shard = shard_of(group, cut)
    shard, rows = None, None
    hidden, weight = draw(B, S, H_T), draw(V_T, H_T)
    if group is not None:
        start, stop = TARGET_CUT[group.rank()], TARGET_CUT[group.rank() + 1]
        shard = VocabShard(start, stop, V_T, group)
    if rows_given:
        rows = own(weight[T2D], draft_shard, 0, 0.0).to(device)
    return specforge.compute_target_p_padded_from_hidden(
        hidden=hidden.to(device),
        lm_head_weight=(weight if shard is None else weight[shard.start : shard.stop]).to(device),
        t2d=T2D.to(device),
        loss_mask=data()[3][..., None].int().to(device),
        length=2,
        shard=shard,
        draft_shard=draft_shard,
        draft_weight=rows,
    )


@pytest.mark.parametrize("rows_given", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_the_target_of_specforge(cut, rows_given):
    logits = draw(B, S, H_T).double() @ draw(V_T, H_T).double().T
    target_p = F.pad(logits[..., T2D].softmax(-1), (0, 0, 0, 2), value=1 / V)
    on_draft = F.pad(logits.softmax(-1)[..., T2D], (0, 0, 0, 2))
    ids = logits.argmax(-1)
    mask = T2D[ids][..., None].int() * data()[3][..., None].int()
    assert 0 < mask.sum() < data()[3].sum()
    results = on_ranks(ranks_of(cut), target_run, cut, rows_given)
    for i, expected in enumerate((target_p, on_draft)):
        found = torch.cat([result[i].cpu() for result in results], -1)
        close(found[..., :V], expected, rtol=1e-5)
        # later steps are uniform, and padding takes no part in them
        assert not found[:, :S, V:].any()
    for _, _, found_ids, found_mask in results:
        assert torch.equal(found_ids.cpu(), F.pad(ids, (0, 2)))
        assert torch.equal(found_mask.cpu(), mask)


def test_probabilities_whose_sum_is_above_1_by_rounding():
    x = torch.zeros(1, 1, 2, requires_grad=True)
    rate, log_rate = specforge.compute_acceptance_rate(
        logits=x,
        target_probs=torch.tensor([[[0.6, 0.404]]]),
        position_mask=torch.ones(1, 1, 1),
    )
    log_rate.backward()
    close(rate, torch.tensor(0.9).double(), atol=5e-3)
    assert x.grad.isfinite().all() and x.grad.any()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p: 100 * p,
        lambda p: p.log(),
        lambda p: p.log() + 9,
        lambda p: 1.02 * p / p.sum(-1, True),
    ],
    ids=["per cent", "log-probs", "logits", "a larger sum"],
)
def test_what_is_no_probability_has_no_acceptance_rate(wrong):
    for rate in specforge.compute_acceptance_rate(
        logits=torch.zeros(1, 1, 2),
        target_probs=wrong(torch.tensor([[[0.6, 0.3]]])),
        position_mask=torch.ones(1, 1, 1),
    ):
        assert rate.isnan()


def test_a_loss_is_the_mean_of_its_sequences_means():
    """speculators' normalisation: a token of a short sequence counts more."""
    generator = torch.Generator().manual_seed(4)
    draft, target = torch.randn(2, 3, 6, 5, generator=generator)
    mask = torch.ones(3, 6)
    mask[0, 2:] = 0
    mask[1] = 0
    loss, _ = speculators.compute_metrics(draft, target, mask, None, 0, 1.0)
    kl = F.kl_div(draft.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="none")
    per_sequence = (kl.sum(-1) * mask).sum(1) / (mask.sum(1) + 1e-5)
    torch.testing.assert_close(loss, per_sequence.mean(), rtol=1e-5, atol=1e-6)
    assert per_sequence[1] == 0


LOGITS, ONE = torch.zeros(1, 2, 4), torch.ones(1, 2, 1)
TARGET = {"hidden": torch.ones(1, 2, 3), "lm_head_weight": torch.ones(4, 3), "length": 1}


@pytest.mark.parametrize(
    ("call", "names"),
    [  # others are in tests/promises/test_spec.py
        (lambda: speculators.resolve_loss_config("kl"), r"spec must be of \['kl_div', .*got 'kl'"),
        (lambda: speculators.resolve_loss_config('{"kl": 1}'), r"names of .*got \['kl'\]"),
        (lambda: speculators.resolve_loss_config('{"tv": "a"}'), "weight of 'tv' must be a number"),
        (lambda: speculators.resolve_loss_config("{}"), "spec must be of"),
        (
            lambda: speculators.compute_metrics(LOGITS, LOGITS, None, None, 2, 1.0),
            "ttt_step must be below the 2 positions, got 2",
        ),
        (
            lambda: speculators.compute_metrics(
                LOGITS, LOGITS, None, None, 0, 1.0, target_weight=torch.ones(4, 4)
            ),
            "target_weight needs weight",
        ),
        (
            lambda: speculators.compute_metrics(
                LOGITS, LOGITS, None, None, 0, 1.0, {"hinge": (len, 1.0)}
            ),
            r"loss_config must have names of .*got \['hinge'\]",
        ),
        (
            lambda: specforge.compute_acceptance_rate(
                logits=LOGITS, target_probs=LOGITS, position_mask=ONE, shard=VocabShard(0, 5, 5)
            ),
            "logits must have the shard's 5 columns",
        ),
        (
            lambda: specforge.compute_target_p_padded_from_hidden(
                **TARGET, t2d=torch.ones(5).bool(), loss_mask=ONE
            ),
            "t2d must have the target's 4 ids, got 5",
        ),
        (
            lambda: specforge.compute_target_p_padded_from_hidden(
                **TARGET,
                t2d=torch.ones(4).bool(),
                loss_mask=ONE,
                draft_shard=VocabShard(0, 3, 3),
                draft_weight=torch.ones(3, 3),
            ),
            "draft_shard must be of the 4 ids in t2d, got 3",
        ),
    ],
)
def test_refused_by_name(call, names):
    with pytest.raises((TypeError, ValueError), match=names):
        call()


@pytest.mark.parametrize("module", [specforge, speculators], ids=lambda m: m.__name__)
def test_examples_of_the_docstrings(module):
    assert doctest.testmod(module).attempted > 0 and doctest.testmod(module).failed == 0
