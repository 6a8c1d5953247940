"""NeMo-RL's functions, values and gradients, against float64 log_softmax of the gathered logits."""

from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import trainer_problem
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_problem import (
    DTYPES,
    B,
    K,
    S,
    V,
    close,
    close_grads,
    cut,
    data,
    dtype_name,
    head,
    truth,
)

from tp_headloss.integrations import nemo_rl


def ranks_of(group):
    """Keywords of NeMo-RL for the ranks that share the vocabulary."""
    return (
        {}
        if group is None
        else {"vocab_parallel_rank": group.rank(), "vocab_parallel_group": group}
    )


def bounded(x, ids, group, **given):
    """Log-probs of a rank that knows its bounds, which are the same without a gradient."""
    start = 0 if group is None or group.rank() == 0 else trainer_problem.UNEVEN[1]
    args = x, ids, start, start + x.shape[-1], group
    out = nemo_rl.from_parallel_logits_to_logprobs(*args, **given)
    detached = nemo_rl.from_parallel_logits_to_logprobs(*args, True, **given)
    assert torch.equal(out.nan_to_num(7), detached.nan_to_num(7)) and not detached.requires_grad
    return out


def next_tokens(group, device, dtype, form):
    logits, ids = data(dtype)
    ids[1, 3] = -100
    boundaries = trainer_problem.UNEVEN if form == "bounds" else trainer_problem.EVEN
    x, ids = cut(logits, group, boundaries).detach().to(device).requires_grad_(), ids.to(device)
    if form == "bounds":
        out = bounded(x, ids, group, vocab_size=V)
    elif form == "dtensor":
        mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
        distributed = DTensor.from_local(x, mesh, [Shard(-1)])
        ids = DTensor.from_local(ids, mesh, [Replicate()])
        out = nemo_rl.get_next_token_logprobs_from_logits(ids, distributed, vocab_size=V)
    else:
        if form == "longer":  # logits of sequences that were padded further than their ids
            ids = ids[:, : S - 2]
        # a host that has a temperature has divided the logits by it
        params = SimpleNamespace(top_k=None, top_p=1.0, temperature=0.3)
        out = nemo_rl.get_next_token_logprobs_from_logits(
            ids, x, sampling_params=params, vocab_size=V, **ranks_of(group)
        )
    (trainer_problem.WEIGHTS[0, :, : out.shape[1]].to(device) * out).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    ("ranks", "form"),
    [
        (1, "even"),
        (2, "even"),
        (1, "longer"),
        (2, "longer"),
        (1, "bounds"),
        (2, "bounds"),
        (2, "dtensor"),
    ],
)
def test_nemo_next_token_log_probs(ranks, form, dtype):
    results = on_ranks(ranks, next_tokens, dtype, form)
    logits, ids = data(dtype)
    length = S - 2 if form == "longer" else S
    log_prob, _, _, leaf = truth(logits[:, : length - 1], ids[:, 1:length])
    used = torch.ones(B, length - 1)
    used[1, 2] = 0  # the id -100 at 3
    expected = log_prob * used
    (trainer_problem.WEIGHTS[0, :, : length - 1] * expected).sum().backward()
    # nothing of the last position
    gradient = torch.nn.functional.pad(leaf.grad, (0, 0, 0, S - length + 1))
    for out, _ in results:
        assert out.shape == (B, length - 1) and out.dtype == torch.float32
        close(out, expected)
    close_grads([grad for _, grad in results], gradient, dtype)


FILTERS = [
    SimpleNamespace(top_k=3, top_p=1.0),
    {"top_p": 0.7},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.3},
]


def kept_of(z, params):
    """bool: which ids of z [.., V] in float64 NeMo-RL's sampling parameters keep; of equal ones the
    lowest."""
    params = {"top_k": None, **(params if isinstance(params, dict) else vars(params))}
    order = z.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(V) < (params["top_k"] or V)
    p = order.values.masked_fill(~kept, -torch.inf).softmax(-1)
    return torch.zeros_like(z, dtype=torch.bool).scatter(
        -1, order.indices, kept & (p.cumsum(-1) - p < params["top_p"])
    )


def likely(logits):
    """Ids [B, S] of which most are among the likeliest of the position before, and one is the least
    likely."""
    order = logits[..., :V].double().sort(dim=-1, descending=True, stable=True).indices
    ids = torch.zeros(B, S, dtype=torch.int64)
    ids[:, 1:] = order[:, :-1, :3].gather(-1, torch.arange(B * (S - 1)).view(B, S - 1, 1) % 3)[
        ..., 0
    ]
    ids[0, 2], ids[1, 3], ids[1, 4] = order[0, 1, -1], -100, V + trainer_problem.PADDED
    return ids


