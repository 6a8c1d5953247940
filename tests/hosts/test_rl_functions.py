"""Functions of SkyRL and slime, NeMo-RL's of packed and of split sequences, and those that the
guide writes as a call, against float64."""

import doctest
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from pages import marked_block
from ranks import on_ranks
from right_calls import HOSTS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_problem import DTYPES, EVEN, PADDED, B, V, close, close_grads, cut, dtype_name

from tp_headloss import VocabShard
from tp_headloss.integrations import (
    ms_swift,
    nemo_rl,
    rl_tokens,
    sampling_masks,
    skyrl,
    skyrl_draft,
    slime,
    verl,
)

H = 12
LENGTHS, PADDED_LENGTHS = [3, 2, 6], [4, 4, 8]  # of packed sequences
BOUNDS = torch.tensor([0, 4, 8, 16], dtype=torch.int32)
# packed tokens; positions of each of B sequences; columns of the packed ones when padded
T, S, WIDTH = 16, 8, 7
LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2)]  # context-parallel x vocabulary ranks
MASK = torch.tensor([[0, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 1]])
IN_ROWS = [[3, 2], [6]]
CUT = 123  # columns where shards were cut at the padding


def tokens(dtype=torch.float32):
    """Logits [T, PADDED], whose padding would win if it took part, and ids [T], every other one
    likely."""
    generator = torch.Generator().manual_seed(11)
    logits = 4 * torch.randn(T, PADDED, generator=generator)
    ids = torch.randint(0, V, (T,), generator=generator)
    ids[1::2] = logits[::2, :V].argmax(-1)
    logits[:, V:] += 20
    return logits.to(dtype), ids


def head():
    generator = torch.Generator().manual_seed(12)
    return torch.randn(T, H, generator=generator), torch.randn(PADDED, H, generator=generator)


def groups_of(group, layout):
    """The context-parallel and the vocabulary group of this rank, None for one rank."""
    if group is None:
        return None, None
    if layout != (2, 2):
        return (group, None) if layout[0] == 2 else (None, group)

    mesh = init_device_mesh(
        "cuda" if torch.cuda.is_available() else "cpu", (2, 2), mesh_dim_names=("cp", "tp")
    )
    return mesh["cp"].get_group(), mesh["tp"].get_group()


def held(x, group, lengths):
    """This context-parallel rank's tokens of sequences along the first dimension."""
    if group is None:
        return x
    ranks, rank = group.size(), group.rank()
    parts = [part.chunk(2 * ranks) for part in x.split(lengths)]
    return torch.cat([part[i] for part in parts for i in (rank, 2 * ranks - 1 - rank)])


def bounds(x, group, dim=-1):
    start = 0 if group is None else group.rank() * x.shape[dim]
    return start, start + x.shape[dim], group


def upstream(cp_group, shape):
    """Upstream gradients, each context-parallel rank's another multiple."""
    rank = 0 if cp_group is None else cp_group.rank()
    return (rank + 1) * torch.linspace(-1, 1, shape.numel()).view(shape)


def rank_of_two(rank):
    return SimpleNamespace(size=lambda: 2, rank=lambda: rank)


def joined(results, layout):
    """Gradients of all ranks as one of all tokens and of the vocabulary."""
    parts = [grad.cpu() for _, grad in results]
    rows = [torch.cat(parts[i * layout[1] : (i + 1) * layout[1]], -1) for i in range(layout[0])]
    if layout[0] == 1:
        return rows[0]
    order = torch.cat([held(torch.arange(T), rank_of_two(rank), PADDED_LENGTHS) for rank in (0, 1)])
    return torch.cat(rows)[order.argsort()]


FORMS = {
    "nemo": {}, "nemo, labels": {"target_is_pre_rolled": True}, "nemo, top_k": {"sampling_params": {"top_k": 9}},
    "skyrl": {}, "skyrl, rows": {"sub_seq_lengths": IN_ROWS}, "skyrl, mask": {"attention_mask": MASK},
}  # fmt: skip


