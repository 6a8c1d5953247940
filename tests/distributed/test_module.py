"""The modules: one matrix at every group size, every way out of the head, its state, sequence
parallelism, depths."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tp_headloss as hl

H, V, PADDED = 16, 2051, 2176  # more rows than are drawn together


def shard_of(group, padded=PADDED):
    return hl.VocabShard.from_group(group, V, padded_size=padded)


def head_of(group, device, padded=PADDED, **kwargs):
    return hl.VocabParallelHead(
        H, shard_of(group, padded), init=hl.Init(0.2, seed=7), device=device, **kwargs
    )


def gathered(x, group):
    """Rows of all ranks."""
    if group is None:
        return x.detach()
    parts = [None] * group.size()
    torch.distributed.all_gather_object(parts, x.detach().cpu())
    return torch.cat(parts).to(x.device)


def whole(x, group):
    """Rows of all ranks, without padding."""
    return gathered(x, group)[:V]


def tokens(device, *lead):
    generator = torch.Generator().manual_seed(3)
    hidden, labels = (
        torch.randn(*lead, H, generator=generator),
        torch.randint(0, V, lead, generator=generator),
    )
    labels.flatten()[1] = -100
    return hidden.to(device), labels.to(device)


def worst(ours, theirs):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def initial(group, device, padded):
    head = head_of(group, device, padded)
    embedding = hl.VocabParallelEmbedding(H, shard_of(group, padded), device=device)
    assert not head.weight[head.shard.valid_width :].any()
    deferred = head_of(group, "meta", padded).to_empty(device=device)
    deferred.reset_parameters()
    assert torch.equal(deferred.weight, head.weight)
    return whole(head.weight, group), whole(embedding.weight, group)


def test_any_group_size_gives_the_same_matrix():
    head, embedding = on_ranks(1, initial, PADDED)[0]
    assert abs(float(head.std()) - 0.2) < 0.01 and abs(float(embedding.std()) - 1) < 0.02
    blocks = torch.corrcoef(
        torch.stack([head[:1024].flatten(), head[1024:2048].flatten(), embedding[:1024].flatten()])
    )
    assert float((blocks - torch.eye(3)).abs().max()) < 0.05  # drawn apart
    for world, padded in ((2, PADDED), (4, PADDED), (4, V)):
        for others in on_ranks(world, initial, padded):
            assert torch.equal(others[0], head) and torch.equal(others[1], embedding)


def ways(group, device, how):
    """-> results and gradients of hidden states, whole weight and bias."""
    rows, (hidden, labels) = 8, tokens(device, 8, 3)
    linear = hl.Linear(hidden_grad=how, mode="recompute")
    terms = [hl.CrossEntropy(), hl.ZLoss(1e-3), hl.Entropy(0.01)]
    head = head_of(
        group,
        device,
        head_loss=hl.HeadLoss(terms),
        bias=True,
        linear=linear,
        transform=hl.Transform(softcap=5.0),
    )
    torch.nn.init.constant_(head.bias, 0.1)
    if how == "reduce_scatter" and group is not None:
        hidden = hidden.chunk(group.size())[group.rank()]
    out = {}
    for way in ("losses", "statistics", "logits"):
        x = hidden.clone().requires_grad_()
        head.zero_grad()
        if way == "losses":
            out[way] = head(x, labels).loss
        elif way == "statistics":
            out[way] = (head.statistics(x, labels, ("entropy",)).entropy).sum()
        else:
            stats = hl.vocab_statistics(
                head(x), labels, shard=head.shard, transform=head.transform, want=("entropy",)
            )
            out[way] = (stats.entropy - stats.log_prob).sum()
        out[way].backward()
        dx = x.grad
        if group is not None and how == "none":
            torch.distributed.all_reduce(dx)
        if how == "reduce_scatter":
            dx = gathered(dx, group)
        assert dx.shape[0] == rows and (
            group is None or not head.weight.grad[head.shard.valid_width :].any()
        )
        out[way] = (
            out[way].detach(),
            dx,
            whole(head.weight.grad, group),
            whole(head.bias.grad, group),
        )
    if group is None:  # of the definitions
        z = F.linear(hidden.double(), head.weight.double(), head.bias.double())[..., :V]
        log_p = (5 * torch.tanh(z / 5)).log_softmax(-1)
        lse, entropy = (5 * torch.tanh(z / 5)).logsumexp(-1), -(log_p.exp() * log_p).sum(-1)
        valid = labels != -100
        log_prob = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        expected = {
            "losses": (-log_prob + 1e-3 * lse.square() - 0.01 * entropy)[valid].mean(),
            "statistics": entropy[valid].sum(),
            "logits": (entropy - log_prob)[valid].sum(),
        }
        for way, value in expected.items():
            assert abs(float(out[way][0] / value.detach()) - 1) < 1e-6, way
    return out


@pytest.mark.parametrize("how", ["all_reduce", "reduce_scatter", "none"])
def test_every_way_out_equals_the_unsharded_one(how):
    (theirs,) = on_ranks(1, ways, how)
    for ours in on_ranks(2, ways, how):
        for way in theirs:
            assert worst(ours[way], theirs[way]) < 2e-6, (way, how)


def embedded(group, device, sequence_parallel):
    embedding = hl.VocabParallelEmbedding(
        H, shard_of(group), sequence_parallel=sequence_parallel, device=device
    )
    ids = torch.randint(0, V, (8, 3), generator=torch.Generator().manual_seed(2)).to(device)
    upstream = torch.randn(8, 3, H, generator=torch.Generator().manual_seed(4)).to(device)
    if sequence_parallel and group is not None:
        upstream = upstream.chunk(group.size())[group.rank()]
    out = embedding(ids)
    out.backward(upstream)
    x = gathered(out, group) if sequence_parallel else out.detach()
    ids[0] = V  # a padding row is no id
    return x, whole(embedding.weight.grad, group), bool(embedding(ids).isnan().any())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_embedding_equals_the_unsharded_one(sequence_parallel, device):
    torch.manual_seed(0)
    reference = hl.VocabParallelEmbedding(H, hl.VocabShard(0, PADDED, V), device=device)
    ids = torch.randint(0, V, (8, 3), generator=torch.Generator().manual_seed(2))
    for world in (1, 2):
        for x, grad, nan in on_ranks(world, embedded, sequence_parallel):
            assert torch.equal(x, F.embedding(ids, reference.weight.detach().cpu()))
            counts = torch.bincount(ids.flatten(), minlength=V)
            assert grad.shape == (V, H) and torch.equal(grad.ne(0).any(1), counts > 0)
            upstream = torch.randn(8, 3, H, generator=torch.Generator().manual_seed(4))
            expected = torch.zeros(V, H).index_add(0, ids.flatten(), upstream.flatten(0, 1))
            assert torch.allclose(grad, expected, atol=1e-6)
            assert nan or world > 1


def bad_id(group, device, place):
    embedding = hl.VocabParallelEmbedding(H, shard_of(group), device=device)
    return embedding(torch.tensor([place, 1], device=device)).isnan().all(1)


@pytest.mark.parametrize("place", [-1, V, PADDED])
def test_an_unknown_id_is_nan_on_every_rank(place):
    for rows in on_ranks(2, bad_id, place):
        assert rows.tolist() == [True, False]


def tied(group, device):
    shard = shard_of(group)
    embedding = hl.VocabParallelEmbedding(H, shard, init=hl.Init(0.2, 7), device=device)
    before = embedding.weight.detach().clone()
    head = hl.VocabParallelHead(H, shard, weight=embedding.weight)
    assert head.weight is embedding.weight
    head.reset_parameters()
    assert torch.equal(before, embedding.weight)
    _, labels = tokens(device, 12)
    loss = head(embedding(labels.clamp(min=0)), labels.roll(1)).loss
    loss.backward()
    return loss.detach(), whole(embedding.weight.grad, group)


def test_a_tied_weight_gets_both_gradients():
    (theirs,) = on_ranks(1, tied)
    for ours in on_ranks(2, tied):
        assert worst(ours, theirs) < 2e-6


def depths(group, device):
    head = head_of(group, device, head_loss=hl.HeadLoss(metrics=("accuracy",)))
    hidden, _ = tokens(device, 3, 2, 9)
    _, labels = tokens(device, 2, 9)
    targets, weights = hl.multi_token_targets(labels, 2, weight=0.3)
    x = hidden.clone().requires_grad_()
    out = head(x, targets, token_weight=weights, denominator=(labels != -100).sum())
    out.loss.backward()
    return out.loss.detach(), x.grad, out.stats.correct.sum(), whole(head.weight, group)


@pytest.mark.parametrize("world", [1, 2])
def test_depths_of_multi_token_prediction_are_one_call(world):
    for loss, grad, _, weight in on_ranks(world, depths):
        hidden, _ = tokens("cpu", 3, 2, 9)
        _, labels = tokens("cpu", 2, 9)
        x = hidden.double().requires_grad_()
        logits = x @ weight.double().T
        parts = []
        for depth in range(3):
            shifted = F.pad(labels[:, depth:], (0, depth), value=-100)
            parts.append(
                F.cross_entropy(logits[depth].flatten(0, 1), shifted.flatten(), reduction="sum")
            )
        expected = (parts[0] + 0.3 / 2 * (parts[1] + parts[2])) / (labels != -100).sum()
        expected.backward()
        assert abs(float(loss - expected)) < 1e-6 and worst([grad], [x.grad]) < 1e-6


def test_depths_longer_than_the_sequence_count_nothing():
    labels = torch.tensor([[3, 4]])
    targets, weights = hl.multi_token_targets(labels, 3)
    assert targets.tolist() == [[[3, 4]], [[4, -100]], [[-100, -100]], [[-100, -100]]]
    assert weights[:, 0, 0].tolist() == pytest.approx([1, *[0.1 / 3] * 3])
    weights[targets == 4] = 0  # of two tokens, and of no other
    assert weights.count_nonzero() == weights.numel() - 2
    largest = 2**63 - 1  # which a float does not hold
    assert hl.multi_token_targets(labels, 1, ignore_index=largest)[0].tolist() == [
        [[3, 4]],
        [[4, largest]],
    ]


@pytest.mark.parametrize("shape", [(15,), (3, 5), (1, 3, 5)])
@pytest.mark.parametrize("seed", range(6))
def test_a_depth_learns_no_token_of_another_document(shape, seed):
    """Row by row and label by label, where a document's id may also come again later."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 50, shape, generator=generator)
    labels = torch.where(torch.rand(shape, generator=generator) < 0.2, -7, labels)
    cuts = torch.randint(0, 16, (seed,), generator=generator).sort().values
    bounds = torch.cat([torch.tensor([0]), cuts, torch.tensor([15])])  # some documents are empty
    ids = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff()).view(shape)
    again = ids % 2
    parts = {"cu_seqlens": bounds.int()}, {"document_ids": ids}, {"document_ids": again.int()}
    for given in parts:
        rows, weights = hl.multi_token_targets(labels, 4, ignore_index=-7, **given)
        assert torch.equal(weights, hl.multi_token_targets(labels, 4)[1])
        for place in range(15):
            row, last = ids.flatten(), (place // shape[-1] + 1) * shape[-1]
            for depth in range(5):
                seen = place + depth < last and row[place] == row[place + depth]
                want = labels.flatten()[place + depth] if seen else -7
                assert rows[depth].flatten()[place] == want


def test_one_document_is_what_no_bounds_are():
    labels = torch.tensor([[3, 4, 5, -100], [6, 7, 8, -100]])
    plain = hl.multi_token_targets(labels, 2)
    for given in ({"cu_seqlens": torch.tensor([0, 8])}, {"document_ids": torch.zeros_like(labels)}):
        assert all(map(torch.equal, plain, hl.multi_token_targets(labels, 2, **given)))
    both = {"cu_seqlens": torch.tensor([0, 8]), "document_ids": labels}
    for given, words in (
        (both, "got both"),
        ({"cu_seqlens": torch.tensor([0, 9])}, r"cu_seqlens must be ascending in \[0, 8\]"),
        (
            {"cu_seqlens": torch.tensor([0, 4])},
            "every token in the mask must belong to a sequence, got 3",
        ),
        ({"document_ids": labels[0]}, r"document_ids must have shape \[2, 4\] to fit labels"),
    ):
        with pytest.raises(ValueError, match=words):
            hl.multi_token_targets(labels, 2, **given)


def with_padding(group, device, value):
    """Everything that reads a weight whose rows of padding hold this value."""
    torch.manual_seed(6)
    vocab, hidden = 50, torch.randn(6, 8, device=device)
    shard = hl.VocabShard.from_group(group, vocab, padded_size=64)
    weight, teacher, bias = torch.randn(64, 8), torch.randn(64, 8), torch.randn(64)
    for x in (weight, teacher, bias):
        x[vocab:] = value
    mine = slice(shard.start, shard.stop)
    weight, teacher, bias = (x[mine].to(device) for x in (weight, teacher, bias))
    labels = torch.arange(6, device=device) * 8
    embedding = hl.VocabParallelEmbedding(8, shard, device=device)
    head = hl.VocabParallelHead(8, shard, bias=True, device=device)
    with torch.no_grad():
        embedding.weight.copy_(weight)
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    given = {"inputs": {"teacher": hl.TeacherHead(hidden.roll(1, 1), teacher)}}
    found = []
    for mode in ("recompute", "one_sweep"):
        x = hidden.clone().requires_grad_()
        loss = hl.HeadLoss([hl.CrossEntropy(), hl.Distillation()])
        out = head(x, labels, head_loss=loss, linear=hl.Linear(mode), **given)
        out.loss.backward()
        found += [out.loss.detach(), x.grad]
    rows = embedding(labels)
    hl.HeadLoss()(head(rows), labels, shard=shard).loss.backward()
    found += [
        rows,
        embedding.weight.grad,
        head.weight.grad,
        head.bias.grad,
        head(hidden)[:, shard.valid_width :],
    ]
    top = hl.topk_log_probs(hidden, 5, weight=weight, shard=shard)
    drawn = hl.sample(
        hidden, weight=weight, shard=shard, seed=1, positions=labels, rule=hl.SamplingRule(top_k=9)
    )
    found += [top.ids, top.log_probs, top.lse, drawn.ids, drawn.full_log_probs, drawn.sets.ids]
    return [x.detach().cpu() for x in found]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_padding_may_hold_anything(world):
    expected = on_ranks(world, with_padding, 0.0)
    for value in (torch.nan, torch.inf, 1e30):
        for found, right in zip(on_ranks(world, with_padding, value), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
            assert all(x.isfinite().all() for x in right)


@pytest.mark.parametrize("enabled", [False, True])
def test_no_path_of_the_losses_makes_the_logits(enabled, device):
    head = head_of(None, device, linear=hl.Linear(budget=128 * PADDED * 4))
    hidden, labels = tokens(device, 1024)
    with torch.set_grad_enabled(enabled), torch.profiler.profile(profile_memory=True) as profile:
        out = head(hidden, labels)
        head.eval()(hidden, labels)
        head.statistics(hidden, labels)
    assert out.loss.requires_grad == enabled
    largest = max(
        event.nbytes()
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    assert 4 * 128 * PADDED / 2 < largest < 4 * 1024 * PADDED / 4


def saved(group, device, folder):
    head = head_of(group, device, bias=True)
    torch.nn.init.constant_(head.bias, 0.5)
    kwargs = {"process_group": group} if group is not None else {"no_dist": True}
    dcp.save({"model": head.state_dict()}, checkpoint_id=folder, **kwargs)
    return whole(head.weight, group)


def loaded(group, device, folder):
    head = hl.VocabParallelHead(
        H, shard_of(group), bias=True, init=hl.Init(0.2, seed=8), device=device
    )
    state = {"model": head.state_dict()}
    kwargs = {"process_group": group} if group is not None else {"no_dist": True}
    dcp.load(state, checkpoint_id=folder, **kwargs)
    fresh = hl.VocabParallelHead(
        H, shard_of(group), bias=True, init=hl.Init(0.2, seed=9), device=device
    )
    fresh.load_state_dict(state["model"])
    assert (fresh.bias[: fresh.shard.valid_width] == 0.5).all()
    return whole(fresh.weight, group)


@pytest.mark.parametrize("before, after", [(2, 4), (4, 1), (1, 2)])
def test_a_distributed_checkpoint_is_saved_at_one_group_size_and_loaded_at_another(
    before, after, tmp_path
):
    matrix = on_ranks(before, saved, str(tmp_path))[0]
    for other in on_ranks(after, loaded, str(tmp_path)):
        assert torch.equal(other, matrix)


def from_others(group, device):
    """Whole matrices, without and with the padding that the shards have, and own rows."""
    source, found = head_of(group, device), []
    rows = whole(source.weight, group)
    padded = F.pad(rows, (0, 0, 0, source.shard.padded_size - V))
    for given in (rows, padded, source.weight.detach().clone()):
        head = hl.VocabParallelHead(H, source.shard, init=hl.Init(0.2, seed=9), device=device)
        head.load_state_dict({"weight": given})
        found.append(bool(torch.equal(head.weight, source.weight)))
    copied = copy.deepcopy(source)
    return found, bool(torch.equal(copied.weight, source.weight)) and copied.shard is source.shard


@pytest.mark.parametrize("world", [1, 2])
def test_whole_matrices_and_own_rows_can_be_loaded(world):
    assert all(found == [True] * 3 and copied for found, copied in on_ranks(world, from_others))


def frozen_on_one_rank(group, device):
    head = head_of(group, device)
    x = tokens(device, 4)[0].requires_grad_(group.rank() == 0)
    head(x).sum().backward()
    return x.grad is not None


def test_a_rank_whose_hidden_states_need_no_gradient_still_takes_part():
    assert on_ranks(2, frozen_on_one_rank) == [True, False]


def uneven_state(group, device):
    boundaries = [0, 1500, PADDED]
    head = hl.VocabParallelHead(
        H, hl.VocabShard.from_boundaries(boundaries, V, group), device=device
    )
    head(*tokens(device, 4)).loss.backward()
    head.state_dict()


def test_a_cut_that_no_dtensor_has_refuses_to_describe_itself():
    for failure in on_ranks(2, uneven_state, failures=True):
        assert failure.kind == "ValueError" and "from_group" in failure.message


OF_ITS_OWN = {  # what a module that is tied to a weight cannot have
    r"init is of a weight that the module draws, got Init\(std=0.02": {"init": hl.Init()},
    "cpu and torch.float32, got meta and": {"device": "meta"},
    "cpu and torch.float32, got cpu and torch.bfloat16: leave": {"dtype": torch.bfloat16},
}


def test_the_bias_of_a_tied_head_is_where_its_weight_is(device):
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.zeros(PADDED, H, device=device, dtype=dtype))
        head = hl.VocabParallelHead(H, hl.VocabShard(0, PADDED, V), weight=weight, bias=True)
        assert (head.bias.device, head.bias.dtype) == (weight.device, dtype)


def sequence_of_one(group, device):
    """Hidden states [H] of sequence parallelism, into losses, statistics and logits."""
    head = head_of(group, device, linear=hl.Linear(hidden_grad="reduce_scatter"))
    said = []

    def labels(x):
        return torch.ones(2 * x[:, :1].numel() if x.dim() > 1 else (), device=device).long()

    for call in (
        lambda x: head(x, labels(x)),
        lambda x: head.statistics(x, labels(x)),
        head,
        head.logits,
    ):
        with pytest.raises(ValueError, match=r"needs hidden states \[S/P, .., H\], got \[16\]"):
            call(torch.zeros(H, device=device))
        with pytest.raises(TypeError, match=r"have one dtype, got torch\.bfloat16 and"):
            call(torch.zeros(2, H, device=device, dtype=torch.bfloat16))
        said.append(True)
    return said


def test_logits_refuse_the_hidden_states_that_losses_refuse():
    assert on_ranks(2, sequence_of_one) == [[True] * 4] * 2


@pytest.mark.parametrize("method", ["forward", "statistics"])
def test_what_the_module_has_is_no_argument_of_its_calls(method):
    head = hl.VocabParallelHead(H, hl.VocabShard(0, PADDED, V))
    hidden, labels = tokens("cpu", 6)
    for name in ("shard", "weight", "bias"):
        with pytest.raises(TypeError, match=rf"'{name}': write VocabParallelHead\(.., {name}=..\)"):
            getattr(head, method)(hidden, labels, **{name: None})
    with pytest.raises(TypeError, match=r"by position, got 2 more: write .*ids=|denominator=.."):
        getattr(head, method)(hidden, labels, (), None, 8)


def test_bad_arguments_are_named():
    shard = hl.VocabShard(0, PADDED, V)
    short, biased = torch.nn.Parameter(torch.zeros(3, H)), hl.Transform(bias=torch.zeros(PADDED))
    whole_weight = torch.nn.Parameter(torch.zeros(PADDED, H))
    for words, call in {
        r"\[2176, 16\], this rank.s rows .*, got \[3, 16\]": lambda: hl.VocabParallelHead(
            H, shard, weight=short
        ),
        "the bias is the module's": lambda: hl.VocabParallelHead(H, shard, transform=biased),
        "without labels": lambda: hl.VocabParallelHead(H, shard)(
            torch.zeros(2, H), token_weight=torch.ones(2)
        ),
        **{
            said: partial(hl.VocabParallelHead, H, shard, weight=whole_weight, **given)
            for said, given in OF_ITS_OWN.items()
        },
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert "ids [0, 2176) of 2051" in repr(hl.VocabParallelHead(H, shard))


@pytest.mark.parametrize("value", [None, 5])
@pytest.mark.parametrize("module", [hl.VocabParallelHead, hl.VocabParallelEmbedding])
def test_a_shard_that_is_none_is_refused_where_it_is_assigned(module, value):
    made = module(H, hl.VocabShard(0, PADDED, V))
    with pytest.raises(TypeError, match="shard must be a VocabShard, got "):
        made.shard = value
    made.shard = hl.VocabShard(0, PADDED, V)


def test_a_matrix_of_other_rows_is_refused_with_the_numbers_there_may_be():
    head = hl.VocabParallelHead(2, hl.VocabShard.from_group(None, 11, padded_size=16))
    words = "this rank's 16 rows or the whole vocabulary's 11 or 16, got 8\n"
    with pytest.raises(RuntimeError, match=words):
        head.load_state_dict({"weight": torch.zeros(8, 2)})
    transposed = r"got 2: a matrix \[H, V\] has to be transposed, \.t\(\)"
    with pytest.raises(RuntimeError, match=transposed):
        head.load_state_dict({"weight": torch.zeros(2, 11)})


def empty_shard(group, device):
    shard = hl.VocabShard.from_boundaries([0, 5, 5], 5, group)
    embedding = hl.VocabParallelEmbedding(H, shard, sequence_parallel=True, device=device)
    out = embedding(torch.arange(4, device=device))
    out.sum().backward()
    return out.shape[0], embedding.weight.grad is None or embedding.weight.grad.sum() == 4 * H


def test_an_empty_shard_takes_part_in_the_backward_of_sequence_parallelism():
    assert [(rows, bool(right)) for rows, right in on_ranks(2, empty_shard)] == [(2, True)] * 2


def test_a_call_gives_the_temperature_and_the_module_the_rest(device):
    head = head_of(None, device, transform=hl.Transform(softcap=2.0))
    hidden, labels = tokens(device, 6)
    both = hl.Transform(softcap=2.0, temperature=0.5)
    expected = (
        hl.HeadLoss().linear(hidden, head.weight, labels, shard=head.shard, transform=both).loss
    )
    assert head(hidden, labels, transform=hl.Transform(temperature=0.5)).loss == expected
    with pytest.raises(ValueError, match="for its temperature"):
        head.statistics(hidden, labels, transform=hl.Transform(softcap=3.0))


def test_a_weight_that_is_no_longer_tied_is_not_left_undrawn():
    embedding = hl.VocabParallelEmbedding(H, hl.VocabShard(0, PADDED, V), device="meta")
    model = torch.nn.ModuleList(
        [embedding, hl.VocabParallelHead(H, embedding.shard, weight=embedding.weight)]
    )
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="no longer tied"):
        model[1].reset_parameters()


def into_dtensors(group, device):
    source, found = head_of(group, device), []
    rows = whole(source.weight, group)
    mesh = init_device_mesh(device.type, (2,))
    for given in (rows, source.weight.detach().clone(), source.state_dict()["weight"]):
        head = hl.VocabParallelHead(
            H, source.shard, init=hl.Init(0.2, seed=9), device=device
        ).to_dtensor(mesh)
        head.load_state_dict({"weight": given})
        found.append(bool(torch.equal(head.weight.to_local(), source.weight)))
    kept = source.state_dict(keep_vars=True)["weight"] is source.weight
    return found, kept


def test_parameters_that_are_dtensors_can_be_loaded_as_well():
    assert on_ranks(2, into_dtensors) == [([True] * 3, True)] * 2


def tied_too_early(group, device):
    """A head that is tied to an embedding whose parameters become DTensors afterwards."""
    shard = hl.VocabShard.from_group(group, V, padded_size=V + 1)
    embedding = hl.VocabParallelEmbedding(H, shard, device=device)
    head = hl.VocabParallelHead(H, shard, weight=embedding.weight, device=device)
    embedding.to_dtensor(init_device_mesh(device.type, (group.size(),)))
    with pytest.raises(ValueError, match=r"weight must .* replaced by to_dtensor .* Tie it later"):
        head(torch.randn(3, H, device=device), torch.arange(3, device=device))
    return True


def test_a_module_that_was_tied_before_to_dtensor_raises():
    assert on_ranks(2, tied_too_early) == [True] * 2


def compiled(group, device, how):
    """Embedding, logits and losses in one graph without breaks."""
    parallel = how == "reduce_scatter"
    embedding = hl.VocabParallelEmbedding(
        H, shard_of(group), sequence_parallel=parallel, device=device
    )
    head, results = head_of(group, device, linear=hl.Linear(hidden_grad=how)), []
    ids = torch.randint(0, V, (8, 2), generator=torch.Generator().manual_seed(2)).to(device)

    def step(ids):
        hidden = embedding(ids)
        return head(hidden, ids.roll(1, 0)).loss + head(hidden).square().mean()

    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        embedding.zero_grad()
        head.zero_grad()
        loss = function(ids)
        loss.backward()
        results.append((loss.detach(), embedding.weight.grad.clone(), head.weight.grad.clone()))
    torch.library.opcheck(
        torch.ops.tp_headloss.gather_tokens.default, (ids.float(), 2, head.shard.group_name)
    )
    torch.library.opcheck(
        torch.ops.tp_headloss.reduce_tokens.default, (ids.float(), how, 2, head.shard.group_name)
    )
    return worst(*results)


@pytest.mark.parametrize("how", ["all_reduce", "reduce_scatter"])
def test_the_modules_compile_without_graph_breaks(how):
    assert max(on_ranks(2, compiled, how)) < 1e-6


def wrong_matrices(group, device):
    head, messages = head_of(group, device, bias=True), []
    for rows in (10 * V, V + 300, V - 1, head.shard.width + 1):
        for name, matrix in (("weight", torch.zeros(rows, H)), ("bias", torch.zeros(rows))):
            before = getattr(head, name).detach().clone()
            try:
                head.load_state_dict({**head.state_dict(), name: matrix.to(device)})
            except RuntimeError as error:
                messages.append(
                    f"{name} must have this rank's {head.shard.width} rows" in str(error)
                )
            assert torch.equal(getattr(head, name), before)
    return messages


@pytest.mark.parametrize("world", [1, 2])
def test_a_matrix_of_other_rows_is_refused_and_never_cut(world):
    for messages in on_ranks(world, wrong_matrices):
        assert messages == [True] * 8


def other_cuts(group, device):
    """States whose DTensors are cut otherwise than the head, and one that is not cut at all."""
    matrix = torch.arange(20.0, device=device).view(10, 2) + 1
    mesh, found = DeviceMesh.from_group(group, device.type), []
    state = distribute_tensor(matrix, mesh, [Shard(0)])
    for shard in (
        hl.VocabShard.from_group(group, 10, 12),
        hl.VocabShard.from_boundaries([0, 3, 10], 10, group),
    ):
        for given in (state, distribute_tensor(matrix, mesh, [Replicate()])):
            embedding = hl.VocabParallelEmbedding(2, shard, device=device)
            embedding.load_state_dict({"weight": given})
            found.append(bool(torch.equal(embedding(torch.arange(10, device=device)), matrix)))
    embedding = hl.VocabParallelEmbedding(
        2, hl.VocabShard.from_group(group, 10), device=device
    ).to_dtensor(mesh)
    embedding.load_state_dict(
        {"weight": distribute_tensor(matrix, mesh, [Replicate()])}, assign=True
    )
    try:
        embedding(torch.arange(10, device=device))
    except ValueError as error:
        found.append("), got 10 (these look like gathered rows" in str(error))
    return found


def test_a_state_of_another_cut_is_loaded_by_its_rows():
    assert on_ranks(2, other_cuts) == [[True] * 5] * 2