def filtered(group, device, dtype, params, form):
    logits, _ = data(dtype)
    ids, boundaries = (
        likely(logits).to(device),
        trainer_problem.UNEVEN if form == "bounds" else trainer_problem.EVEN,
    )
    x = cut(logits, group, boundaries).detach().to(device).requires_grad_()
    given = {"sampling_params": params, "vocab_size": V}
    if form == "bounds":
        out = bounded(x, ids, group, **given)
    else:
        out = nemo_rl.get_next_token_logprobs_from_logits(ids, x, **given, **ranks_of(group))
    upstream = trainer_problem.WEIGHTS[0, :, :-1].clone()
    upstream[1, 3] = 0.0  # of the id beyond the vocabulary, whose gradient is NaN
    torch.where(upstream.to(device) != 0, out * upstream.to(device), 0.0).sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("params", FILTERS, ids=["top_k", "top_p", "both"])
@pytest.mark.parametrize(("ranks", "form"), [(1, "even"), (2, "even"), (2, "bounds")])
def test_nemo_log_probs_over_what_top_k_and_top_p_keep(ranks, form, params, dtype):
    results = on_ranks(ranks, filtered, dtype, params, form)
    logits, _ = data(dtype)
    ids = likely(logits)
    leaf = logits.double().requires_grad_()
    z, labels = leaf[:, :-1, :V], ids[:, 1:]
    kept = kept_of(z.detach(), params)
    log_p = (
        z.masked_fill(~kept, -torch.inf)
        .log_softmax(-1)
        .gather(-1, labels.clamp(0, V - 1)[..., None])[..., 0]
    )
    log_p = log_p.masked_fill(labels == -100, 0.0)
    good = (labels >= 0) & (labels < V) & log_p.isfinite()
    (trainer_problem.WEIGHTS[0, :, :-1] * log_p)[good].sum().backward()
    assert log_p[0, 1] == -torch.inf and good.sum() >= B * (S - 1) - 6
    for out, grad in results:
        assert out[1, 3].isnan() and torch.equal(out.isnan().cpu(), labels >= V)
        close(out[labels < V], log_p[labels < V])
        assert torch.equal(out.nan_to_num(7), results[0][0].nan_to_num(7))
        grad[1, 3] = 0.0
    close_grads([grad for _, grad in results], leaf.grad, dtype)


def replayed(group, device, dtype, as_batch):
    ids, mask = rollout()
    x = cut(data(dtype)[0], group).detach().to(device).requires_grad_()
    if as_batch:
        mask = {
            "sampling_mask_token_ids": mask.token_ids,
            "sampling_mask_sizes": mask.sizes,
            "input_ids": ids,
        }
    params = SimpleNamespace(top_k=3, top_p=0.5, replay_sampling_mask=True)
    out = nemo_rl.get_next_token_logprobs_from_logits(
        ids.to(device),
        x,
        sampling_params=params,
        sampling_mask=mask,
        vocab_size=V,
        **ranks_of(group),
    )
    (trainer_problem.WEIGHTS[0, :, : S - 3].to(device) * out).sum().backward()
    return out.detach(), x.grad


def rollout():
    """Ids [B, S - 2] and the mask of a rollout: a prompt of 2 tokens, then a token drawn from 4, 3,
    2 or 1 ids."""
    generator = torch.Generator().manual_seed(9)
    token_ids = torch.stack(
        [torch.randperm(V, generator=generator)[:4] for _ in range(B * (S - 2))]
    ).view(B, S - 2, 4)
    sizes = torch.arange(B * (S - 2)).view(B, S - 2) % 4 + 1
    sizes[:, :2] = 0
    token_ids = token_ids.masked_fill(torch.arange(4) >= sizes[..., None], 0)
    return token_ids[..., 0].clone(), SimpleNamespace(token_ids=token_ids.int(), sizes=sizes.int())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("ranks", "as_batch"), [(1, False), (2, True)])
def test_nemo_replays_a_sampling_mask(ranks, as_batch, dtype):
    """Beside logits of sequences that were padded further than their ids."""
    results = on_ranks(ranks, replayed, dtype, as_batch)
    _, mask = rollout()
    leaf = data(dtype)[0].double().requires_grad_()
    at = leaf[:, : S - 3].gather(-1, mask.token_ids[:, 1:].long())
    at = at.masked_fill(torch.arange(4) >= mask.sizes[:, 1:, None].clamp(min=1), -torch.inf)
    expected = torch.where(mask.sizes[:, 1:] > 0, at.log_softmax(-1)[..., 0], 0.0)
    (trainer_problem.WEIGHTS[0, :, : S - 3] * expected).sum().backward()
    for out, _ in results:
        close(out, expected)
    assert (expected[:, 0] == 0).all() and (expected < -0.1).any()
    close_grads([grad for _, grad in results], leaf.grad, dtype)