def places(form):
    """[row, column, token] of each log-prob, in plain Python."""
    found, start, column = [], 0, 0
    for i, (length, padded) in enumerate(zip(LENGTHS, PADDED_LENGTHS)):
        if form == "skyrl, rows":
            column = 0 if i == 2 else column
            found += [(i // 2, column + t, start + t) for t in range(length - 1)]
            column += padded
        elif form == "skyrl, mask":
            columns = MASK[i].nonzero().flatten().tolist()
            found += [(i, columns[t], start + t) for t in range(length - 1)]
        else:
            found += [(i, t, start + t) for t in range(padded - 1)]
        start += padded
    return [place for place in found if place[1] < WIDTH - 1]


def packed(group, device, layout, form, dtype):
    cp_group, tp_group = groups_of(group, layout)
    logits, ids = tokens(dtype)
    x = cut(held(logits, cp_group, PADDED_LENGTHS), tp_group).detach().to(device).requires_grad_()
    target, options = ids.unsqueeze(0), dict(FORMS[form])
    if "target_is_pre_rolled" in options:
        target = held(
            torch.cat([part.roll(-1) for part in ids.split(PADDED_LENGTHS)]),
            cp_group,
            PADDED_LENGTHS,
        )[None]
    module = nemo_rl if form.startswith("nemo") else skyrl
    args = x.unsqueeze(0), target.to(device), BOUNDS.to(device), WIDTH, *bounds(x, tp_group)
    options.update(cp_group=cp_group, vocab_size=V)
    out = module.from_parallel_logits_to_logprobs_packed_sequences(*args, **options)
    untrained = module.from_parallel_logits_to_logprobs_packed_sequences(*args, True, **options)
    assert torch.equal(out, untrained) and not untrained.requires_grad
    finite = out.where(out > -torch.inf, 0.0)
    (finite * upstream(cp_group, out.shape).to(device)).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_packed_log_probs_go_to_their_places(form, layout, dtype):
    results = on_ranks(layout[0] * layout[1], packed, layout, form, dtype)
    logits, ids = tokens(dtype)
    leaf = logits.double().requires_grad_()
    z = leaf[:, :V]
    if "top_k" in form:
        z = z.masked_fill(z < z.topk(9).values[:, -1:], -torch.inf)
    log_p = z.log_softmax(-1)
    expected = torch.zeros(len(IN_ROWS) if "rows" in form else 3, WIDTH - 1, dtype=torch.float64)
    for row, column, token in places(form):
        expected[row, column] = log_p[token, ids[token + 1]]
    multiples = {1: [1.0], 2: [3.0, 3.0] if form.startswith("nemo") else [1.0, 2.0]}[layout[0]]
    (expected.where(expected > -torch.inf, 0.0) * upstream(None, expected.shape)).sum().backward()
    assert (expected == -torch.inf).any() == ("top_k" in form)
    for out, _ in results:
        assert out.dtype == torch.float32 and torch.equal(out, results[0][0])
        close(out, expected)
    of_rank = (
        torch.stack([torch.full((T // 2,), m) for m in multiples])
        if layout[0] == 2
        else torch.ones(1, T)
    )
    grads = [
        (out, grad.float() / of_rank[i // layout[1]][:, None])
        for i, (out, grad) in enumerate(results)
    ]
    assert all(grad.dtype == dtype for _, grad in results)
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2**-8, 1e-5)
    close(joined(grads, layout), leaf.grad, rtol, atol)


def packed_head(group, device, layout):
    cp_group, tp_group = groups_of(group, layout)
    (hidden, weight), (_, ids) = head(), tokens()
    x = held(hidden, cp_group, PADDED_LENGTHS).clone().to(device).requires_grad_()
    rows = cut(weight, tp_group, dim=0).detach().to(device).requires_grad_()
    args = (
        x.unsqueeze(0),
        rows,
        ids.unsqueeze(0).to(device),
        BOUNDS.to(device),
        WIDTH,
        *bounds(rows, tp_group, 0),
    )
    options = {**FORMS["skyrl, mask"], "cp_group": cp_group, "temperature": 0.5, "vocab_size": V}
    out = skyrl.from_parallel_hidden_to_logprobs_packed_sequences(*args, **options)
    (out * upstream(cp_group, out.shape).to(device)).sum().backward()
    return out.detach(), (x.grad, rows.grad)


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_packed_log_probs_of_hidden_states(layout):
    results = on_ranks(layout[0] * layout[1], packed_head, layout)
    (hidden, weight), (_, ids) = head(), tokens()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight.t() / 0.5)[:, :V].log_softmax(-1)
    expected = torch.zeros(3, WIDTH - 1, dtype=torch.float64)
    for row, column, token in places("skyrl, mask"):
        expected[row, column] = log_p[token, ids[token + 1]]
    (expected * upstream(None, expected.shape)).sum().backward()
    for out, _ in results:
        close(out, expected, atol=1e-5)
    hidden_grads, weight_grads = zip(*(grads for _, grads in results))
    if layout[0] == 1:
        # each rank's is a part
        close(sum(grad.cpu() for grad in hidden_grads), hidden.grad, atol=1e-5)
        close(torch.cat([grad.cpu() for grad in weight_grads]), weight.grad, atol=2e-5)
    else:
        scaled = [(None, grad / (i + 1)) for i, grad in enumerate(hidden_grads)]
        close(joined(scaled, layout), hidden.grad, atol=1e-5)


def sequences(group, device, layout, what):
    """Log-probs of B sequences, padded from S - 1 tokens, and the gradient of this rank's
    logits."""
    cp_group, tp_group = groups_of(group, layout)
    logits, ids = tokens()
    own = [held(part, cp_group, [S]) for part in logits.split(S)]
    x = cut(torch.stack(own), tp_group).detach().to(device).requires_grad_()
    ids = ids.view(B, S)[:, : S - 1].to(device)
    cp, tp = {"context_parallel_group": cp_group, "vocab_size": V}, {}
    if tp_group is not None:
        tp = {"vocab_parallel_rank": tp_group.rank(), "vocab_parallel_group": tp_group}
    if what == "mask":
        entries = torch.stack([ids, (ids + 1) % V, torch.zeros_like(ids)], -1)
        sizes = torch.full(ids.shape, 2, device=device)
        cp["sampling_mask"] = SimpleNamespace(token_ids=entries, sizes=sizes)
    if what == "entries":
        entries = torch.stack([ids, (ids + 1) % V], -1)
        outs = nemo_rl.get_distillation_topk_logprobs_from_logits(
            x, entries.float(), entries, True, True, **tp, **cp
        )
        out = torch.cat([outs[0], outs[2].unsqueeze(-1)], -1)
    elif what == "bounds":
        out = skyrl.from_parallel_logits_to_logprobs(
            x, ids, *bounds(x, tp_group), cp_group=cp_group, vocab_size=V
        )
    else:
        out = nemo_rl.get_next_token_logprobs_from_logits(ids, x, **tp, **cp)
    (out * upstream(cp_group, out.shape).to(device)).sum().backward()
    return out.detach(), x.grad.flatten(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=str)
@pytest.mark.parametrize("what", ["next tokens", "bounds", "mask", "entries"])
def test_context_parallel_ranks_score_whole_sequences(what, layout):
    results = on_ranks(layout[0] * layout[1], sequences, layout, what)
    logits, ids = tokens()
    leaf = logits.double().requires_grad_()
    log_p, ids = leaf.view(B, S, -1)[:, : S - 1, :V].log_softmax(-1), ids.view(B, S)[:, : S - 1]
    if what == "entries":
        expected = torch.cat([log_p.gather(-1, torch.stack([ids, (ids + 1) % V], -1)),
                              (log_p.exp() * log_p).sum(-1, keepdim=True)], -1)[:, :-1]  # fmt: skip
    else:
        at = log_p[:, :-1].gather(-1, torch.stack([ids, (ids + 1) % V], -1)[:, 1:])
        expected = at[..., 0] if what != "mask" else at.log_softmax(-1)[..., 0]
    # the sum of both ranks' upstream gradients
    (expected * 3 * upstream(None, expected.shape)).sum().backward()
    for out, _ in results:
        close(out, expected)
    whole = leaf.grad.view(B, S, -1)
    for i, (_, grad) in enumerate(results):
        own = torch.cat([held(part, rank_of_two(i // layout[1]), [S]) for part in whole])
        close(grad, own.chunk(layout[1], -1)[i % layout[1]], rtol=1e-5)


def per_token(group, device, function, dtype):
    logits, ids = tokens(dtype)
    x, ids = cut(logits, group).detach().to(device).requires_grad_(), ids.to(device)
    ids[3] = -100
    keywords, host = {"vocab_size": V}, {"shard": VocabShard.from_group(group, V, PADDED)}
    exec(compile(marked_block("run", "one-call"), "rl_functions.md", "exec"), host)
    if function == "areal":
        outs = host["gather_logprobs_entropy"](x.view(2, 8, -1), ids.view(2, 8), 0.7)
        assert torch.equal(host["gather_logprobs"](x.view(2, 8, -1), ids.view(2, 8), 0.7), outs[0])
    elif function == "slime":
        outs = slime.calculate_log_probs_and_entropy(x, ids, group, True, 5, **keywords)
        alone, nothing = slime.calculate_log_probs_and_entropy(x, ids, group, **keywords)
        assert torch.equal(alone, outs[0]) and alone.shape == (T, 1) and nothing is None
    elif function == "slime, mask":
        mask = cut(kept(), group, dim=-1).bool().to(device)
        outs = slime.calculate_log_probs_and_entropy(
            x, ids, group, True, log_prob_keep_mask=mask, **keywords
        )
    elif function == "slime, metric":
        outs = slime.calculate_log_probs_and_entropy(
            x, ids, group, True, with_entropy_grad=False, **keywords
        )
        assert not outs[1].requires_grad
    elif function == "megatron_rl":  # whose model gives [B, S, V/P] of [S, B, V/P]
        alone = host["selective_log_softmax"](x.view(8, 2, -1).transpose(0, 1), ids.view(8, 2).t())
        assert alone.dtype == dtype and alone.shape == (2, 8)
        outs = alone.t(), torch.zeros(T, device=device)
    else:
        outs = (
            host["vocab_parallel_log_probs_from_logits"](x, ids),
            host["vocab_parallel_entropy"](x),
        )
        squares = host["vocab_parallel_sum_pi_squared"](x.detach(), 2.0)
        close(squares, (logits[:, :V].double() / 2).softmax(-1).square().sum(-1))
    outs = [out.flatten() for out in outs]
    known = ids >= 0  # what hosts give to an ignored token varies
    sum(
        ((i + 1) * out * upstream(None, out.shape).to(device))[known].sum()
        for i, out in enumerate(outs)
    ).backward()
    return [out.detach()[known] for out in outs], x.grad


def kept():
    """float [T, PADDED], 1 where an id is in a keep mask."""
    return (torch.rand(T, PADDED, generator=torch.Generator().manual_seed(13)) > 0.7).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "function", ["areal", "slime", "slime, mask", "slime, metric", "verl", "megatron_rl"]
)
def test_log_probs_and_entropies_per_token(function, ranks, dtype):
    results = on_ranks(ranks, per_token, function, dtype)
    logits, ids = tokens(dtype)
    leaf = logits.double().requires_grad_()
    z = leaf[:, :V] / (0.7 if function == "areal" else 1.0)
    log_p, masked = z.log_softmax(-1), z
    if function == "slime, mask":
        inside = kept()[:, :V].bool() | (torch.arange(V) == ids[:, None])
        # the label is kept although the mask lacks it
        assert not kept()[:, :V].bool().gather(-1, ids[:, None]).all()
        masked = z.masked_fill(~inside, -torch.inf)
    at = masked.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1) * (function != "megatron_rl")
    known, weights = torch.arange(T) != 3, upstream(None, entropy.shape)
    loss = (weights * at)[known].sum() + (2 * weights * entropy)[known].sum() * (
        function != "slime, metric"
    )
    loss.backward()
    for outs, _ in results:
        close(outs[0], at[known], 2**-8 if outs[0].dtype == torch.bfloat16 else 2e-6, 1e-5)
        close(outs[1], entropy[known], atol=1e-5)
    # autograd adds two gradients, each rounded, or one of a log-prob in bfloat16
    if dtype == torch.bfloat16 and function in ("slime, mask", "verl", "megatron_rl"):
        close(torch.cat([grad.cpu() for _, grad in results], -1), leaf.grad, 2**-7, 2**-7)
    else:
        close_grads([grad for _, grad in results], leaf.grad, dtype)


def soft(group, device, factor, cut_padding, k):
    logits, boundaries, vocab_size = columns_of(cut_padding), EVEN, V
    if cut_padding:
        boundaries, vocab_size = [0, 64, CUT], None
    x, teacher = (
        cut(part, group, boundaries).detach().to(device) for part in (logits, logits.flip(0))
    )
    x.requires_grad_()
    operands = x.view(2, 8, -1), teacher.view(2, 8, -1), weights_of_tokens().to(device)
    if k is None:
        loss = skyrl.draft_soft_ce(*operands, factor, group, 3, vocab_size=vocab_size)
    else:
        loss = skyrl.draft_soft_ce_topk(*operands, k, factor, group, 2, vocab_size=vocab_size)
    loss.backward()
    return loss.detach(), x.grad


def columns_of(cut_padding):
    """Logits, or CUT columns of 128 without padding, of which shards would be whole chunks if they
    were not cut."""
    logits = tokens()[0]
    return torch.cat([logits[:, :V], logits[:, :V].flip(0)], -1)[:, :CUT] if cut_padding else logits


def weights_of_tokens():
    return (torch.arange(T) % 3 != 0).float().view(2, 8)


@pytest.mark.parametrize("k", [None, 5, 1000])
@pytest.mark.parametrize("cut_padding", [False, True])
@pytest.mark.parametrize(("ranks", "factor"), [(1, None), (2, None), (2, torch.tensor(3.0))])
def test_draft_soft_cross_entropy(ranks, factor, cut_padding, k):
    results = on_ranks(ranks, soft, factor, cut_padding, k)
    logits = columns_of(cut_padding)
    leaf, mask = logits.double().requires_grad_(), weights_of_tokens().flatten()
    columns = CUT if cut_padding else V
    student, teacher = leaf[:, :columns], logits.double().flip(0)[:, :columns]
    if k is not None:  # the teacher of the next but one, over its k likeliest ids
        top = teacher.view(2, 8, -1).roll(-2, 1).flatten(0, 1).topk(min(k, columns))
        student, teacher = student.gather(1, top.indices), top.values
    loss = -((teacher.softmax(-1) * student.log_softmax(-1)).sum(-1) * mask).sum()
    loss = loss / (mask.sum() if factor is None else factor)
    loss.backward()
    for out, _ in results:
        close(out, loss, atol=1e-5)
    close_grads([grad for _, grad in results], leaf.grad, torch.float32)


def mean_entropy(group, device, layout, of_head):
    cp_group, tp_group = groups_of(group, layout)
    loss_mask = torch.linspace(0, 2, 12).view(3, 4)
    rest = BOUNDS, WIDTH, 4, MASK, loss_mask, cp_group
    if of_head:
        hidden, weight = head()
        x, rows = (
            held(hidden, cp_group, PADDED_LENGTHS).to(device),
            cut(weight, tp_group, dim=0).detach().to(device),
        )
        mean, part = skyrl.from_parallel_hidden_to_entropy_packed_sequences(
            x.unsqueeze(0), rows, *rest, tp_group, vocab_size=V)  # fmt: skip
        return mean, part
    x = (
        cut(held(tokens()[0], cp_group, PADDED_LENGTHS), tp_group)
        .detach()
        .to(device)
        .requires_grad_()
    )
    mean, part = skyrl.vocab_parallel_entropy_packed_sequences(
        x.unsqueeze(0), *rest, tp_group=tp_group, vocab_size=V
    )
    part.backward()
    assert not mean.requires_grad
    return (mean, part.detach()), x.grad


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_mean_entropy_of_packed_action_tokens(layout):
    results = on_ranks(layout[0] * layout[1], mean_entropy, layout, False)
    loss_mask = torch.linspace(0, 2, 12).view(3, 4).double()
    leaf = tokens()[0].double().requires_grad_()
    hidden, weight = (x.double() for x in head())
    log_ps = [x[:, :V].log_softmax(-1) for x in (leaf, hidden @ weight.t())]
    entropies = [-(log_p.exp() * log_p).sum(-1) for log_p in log_ps]
    weights = torch.zeros(T, dtype=torch.float64)
    for row, column, token in places("skyrl, mask"):
        weights[token] = loss_mask[row, column - 2] if column >= 2 else 0.0
    means = [(entropy * weights).sum() / weights.sum() for entropy in entropies]
    means[0].backward()
    for (mean, _), _ in results:
        close(mean, means[0], atol=1e-5)
    close(sum(part for (_, part), _ in results[:: layout[1]]), means[0], atol=1e-5)
    close(joined(results, layout), leaf.grad, 1e-5)
    for mean, _ in on_ranks(layout[0] * layout[1], mean_entropy, layout, True):
        close(mean, means[1], atol=1e-5)


def kept_without_vocab_size(group, device):
    logits, ids = tokens()
    logits = logits[:, :V]
    start, stop = [(0, 37), (37, V)][group.rank()]
    x = logits[:, start:stop].unsqueeze(0).to(device)
    return nemo_rl.from_parallel_logits_to_logprobs(
        x, ids.unsqueeze(0).to(device), start, stop, group, sampling_params={"top_k": 9}
    )


def test_nemo_finds_the_vocabulary_that_a_rule_is_about():
    logits, ids = tokens()
    z = logits[:-1, :V].double()
    log_p = z.masked_fill(z < z.topk(9).values[:, -1:], -torch.inf).log_softmax(-1)
    for out in on_ranks(2, kept_without_vocab_size):
        close(out[0], log_p.gather(-1, ids[1:, None])[:, 0])


def dtensor_with_its_group(group, device):
    mesh = init_device_mesh(device.type, (group.size(),))
    logits, ids = torch.zeros(2, 8, device=device), torch.zeros(2, dtype=torch.long, device=device)
    try:
        return slime.calculate_log_probs_and_entropy(
            distribute_tensor(logits, mesh, [Shard(1)]), ids, group
        )
    except ValueError as error:
        return str(error)


def test_a_dtensor_has_its_own_group():
    assert (
        on_ranks(2, dtensor_with_its_group)
        == ["a DTensor has its own group: pass None as the group, got both"] * 2
    )


def uneven_heads(group, device, cut_at):
    (hidden, weight), (_, ids) = head(), tokens()
    start, end = ((0, cut_at), (cut_at, PADDED))[group.rank()]
    x, rows, ids = (
        hidden.unsqueeze(0).to(device),
        weight[start:end].to(device),
        ids.unsqueeze(0).to(device),
    )
    own = x.transpose(0, 1).chunk(2)[group.rank()].contiguous()
    return (
        skyrl.from_parallel_hidden_to_logprobs(x, rows, ids, start, end, group)[0],
        nemo_rl.from_parallel_hidden_states_to_logprobs(own, rows, None, ids, start, end, group)[0],
        skyrl.from_parallel_logits_to_logprobs(x @ rows.t(), ids, start, end, group)[0],
    )


@pytest.mark.parametrize("cut_at", [0, 70])
def test_uneven_shards_need_no_vocab_size(cut_at):
    (hidden, weight), (_, ids) = head(), tokens()
    log_p = (
        (hidden.double() @ weight.double().t())[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    )
    for results in on_ranks(2, uneven_heads, cut_at):
        for out in results:
            close(out, log_p, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "names"),
    [  # others are in tests/promises/test_spec.py
        (
            lambda x, i: slime.calculate_log_probs_and_entropy(
                x[0], i[0], None, log_prob_keep_mask=x > 0
            ),
            "keep_mask",
        ),
        (lambda x, i: pack_call(x, i, BOUNDS[:1]), r"cu_seqlens_padded must be \[B \+ 1\]"),
        (lambda x, i: pack_call(x, i, BOUNDS - 1), "cu_seqlens_padded must ascend from 0 to 16"),
        (lambda x, i: pack_call(x, i[:, 1:], BOUNDS), r"target must have shape \[1, 16\]"),
        (
            lambda x, i: pack_call(x, i, BOUNDS, attention_mask=MASK[:2]),
            r"attention_mask must have shape \[3, 7\]",
        ),
        (
            lambda x, i: pack_call(x, i, BOUNDS, sub_seq_lengths=[[3]]),
            "sub_seq_lengths must be of 3 sequences",
        ),
        (
            lambda x, i: pack_call(x, i, BOUNDS, sub_seq_lengths=[[5, 2], [6]]),
            r"\[4, 4, 8\] tokens, got \[5, 2, 6\]",
        ),
        (lambda x, i: pack_call(x, i, BOUNDS, sub_seq_lengths=[[-1, 2], [6]]), r"got \[-1, 2, 6\]"),
        (
            lambda x, i: pack_call(x, i, BOUNDS, sub_seq_lengths=[3, 2, 6]),
            "a list of lengths for each row, got",
        ),
        (
            lambda x, i: pack_call(x, i, BOUNDS, attention_mask=torch.ones_like(MASK)),
            r"at most the packed sequences' \[4, 4, 8\] tokens, got \[7, 7, 7\]",
        ),
        (lambda x, i: entropy_call(x, 7), "num_actions must be at most 6, got 7"),
        (
            lambda x, i: entropy_call(x, 2, torch.ones(3)),
            r"loss_mask must have shape \[3, 2\], got \[3\]",
        ),
        (
            lambda x, i: skyrl.draft_soft_ce_topk(x[0], x[0], i, 2),
            r"student_logits must have shape \[B, S, width\]",
        ),
        (
            lambda x, i: skyrl.draft_soft_ce(x, x, torch.ones(1, 1)),
            r"mask must have shape \[1, 16\] to fit",
        ),
        (
            lambda x, i: nemo_rl.from_parallel_logits_to_logprobs_packed_sequences(
                x, i[:, 1:], BOUNDS, WIDTH, 0, PADDED, None, target_is_pre_rolled=True
            ),
            r"target must have shape \[1, 16\], got \[1, 15\]",
        ),
    ],
)
def test_refused_by_name(call, names):
    logits, ids = tokens()
    with pytest.raises((TypeError, ValueError), match=names):
        call(logits.unsqueeze(0), ids.unsqueeze(0))


def entropy_call(x, num_actions, loss_mask=None):
    return skyrl.vocab_parallel_entropy_packed_sequences(
        x, BOUNDS, WIDTH, num_actions, MASK, loss_mask, None, tp_group=None
    )


def test_bounds_that_nobody_could_check_make_every_result_nan():
    """On GPUs, where nothing waits for their values."""
    packed = rl_tokens.PackedTokens(
        tokens()[0].unsqueeze(0), None, None, BOUNDS, WIDTH, sum_gradients=True
    )
    packed.valid = torch.tensor(False)
    assert (
        packed.log_probs(lambda labels: torch.zeros(1, T), tokens()[1].unsqueeze(0)).isnan().all()
    )
    assert packed.weights(1, None, torch.float32).isnan().all()


@pytest.mark.parametrize(
    "module", [skyrl_draft, slime, sampling_masks], ids=lambda m: m.__name__.split(".")[-1]
)
def test_examples_of_the_docstrings(module):
    assert doctest.testmod(module).attempted > 0 and doctest.testmod(module).failed == 0


def pack_call(x, ids, cu_seqlens, width=WIDTH, **options):
    return skyrl.from_parallel_logits_to_logprobs_packed_sequences(
        x, ids, cu_seqlens, width, 0, PADDED, None, **options
    )


def refused(group, device, what):
    logits, ids = tokens()
    if what == "odd":
        return nemo_rl.get_next_token_logprobs_from_logits(
            ids.view(2, 8), logits.view(2, 8, -1)[:, :5], None, None, None, group
        )
    if what == "same group":
        return nemo_rl.get_next_token_logprobs_from_logits(
            ids.view(2, 8), logits.view(2, 8, -1)[:, :4], None, group.rank(), group, group
        )
    if what == "same group, entries":
        entries = ids.view(2, 8, 1)
        return nemo_rl.get_distillation_topk_logprobs_from_logits(
            logits.view(2, 8, -1), entries.float(), entries, True, True, group.rank(), group, group
        )
    if what == "same group, packed":
        return skyrl.from_parallel_logits_to_logprobs_packed_sequences(
            logits[None, :8], ids[None], BOUNDS, WIDTH, 0, PADDED, group, cp_group=group
        )
    if what == "hidden":
        args = head()[0].unsqueeze(1), head()[1], None, ids.unsqueeze(0), 0, PADDED, None
        return nemo_rl.from_parallel_hidden_states_to_logprobs(*args, cp_group=group)
    x, cu_seqlens = logits[None, :8], torch.tensor([0, 6, 16])
    return nemo_rl.from_parallel_logits_to_logprobs_packed_sequences(
        x, ids[None], cu_seqlens, 7, 0, PADDED, None, cp_group=group
    )


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("odd", "even number of positions, got 5"),
        ("same group", "must be other ranks than those that share the vocabulary"),
        ("same group, entries", "must be other ranks than those that share the vocabulary"),
        ("same group, packed", "must be other ranks than those that share the vocabulary"),
        ("hidden", "cp_group must have one rank"),
        ("bounds", "multiples of 4"),
    ],
)
def test_context_parallel_calls_refused_by_name(what, names):
    for failure in on_ranks(2, refused, what, failures=True):
        assert failure.kind == "ValueError" and names in failure.message


SIZED = [
    f
    for f, right in HOSTS.items()
    if "vocab_size" in inspect.signature(f).parameters and "vocab_size" not in right
]


@pytest.mark.parametrize("function", SIZED, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_one_ranks_columns_without_their_group_ask_for_it(function):
    with pytest.raises(ValueError, match=r"Pass its group|give the process group that owns"):
        function(**HOSTS[function], vocab_size=1000)


X, IDS = torch.zeros(2, 4, 16), torch.zeros(2, 4, dtype=torch.int64)
CU_SEQLENS = torch.tensor([0, 4, 8])
FULL = SimpleNamespace(teacher_payload="logits", chunk_size=64, validate_decomposition=False)
PACKED = "of packed sequences must be [1, T, ..], got"
BOUNDS_OF = "must be bounds of this rank's 16 columns of logits, or rows of the weight, got"
WEIGHT = torch.zeros(16, 3)
# a call, and what its error says
MISTAKES = {
    "padding beyond the bounds": (
        lambda: nemo_rl.from_parallel_logits_to_logprobs(X, IDS, 0, 10, None),
        f"{BOUNDS_OF} [0, 10): with padding, vocab_end_index=16, and vocab_size=10",
    ),
    "padding of packed logits": (
        lambda: skyrl.from_parallel_logits_to_logprobs_packed_sequences(
            X.view(1, 8, 16), IDS.view(1, 8), CU_SEQLENS, 4, 0, 10, None
        ),
        f"{BOUNDS_OF} [0, 10): with padding, vocab_end_index=16",
    ),
    "padding of a weight": (
        lambda: skyrl.from_parallel_hidden_to_logprobs(X[..., :3], WEIGHT, IDS, 0, 10, None),
        f"{BOUNDS_OF} [0, 10): with padding, vocab_end_index=16",
    ),
    "bounds of all ranks": (
        lambda: nemo_rl.from_parallel_logits_to_logprobs(X, IDS, 0, 32, None),
        f"{BOUNDS_OF} [0, 32): the bounds are this rank's alone",
    ),
    "rows in the place of packed sequences": (
        lambda: nemo_rl.from_parallel_logits_to_logprobs_packed_sequences(
            X, IDS, CU_SEQLENS, 4, 0, 16, None
        ),
        f"{PACKED} [2, 4, 16]: pass its .flatten(0, 1)[None]",
    ),
    "flat packed sequences": (
        lambda: skyrl.from_parallel_logits_to_logprobs_packed_sequences(
            X.flatten(0, 1), IDS.flatten(), CU_SEQLENS, 4, 0, 16, None
        ),
        f"{PACKED} [8, 16]: pass its [None]",
    ),
    "hidden states of rows": (
        lambda: nemo_rl.from_parallel_hidden_states_to_logprobs(
            X[..., :3], WEIGHT, None, IDS, 0, 16, None
        ),
        "must be [S, B, H] with B = 2, as the ids [2, 4] have it, got [2, 4, 3]: of [B, S, H]? Pass "
        "its .transpose(0, 1)",
    ),
    "a teacher's hidden states of rows": (
        lambda: nemo_rl.prepare_opd_full_loss_input_from_hidden_states(
            X[..., :3], WEIGHT, {"input_ids": IDS}, SimpleNamespace(opd_full=FULL)
        ),
        "hidden states must be [S, B, H] with B = 2",
    ),
    "a batch of other keys": (
        lambda: nemo_rl.prepare_opd_full_loss_input(
            X, {"ids": IDS}, SimpleNamespace(opd_full=FULL)
        ),
        "data must have 'input_ids', got ['ids']",
    ),
    "no batch": (
        lambda: nemo_rl.prepare_opd_full_loss_input(X, None, SimpleNamespace(opd_full=FULL)),
        "data must be NeMo-RL's batch or a dict, got NoneType",
    ),
    "a label by another name": (
        lambda: verl.logits_processor(None, 16)(X, labels=IDS),
        "process() got an unexpected keyword argument 'labels': did you mean 'label'?",
    ),
    "no label": (
        lambda: verl.logits_processor(None, 16)(X),
        "process() must have label (a tensor of int64 or int32), got logits",
    ),
    "padding of verl's logits": (
        lambda: verl.logits_processor(None, 10)(X, label=IDS),
        "logits must have the 10 columns of this rank, got 16: with padding, "
        "logits_processor(group, 10, padded_size=16)",
    ),
    "no masks": (
        lambda: sampling_masks.from_vllm(None),
        "must be a list with one for each completion, got NoneType",
    ),
    "one mask": (
        lambda: sampling_masks.from_prime_rl(SimpleNamespace(ids=b"", counts=b"")),
        "must be a list with one for each sample, got SimpleNamespace: of one, write [mask]",
    ),
    "a sample without a mask": (
        lambda: sampling_masks.from_prime_rl([None]),
        "must be an object with ids and counts, got NoneType",
    ),
    "a trajectory without a support": (
        lambda: sampling_masks.from_skyrl([None]),
        "a trajectory must have a rollout_sample_support, got None",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_a_hosts_function_says_what_to_write(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        call()


@pytest.mark.parametrize("module", [verl, nemo_rl, skyrl, slime, ms_swift])
def test_a_module_says_which_functions_of_its_host_it_has(module):
    assert all(hasattr(module, name) for name in module.__all__)
    words = f"{', '.join(sorted(module.__all__))}, and functions of hosts that are one call"
    with pytest.raises(AttributeError, match=re.escape(f"no attribute 'xyz': it has {words}")):
        getattr(module, "xyz")  # noqa: B009, as users write it
    with pytest.raises(AttributeError, match=r"no attribute '__xyz__'$"):
        getattr(module, "__xyz__")  # noqa: B009
