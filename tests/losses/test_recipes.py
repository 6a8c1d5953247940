"""The recipes of docs/guides/recipes.md against their formulas in float64 PyTorch."""

import functools
import warnings

import pytest
import torch
from pages import ROOT, names_of

import tp_headloss as hl
from tp_headloss.engine.one_read.rows import row_function

B, S, V = 4, 8, 100


@functools.cache
def recipes():
    return names_of(ROOT / "docs/guides/recipes.md")


class Batch:
    def __init__(self):
        self.logits = torch.randn(B, S, V, dtype=torch.float64, requires_grad=True)
        self.tokens = torch.randint(V, (B, S))
        self.labels = self.tokens.masked_fill(torch.rand(B, S) < 0.2, -100)
        self.is_valid = self.labels != -100
        log_p = self.logits.log_softmax(-1)
        self.log_p = log_p.gather(-1, self.labels.clamp(min=0)[..., None])[..., 0]
        self.advantages = torch.randn(B, S, dtype=torch.float64)
        moved = torch.where(torch.rand(B, S) < 0.5, 0.01, 4.0).double() * torch.randn(B, S)
        self.old = (self.log_p.detach() + moved).clamp(max=-1e-3)

    def mean(self, x):
        return torch.where(self.is_valid, x, 0.0).sum() / self.is_valid.sum()


def expect_equal(batch, found, expected):
    """Losses and gradients of the logits are equal."""
    assert expected.abs() > 1e-3
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    mine, want = (
        torch.autograd.grad(x, batch.logits, retain_graph=True)[0] for x in (found, expected)
    )
    torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-9)


def tv_is_too_far(now, old, advantages):
    return torch.where(advantages > 0, now.exp() - old.exp() > 0.2, now.exp() - old.exp() < -0.2)


def kl_is_too_far(now, old, advantages):
    p, q = old.exp(), now.exp()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return (kl > 0.2) & torch.where(advantages > 0, q > p, q < p)


def dppo(is_too_far, batch):
    now = batch.log_p.detach()
    ratio = (now - batch.old).exp().clamp(max=20.0)
    stays = ~is_too_far(now, batch.old, batch.advantages)
    assert 0 < stays[batch.is_valid].sum() < batch.is_valid.sum()
    return batch.mean(-batch.advantages * ratio * batch.log_p * stays)


def dro(batch):
    return batch.mean(0.025 * (batch.log_p - batch.old) ** 2 - batch.advantages * batch.log_p)


POLICIES = {
    "dppo_tv": functools.partial(dppo, tv_is_too_far),
    "dppo_kl": functools.partial(dppo, kl_is_too_far),
    "dro": dro,
}


def term_of(name):
    inputs = () if name == "dft" else ("advantages", "old_log_prob")
    return hl.Term(name, recipes()[name], inputs=inputs, pointwise=True)


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name):
    batch = Batch()
    inputs = {"advantages": batch.advantages, "old_log_prob": batch.old}
    out = hl.HeadLoss([term_of(name)])(batch.logits, batch.labels, inputs=inputs)
    expect_equal(batch, out.loss, POLICIES[name](batch))


def test_dynamic_fine_tuning():
    batch = Batch()
    out = recipes()["dynamic"](batch.logits, batch.labels)
    expect_equal(batch, out.loss, batch.mean(-batch.log_p.detach().exp() * batch.log_p))


def test_margin_to_the_best_other_id():
    batch = Batch()
    scope = recipes()
    # the page's shard has other ids
    ids = hl.topk_log_probs(batch.logits.detach(), 2).ids
    others = torch.where(ids[..., 0] == batch.labels, ids[..., 1], ids[..., 0])
    out = scope["margin"](batch.logits, batch.labels, inputs={"ids": others[..., None]})
    at_label = batch.labels.clamp(min=0)[..., None]
    log_p = batch.logits.log_softmax(-1).scatter(-1, at_label, -torch.inf).amax(-1)
    expect_equal(batch, out.loss, batch.mean(torch.relu(1 - batch.log_p + log_p)))
    assert (scope["best_other"](scope["logits"], scope["labels"]) != scope["labels"]).all()


@pytest.mark.parametrize("name", ["dft", *POLICIES])
def test_what_is_pointwise_becomes_a_part_of_one_launch(name):
    row_function((term_of(name),), V)  # raises otherwise


@pytest.mark.parametrize("blocks_of_time", [1, 2])
def test_masked_and_block_diffusion(blocks_of_time):
    batch = Batch()
    time = torch.rand(B, blocks_of_time).double().clamp(min=0.1)
    time = time.repeat_interleave(S // blocks_of_time, 1) if blocks_of_time > 1 else time
    is_masked = torch.rand(B, S) < time
    log_p = batch.logits.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]
    expected = (-log_p * is_masked / time).sum() / (B * S)
    out = recipes()["masked_diffusion"](batch.logits, batch.tokens, is_masked, time)
    expect_equal(batch, out.loss, expected)


def test_dpo_with_a_likelihood():
    batch = Batch()
    sums = torch.where(batch.is_valid, batch.log_p, 0.0).sum(1)
    means = (sums / batch.is_valid.sum(1))[:2]
    references = torch.tensor([-40.0, -35.0]).double(), torch.tensor([-41.0, -39.0]).double()
    h = 0.1 * (sums[:2] - sums[2:] - references[0] + references[1])
    expected = (torch.log1p((-h).exp()) - 0.7 * means).mean()
    stats = hl.vocab_statistics(batch.logits, batch.labels)
    sequences = hl.Sequences.from_mask(batch.is_valid)
    found = recipes()["rpo"](stats.log_prob, sequences, references, alpha=0.7)
    expect_equal(batch, found.mean(), expected)