def every_column(group, device):
    logits, ids = data()
    x, ids = cut(logits, group, trainer_problem.UNEVEN).detach().to(device), ids.to(device)
    start = 0 if group is None or group.rank() == 0 else trainer_problem.UNEVEN[1]
    return nemo_rl.from_parallel_logits_to_logprobs(x, ids, start, start + x.shape[-1], group)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nemo_counts_every_column_without_a_vocab_size(ranks):
    logits, ids = data()
    for out in on_ranks(ranks, every_column):
        close(out, truth(logits[:, :-1], ids[:, 1:], columns=trainer_problem.PADDED)[0])


def largest_allocation(function):
    """Bytes of the largest tensor that comes into being (on GPUs: the peak of all of them)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_nemo_chunk_size_bounds_memory_that_does_not_exist(device):
    logits = torch.randn(2, 256, 4096, dtype=torch.bfloat16, device=device)
    ids = torch.randint(0, 4096, (2, 256), device=device)
    copy = 4 * logits.numel()  # in fp32
    assert largest_allocation(lambda: logits.float()) >= copy

    def score(chunk_size):
        return nemo_rl.get_next_token_logprobs_from_logits(ids, logits, chunk_size=chunk_size)

    assert torch.equal(score(None), score(7))
    assert largest_allocation(lambda: score(None)) <= copy / 3
    logits.requires_grad_()
    # the bf16 gradient
    assert largest_allocation(lambda: score(None).sum().backward()) <= copy / 2 * 1.3


def mask_of(length, sizes=None):
    sizes = torch.zeros(B, length).int() if sizes is None else sizes
    return {
        "sampling_mask": SimpleNamespace(token_ids=torch.zeros(B, length, 2).long(), sizes=sizes)
    }


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"seq_index": torch.arange(S)}, "seq_index"),
        ({"cp_sharder": object()}, "cp_sharder"),
        ({"sampling_params": MappingProxyType({"top_k": None, "top_p": 1.1})}, "top_p must be in"),
        ({"sampling_params": {"replay_sampling_mask": True}}, "needs a sampling_mask"),
        (mask_of(S, torch.zeros(S).long()), "must have sizes"),
        (mask_of(S + 2), "must be of the tokens"),
        (
            mask_of(S - 1),
            rf"sampling_mask must be of the tokens, \[{B}, {S}, 'K'\], got \[{B}, {S - 1}, 2\]",
        ),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
        ({"sampling_params": SimpleNamespace(top_k=5, top_p=1.0, min_p=0.1)}, "got min_p=0.1"),
        (
            {"sampling_params": SimpleNamespace(top_k=-1, top_p=1.0, replay_sampling_mask=True)},
            "replay_sampling_mask",
        ),
        ({"vocab_parallel_rank": 0}, "vocab_parallel_group"),
        ({"vocab_size": V + trainer_problem.PADDED}, "must have at least vocab_size"),
    ],
)
def test_nemo_refuses_by_name(options, names):
    logits, ids = data()
    with pytest.raises(ValueError, match=names):
        nemo_rl.get_next_token_logprobs_from_logits(ids, logits, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"sampling_mask": torch.zeros(B, S, 1)},
            "with token_ids and sizes, or a mapping, got Tensor",
        ),
        ({"sampling_params": {"top_k": torch.full((B, S), 5)}}, "top_k must be one number"),
        ({"sampling_params": {"top_k": [5, 5]}}, r"top_k must be one number .* got \[5, 5\]"),
        ({"sampling_params": {"top_p": "0.9"}}, "top_p must be one number .* got '0.9'"),
    ],
)
def test_nemo_refuses_masks_and_parameters_of_other_types(options, said):
    logits, ids = data()
    with pytest.raises(TypeError, match=said):
        nemo_rl.get_next_token_logprobs_from_logits(ids, logits, **options)


@pytest.mark.parametrize(
    "params", [(None, 0.9), "top_k=20", SimpleNamespace(top_k=20), 0.9, {"top_k"}]
)
def test_nemo_refuses_sampling_params_of_unknown_kinds(params):
    logits, ids = data()
    for function in (
        lambda: nemo_rl.get_next_token_logprobs_from_logits(ids, logits, sampling_params=params),
        lambda: nemo_rl.from_parallel_logits_to_logprobs(
            logits, ids, 0, trainer_problem.PADDED, None, sampling_params=params
        ),
    ):
        with pytest.raises(TypeError, match=f"with top_k and top_p, got {type(params).__name__}"):
            function()


def test_nemo_accepts_what_changes_nothing_and_refuses_shapes():
    logits, ids = data()
    plain = nemo_rl.get_next_token_logprobs_from_logits(ids, logits)
    one = torch.distributed.ProcessGroup(0, 1)
    params = SimpleNamespace(top_k=-1, top_p=1.0)
    for given in (params, vars(params), {"temperature": 0.3}, {}):
        same = nemo_rl.get_next_token_logprobs_from_logits(
            ids, logits, None, None, None, one, given, 3
        )
        assert torch.equal(plain, same)
    with pytest.raises(ValueError, match="S from 1 to the 4 positions given, got"):
        nemo_rl.get_next_token_logprobs_from_logits(ids, logits[:, :4])


def wrong_rank(group, device):
    logits, ids = data()
    tp = {"vocab_parallel_rank": 1 - group.rank(), "vocab_parallel_group": group}
    return nemo_rl.get_next_token_logprobs_from_logits(
        ids.to(device), cut(logits, group).to(device), **tp
    )


def test_nemo_refuses_another_rank_than_this_one():
    assert all(
        "must be this rank" in failure.message for failure in on_ranks(2, wrong_rank, failures=True)
    )


def of_hidden(group, device, inference_only):
    (hidden, weight), (_, ids) = head(), data()
    ranks = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    # [S/P, B, H]
    own = hidden.transpose(0, 1).chunk(ranks)[rank].contiguous().to(device).requires_grad_()
    rows = cut(weight, group, trainer_problem.EVEN, 0).detach().to(device).requires_grad_()
    args = (
        own,
        rows,
        None,
        ids.to(device),
        rank * len(rows),
        (rank + 1) * len(rows),
        group,
        inference_only,
    )
    out = nemo_rl.from_parallel_hidden_states_to_logprobs(*args, None, 3, vocab_size=V)
    if inference_only:
        assert not out.requires_grad
        return out, None, None
    (trainer_problem.WEIGHTS[0, :, :-1].to(device) * out).sum().backward()
    return out.detach(), own.grad, rows.grad


@pytest.mark.parametrize(("ranks", "inference_only"), [(1, False), (2, False), (2, True)])
def test_nemo_log_probs_of_hidden_states(ranks, inference_only):
    results = on_ranks(ranks, of_hidden, inference_only)
    (hidden, weight), (_, ids) = head(), data()
    hidden, weight = hidden.double(), weight.double()
    log_prob, _, _, leaf = truth((hidden @ weight.t())[:, :-1], ids[:, 1:])
    (trainer_problem.WEIGHTS[0, :, :-1] * log_prob).sum().backward()
    for out, _, _ in results:
        close(out, log_prob, atol=1e-5)
    if not inference_only:
        gradient = torch.nn.functional.pad(leaf.grad @ weight, (0, 0, 0, 1)).transpose(0, 1)
        close(torch.cat([result[1].cpu() for result in results]), gradient, atol=1e-5)
        gradient = leaf.grad.flatten(0, 1).t() @ hidden[:, :-1].flatten(0, 1)
        close(torch.cat([result[2].cpu() for result in results]), gradient, atol=1e-5)


def test_nemo_refuses_gathered_logits_of_hidden_states():
    (hidden, weight), (_, ids) = head(), data()
    with pytest.raises(ValueError, match="runtime_gather_output"):
        nemo_rl.from_parallel_hidden_states_to_logprobs(
            hidden, weight, True, ids, 0, trainer_problem.PADDED, None
        )


def entries():
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, V, (B, S, K), generator=generator)
    ids[0, :, 1:3] = 0  # padded entries repeat an id
    return torch.randn(B, S, K, generator=generator), ids


def distilled(group, device, dtype, zero_outside_topk, calculate_entropy):
    teacher, ids = (x.to(device) for x in entries())
    x = cut(data(dtype)[0], group).detach().to(device).requires_grad_()
    options = {
        "zero_outside_topk": zero_outside_topk,
        "calculate_entropy": calculate_entropy,
        "vocab_size": V,
    }
    student, of_teacher, entropy = nemo_rl.get_distillation_topk_logprobs_from_logits(
        x, teacher, ids, **options, **ranks_of(group)
    )
    loss = -(of_teacher.exp() * student).sum()
    if entropy is not None:
        loss = loss + (trainer_problem.WEIGHTS[0, :, :-1].to(device) * entropy).sum()
    loss.backward()
    return [None if r is None else r.detach() for r in (student, of_teacher, entropy)], x.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("zero_outside_topk", "calculate_entropy"), [(True, True), (True, False), (False, False)]
)
def test_nemo_distillation_entries(ranks, zero_outside_topk, calculate_entropy, dtype):
    results = on_ranks(ranks, distilled, dtype, zero_outside_topk, calculate_entropy)
    teacher, ids = entries()
    leaf = data(dtype)[0].double().requires_grad_()
    log_p = leaf[..., :V].log_softmax(-1)
    student = log_p.gather(-1, ids) if zero_outside_topk else leaf.gather(-1, ids).log_softmax(-1)
    of_teacher = teacher.double().log_softmax(-1)
    entropy = (log_p.exp() * log_p).sum(-1)[:, :-1]
    loss = -(of_teacher.exp() * student)[:, :-1].sum()
    (loss + (trainer_problem.WEIGHTS[0, :, :-1] * entropy).sum() * calculate_entropy).backward()
    for (got, got_teacher, got_entropy), _ in results:
        close(got, student[:, :-1])
        close(got_teacher, of_teacher[:, :-1])
        assert (got_entropy is not None) == calculate_entropy
        if calculate_entropy:
            close(got_entropy, entropy)
        assert torch.equal(got, results[0][0][0])
    grads = [grad for _, grad in results]
    assert all(grad.dtype == dtype for grad in grads)
    # autograd adds gradients of bf16 here, each rounded
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2**-7, 2**-7)
    close(torch.cat([g.cpu() for g in grads], -1), leaf.grad, rtol, atol)


class Scattered(TorchDispatchMode):
    """What is added into bf16 tensors by index: CPUs do that in fp32, GPUs do not."""

    def __init__(self):
        super().__init__()
        self.sources = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.scatter_add.default and args[0].dtype == torch.bfloat16:
            self.sources.append(args[3].clone())
        return function(*args, **(kwargs or {}))


def test_nemo_distillation_adds_up_duplicates_in_fp32(device):
    x = torch.zeros(1, 2, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    ids = torch.full((1, 2, 512), 3, device=device)
    student, _, _ = nemo_rl.get_distillation_topk_logprobs_from_logits(
        x, ids.float(), ids, True, False
    )
    with Scattered() as scattered:
        (student.sum(-1) / 4096).sum().backward()
    expected = torch.full((8,), -1 / 64)
    expected[3] += 1 / 8
    assert torch.equal(x.grad[0, 0].float().cpu(), expected) and (x.grad[0, 1] == 0).all()
    if device == "cpu":
        (source,) = scattered.sources
        # one number per distinct id
        assert torch.equal((source != 0).sum(-1), torch.tensor([[1, 0]]))


def test_nemo_distillation_of_bad_entries():
    (teacher, ids), logits = entries(), data()[0]
    bad = ids.clone()
    bad[0, 0, 0], bad[0, 1, 1] = V, -1
    arguments = {"zero_outside_topk": True, "calculate_entropy": False, "vocab_size": V}
    student = nemo_rl.get_distillation_topk_logprobs_from_logits(logits, teacher, bad, **arguments)[
        0
    ]
    assert student[0, 0, 0].isnan() and student[0, 1, 1].isnan() and int(student.isnan().sum()) == 2
    with pytest.raises(ValueError, match="K > 0"):
        nemo_rl.get_distillation_topk_logprobs_from_logits(
            logits, teacher[..., :0], ids[..., :0], **arguments
        )
    with pytest.raises(ValueError, match="cp_sharder"):
        nemo_rl.get_distillation_topk_logprobs_from_logits(
            logits, teacher, ids, cp_sharder=object(), **arguments
        )


def hidden_dtensors(group, device):
    (hidden, weight), (_, ids) = head(), data()
    mesh = init_device_mesh(device.type, (2,))
    states = distribute_tensor(hidden.transpose(0, 1).contiguous().to(device), mesh, [Shard(0)])
    rows = distribute_tensor(weight.to(device), mesh, [Shard(0)])
    start, target = (
        group.rank() * len(weight) // 2,
        distribute_tensor(ids.to(device), mesh, [Replicate()]),
    )
    bounds = start, start + len(weight) // 2, group
    out = nemo_rl.from_parallel_hidden_states_to_logprobs(
        states, rows, None, target, *bounds, vocab_size=V
    )
    return out, hidden @ weight.t(), ids


def test_nemo_hidden_states_may_be_dtensors():
    for out, logits, ids in on_ranks(2, hidden_dtensors):
        expected = truth(logits, ids.roll(-1, 1))[0][:, :-1]
        close(out, expected, atol=1e-5)