def test_a_teacher_of_another_tokenizer():
    batch = Batch()
    ids = torch.randint(V, (B, S, 3))
    theirs = torch.rand(B, S, 3).double().log()
    own = batch.logits.log_softmax(-1).gather(-1, ids)
    terms = theirs.exp() * (theirs - own)
    has_none = torch.rand(B, S, 3) < 0.3
    expected = terms.masked_fill(has_none, 0.0).sum(-1)
    ids = ids.masked_fill(has_none, -1)
    theirs = theirs.where(~has_none | (torch.rand(B, S, 3) < 0.5), -torch.inf)
    found = recipes()["at_aligned_ids"](batch.logits, ids, theirs)
    expect_equal(batch, found.mean(), expected.mean())


@pytest.mark.parametrize("margin", [0.0, 5.0, 10.0, 20.0])
def test_unlikelihood(margin):
    """Also where one of the ids has nearly all of the probability, with ids that are none."""
    batch = Batch()
    ids = torch.stack([torch.randperm(V)[:3] for _ in range(B * S)]).view(B, S, 3)
    logits = batch.logits.detach()
    batch.logits = logits.scatter(-1, ids[..., :1], logits.amax(-1, keepdim=True) + margin)
    ids[torch.rand(B, S, 3) < 0.3] = -1
    batch.logits = batch.logits.float().double().requires_grad_()
    own = torch.nn.functional.one_hot(ids.clamp(min=0), V).bool()
    # log(1 - p), of the other ids
    rest = batch.logits[..., None, :].masked_fill(own, -torch.inf).logsumexp(-1)
    rest = rest - batch.logits.logsumexp(-1)[..., None]
    expected = -torch.where(ids >= 0, rest, 0.0).sum(-1)
    leaf = batch.logits.detach().float().requires_grad_()
    term, inputs = recipes()["unlikely"], recipes()["with_tail"](ids)
    found = hl.HeadLoss(term, reduction="none")(leaf, batch.tokens, inputs=inputs).loss
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    (expected * torch.arange(1, B * S + 1).view(B, S)).sum().backward()
    (found * torch.arange(1, B * S + 1).view(B, S)).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), batch.logits.grad, rtol=1e-4, atol=1e-5)
    # of hidden states, in one sweep
    hidden = torch.randn(B, S, 16, requires_grad=True)
    weight = torch.randn(V, 16, requires_grad=True)
    of_logits = recipes()["bad"](hidden @ weight.T, batch.tokens, inputs=inputs).loss
    given = {"inputs": inputs, "linear": hl.Linear("one_sweep")}
    of_hidden = recipes()["bad"].linear(hidden, weight, batch.tokens, **given).loss
    torch.testing.assert_close(of_hidden, of_logits)
    torch.testing.assert_close(
        torch.autograd.grad(of_hidden, hidden), torch.autograd.grad(of_logits, hidden)
    )


@pytest.mark.parametrize("per_token", [False, True])
def test_unlikelihood_at_a_temperature(per_token):
    """The tail has the temperature of the log-probs at the ids."""
    batch = Batch()
    ids = torch.stack([torch.randperm(V)[:3] for _ in range(B * S)]).view(B, S, 3)
    ids[torch.rand(B, S, 3) < 0.3] = -1
    temperature = torch.full((B, S), 0.5) if per_token else 0.5
    z = batch.logits / 0.5
    p = z.softmax(-1).gather(-1, ids.clamp(min=0))
    expected = batch.mean(-torch.where(ids >= 0, (1 - p).log(), 0.0).sum(-1))
    transform = hl.Transform(temperature=temperature)
    head = hl.HeadLoss(recipes()["unlikely"], options=hl.Options(check=True))
    given = {"transform": transform, "inputs": recipes()["with_tail"](ids, temperature)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = head(batch.logits, batch.labels, **given).loss
    expect_equal(batch, found, expected)
    given["inputs"] = recipes()["with_tail"](ids)
    with pytest.warns(UserWarning, match="'unlikelihood' reads .* at two temperatures"):
        head(batch.logits, batch.labels, **given)


def test_unlikelihood_with_a_tail_of_other_ids_is_a_warning():
    batch = Batch()
    ids = torch.tensor([5, 9, -1]).expand(B, S, 3)
    head = hl.HeadLoss(recipes()["unlikely"], options=hl.Options(check=True))
    same = recipes()["with_tail"](torch.tensor([9, 5]).expand(B, S, 2)) | {"ids": ids}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(batch.logits, batch.labels, inputs=same)
    other = recipes()["with_tail"](torch.tensor([5, 8, -1]).expand(B, S, 3)) | {"ids": ids}
    with pytest.warns(UserWarning, match="of other ids than the input 'ids'"):
        head(batch.logits, batch.labels, inputs=other)
    # at ignored tokens nothing reads them
    moved = torch.where(batch.is_valid[..., None], ids, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = recipes()["with_tail"](moved) | {"ids": ids}
        head(batch.logits, batch.labels, inputs=inputs)
