"""NeMo-RL's full-vocabulary distillation against float64 and its own formula on whole logits."""

from types import SimpleNamespace

import pytest
import torch
import trainer_problem
from ranks import on_ranks
from test_nemo_rl import largest_allocation, ranks_of
from torch.nn.functional import linear as projection
from trainer_problem import DTYPES, B, S, V, cut, data, dtype_name, head

from tp_headloss import Linear
from tp_headloss.integrations import nemo_rl

H_T = 7
TEACHERS = "one head", "two heads", "logits"


def configured(payload="hidden_states", chunk_size=None, penalty=0.01, **given):
    full = {"teacher_payload": payload, "chunk_size": chunk_size, "validate_decomposition": True}
    return SimpleNamespace(
        opd_full=SimpleNamespace(**full | given), reference_policy_kl_penalty=penalty
    )


def problem(kind, dtype=torch.float32, length=S):
    """A batch with the teacher's part, heads by the teacher's number, and the loss function. The
    teacher knows fewer positions than there are logits."""
    generator = torch.Generator().manual_seed(8)
    states = torch.randn(B, length - 1, H_T, generator=generator).to(dtype)
    rows = torch.randn(2, trainer_problem.PADDED, H_T, generator=generator).to(dtype)
    batch = {"input_ids": data()[1][:, : length - 1]}
    if kind == "logits":
        return batch | {"teacher_full_logits": states @ rows[0].t()}, None, configured("logits")
    batch["teacher_full_hidden_states"] = states
    if kind == "one head":
        return batch, {4: rows[0]}, configured(chunk_size=2)
    return (
        batch | {"opd_full_teacher_index": torch.tensor([1, 0])},
        dict(enumerate(rows)),
        configured(chunk_size=2),
    )


def teacher_logits(batch, heads):
    """[B, S - 1, PADDED]"""
    if heads is None:
        return batch["teacher_full_logits"]
    number = batch.get("opd_full_teacher_index", torch.tensor([*heads][:1] * B))
    states = batch["teacher_full_hidden_states"]
    return torch.stack(
        [x.to(heads[int(n)].dtype) @ heads[int(n)].t() for x, n in zip(states, number)]
    )


def expected(logits, batch, teacher):
    """The four results of whole logits, in their dtype or fp32."""
    at = torch.promote_types(logits.dtype, torch.float32)
    ids, width = batch["input_ids"], batch["input_ids"].shape[1] - 1
    log_p = logits[..., :V].to(at).log_softmax(-1)[:, :width]
    log_t = teacher[..., :V].to(at).log_softmax(-1)[:, :width]
    entropy, cross = (log_p.exp() * log_p).sum(-1), -(log_p.exp() * log_t).sum(-1)
    return {
        "opd_full_divergence": entropy + cross,
        "opd_full_entropy": entropy,
        "opd_full_cross_entropy": cross,
        "next_token_logprobs": log_p.gather(-1, ids[:, 1:, None]).squeeze(-1),
    }


def upstream(found):
    """The loss of both results that have a gradient."""
    value, score = found["opd_full_divergence"], found["next_token_logprobs"]
    at = trainer_problem.WEIGHTS[:, :, : value.shape[1]].to(value)
    return (at[0] * value).sum() + (at[1] * score).sum()


def on_device(x, device):
    if isinstance(x, dict):
        return {name: on_device(value, device) for name, value in x.items()}
    return x.to(device)


def own_heads(heads, group, device):
    if heads is None:
        return None
    return {n: cut(x, group, dim=0).detach().to(device) for n, x in heads.items()}


def from_logits(group, device, kind, dtype, parallel):
    batch, heads, loss_fn = problem(kind, dtype)
    batch, logits = on_device(batch, device), data(dtype)[0]
    tp, cp = (None, group) if parallel == "context" else (group, None)
    if cp is not None:  # four equal chunks, of which this rank has two
        own = [cp.rank(), 3 - cp.rank()]
        logits = torch.nn.functional.pad(logits, (0, 0, 0, 2)).unflatten(1, (4, 2))[:, own]
        logits = logits.flatten(1, 2)
    x = cut(logits, tp).detach().to(device).requires_grad_()
    found = nemo_rl.prepare_opd_full_loss_input(
        x,
        batch,
        loss_fn,
        **ranks_of(tp),
        context_parallel_group=cp,
        teacher_output_layer_weight_by_index=own_heads(heads, tp, device),
        vocab_size=V,
    )
    assert found["opd_full_divergence"].requires_grad
    assert not found["opd_full_entropy"].requires_grad
    assert not found["opd_full_cross_entropy"].requires_grad
    upstream(found).backward()
    return {name: value.detach().cpu() for name, value in found.items()}, x.grad.cpu()


def errors(found, truth):
    return {
        name: float((found[name].double() - truth[name].double()).abs().max()) for name in truth
    }


def compare(results, plain, truth, dtype):
    """No error is larger than twice that of plain torch in this dtype, or one rounding."""
    allowed, unit = errors(plain, truth), 4e-6 if dtype == torch.float32 else 2**-8
    for found in results:
        for name, error in errors(found, truth).items():
            assert error <= 2 * allowed[name] + unit * float(truth[name].abs().max()), name
    assert float(truth["opd_full_divergence"].min()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("parallel", ["none", "vocabulary", "context"])
def test_nemo_distils_the_whole_vocabulary(parallel, kind, dtype):
    results = on_ranks(1 if parallel == "none" else 2, from_logits, kind, dtype, parallel)
    batch, heads, _ = problem(kind, dtype)
    teacher, found = teacher_logits(batch, heads), []
    for at in (dtype, torch.float64):
        leaf = data(dtype)[0].to(at).requires_grad_()
        values = expected(leaf, batch, teacher.to(at))
        upstream(values).backward()
        found.append({name: x.detach() for name, x in values.items()} | {"gradient": leaf.grad})
    grads = [grad for _, grad in results]
    assert all(grad.dtype == dtype for grad in grads)
    if parallel == "context":  # the gradient is of the sum of both ranks' losses
        whole = torch.cat([x.unflatten(1, (2, 2)) for x in grads], 1)[:, [0, 2, 3, 1]]
        grads = [whole.flatten(1, 2)[:, :S] / 2]
    gradient = torch.cat(grads, -1)
    compare([values | {"gradient": gradient} for values, _ in results], *found, dtype)


def from_hidden(group, device, kind, dtype, hidden_grad):
    batch, heads, loss_fn = problem(kind, dtype)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    hidden, weight = (x.to(dtype) for x in head())
    hidden, parts = hidden.transpose(0, 1), ranks if hidden_grad == "reduce_scatter" else 1
    own = hidden.chunk(parts)[rank % parts].contiguous().to(device).requires_grad_()
    rows = cut(weight, group, dim=0).detach().to(device).requires_grad_()
    found = nemo_rl.prepare_opd_full_loss_input_from_hidden_states(
        own,
        rows,
        on_device(batch, device),
        loss_fn,
        vocab_parallel_group=group,
        teacher_output_layer_weight_by_index=own_heads(heads, group, device),
        vocab_size=V,
        linear=Linear(hidden_grad=hidden_grad),
    )
    upstream(found).backward()
    values = {name: value.detach().cpu() for name, value in found.items()}
    return values, own.grad.cpu(), rows.grad.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize(
    ("ranks", "hidden_grad"), [(1, "reduce_scatter"), (2, "reduce_scatter"), (2, "all_reduce")]
)
def test_nemo_distils_hidden_states(ranks, hidden_grad, kind, dtype):
    results = on_ranks(ranks, from_hidden, kind, dtype, hidden_grad)
    batch, heads, _ = problem(kind, dtype)
    teacher, found = teacher_logits(batch, heads), []
    for at in (dtype, torch.float64):
        leaves = [x.to(dtype).to(at).requires_grad_() for x in head()]
        values = expected(projection(*leaves), batch, teacher.to(at))
        upstream(values).backward()
        grads = {"hidden": leaves[0].grad.transpose(0, 1), "weight": leaves[1].grad}
        found.append({name: x.detach() for name, x in values.items()} | grads)
    weight = torch.cat([x for _, _, x in results])
    scattered = hidden_grad == "reduce_scatter"
    whole = [torch.cat([x for _, x, _ in results])] if scattered else [x for _, x, _ in results]
    for hidden in whole:
        grads = {"hidden": hidden, "weight": weight}
        compare([values | grads for values, _, _ in results], *found, dtype)


def test_nemo_needs_no_decomposition_and_no_penalty():
    batch, heads, _ = problem("one head")
    loss_fn = configured(penalty=0, validate_decomposition=False)
    found = [
        nemo_rl.prepare_opd_full_loss_input(
            data()[0], batch, loss_fn, teacher_output_layer_weight_by_index=heads
        ),
        nemo_rl.prepare_opd_full_loss_input_from_hidden_states(
            head()[0].transpose(0, 1),
            head()[1],
            batch,
            loss_fn,
            teacher_output_layer_weight_by_index=heads,
        ),
    ]
    for values in found:
        assert {name for name, x in values.items() if x is not None} == {"opd_full_divergence"}
        assert {"opd_full_entropy", "opd_full_cross_entropy"} < {*values}


def test_nemo_gives_each_sequence_its_own_teacher():
    """Three of them, whose order is not its own inverse."""
    hidden, weight, states = torch.randn(3, S, 5), torch.randn(V, 5), torch.randn(3, S, H_T)
    batch = {"input_ids": torch.zeros(3, S).long(), "teacher_full_hidden_states": states}
    batch["opd_full_teacher_index"] = torch.tensor([1, 2, 0])
    heads = {number: torch.randn(V, H_T) for number in range(3)}
    given = {"teacher_output_layer_weight_by_index": heads}
    logits = hidden @ weight.t()
    found = (
        nemo_rl.prepare_opd_full_loss_input(logits, batch, configured(), **given),
        nemo_rl.prepare_opd_full_loss_input_from_hidden_states(
            hidden.transpose(0, 1), weight, batch, configured(), **given
        ),
    )
    truth = expected(logits.double(), batch, teacher_logits(batch, heads).double())
    for values in found:
        assert max(errors(values, truth).values()) < 1e-4


@pytest.mark.parametrize("form", ["logits", "hidden states"])
def test_nemo_never_has_the_logits_of_a_teacher(form, device):
    # the profiler is slow: few chunks of logits; what hidden states need besides logits has a floor
    tokens, columns = {"logits": 256, "hidden states": 1024}[form], 4096
    logits = 2 * tokens * columns  # bytes in bf16
    options = {"dtype": torch.bfloat16, "device": device}
    batch = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.int64, device=device),
        "teacher_full_hidden_states": torch.randn(1, tokens, 16, **options),
    }
    heads = {0: torch.randn(columns, 16, **options)}
    loss_fn = configured(chunk_size=64, penalty=0)
    if form == "logits":
        x = torch.randn(1, tokens, columns, requires_grad=True, **options)

        def step():
            return nemo_rl.prepare_opd_full_loss_input(
                x, batch, loss_fn, teacher_output_layer_weight_by_index=heads
            )
    else:
        x = torch.randn(tokens, 1, 16, requires_grad=True, **options)
        weight = torch.randn(columns, 16, requires_grad=True, **options)
        linear = Linear(hidden_grad="none", budget=logits // 4)

        def step():
            return nemo_rl.prepare_opd_full_loss_input_from_hidden_states(
                x,
                weight,
                batch,
                loss_fn,
                teacher_output_layer_weight_by_index=heads,
                linear=linear,
            )

    assert largest_allocation(step) < logits / 2
    value = step()["opd_full_divergence"].sum()
    # the gradient of the student's logits, a chunk of two more, numbers per token; or less
    most = 1.5 * logits + 64 * tokens if form == "logits" else logits / 2
    assert largest_allocation(value.backward) < most


def without(batch, name):
    return {key: x for key, x in batch.items() if key != name}


def refused_calls():
    batch, heads, loss_fn = problem("two heads")
    states = batch["teacher_full_hidden_states"]
    logits = {"input_ids": batch["input_ids"], "teacher_full_logits": torch.zeros(B, S, 8)}
    bad = {"teacher_full_hidden_states": states.repeat(1, 2, 1)}
    yield batch, heads, SimpleNamespace(opd_full=None), "configuration opd_full, got None"
    yield batch, heads, configured(divergence="forward_kl"), "'reverse_kl', got 'forward_kl'"
    yield batch, heads, configured("both"), r"one of \['hidden_states', 'logits'\], got 'both'"
    yield batch, heads, configured("logits"), "must have 'teacher_full_logits'"
    yield logits, heads, configured("logits"), "must have the 104 columns .* got 8"
    yield batch, None, loss_fn, "teacher_output_layer_weight_by_index must have"
    yield batch, {0: heads[0][:5]}, loss_fn, r"\[V/P, H_t\] = \[104, 7\], .* got \[5, 7\]"
    yield batch, {0: heads[0]}, loss_fn, r"must be of \[0\], got \[1\]"
    yield without(batch, "opd_full_teacher_index"), heads, loss_fn, "with 2 teachers"
    index = {"opd_full_teacher_index": torch.tensor([0])}
    yield batch | index, heads, loss_fn, r"must be \[B\] = \[2\], got \[1\]"
    yield batch | bad, heads, loss_fn, r"S at most 6, got \[2, 10, 7\]"


@pytest.mark.parametrize(
    ("batch", "heads", "loss_fn", "words"), [pytest.param(*x, id=x[-1]) for x in refused_calls()]
)
def test_nemo_refuses_what_a_teacher_lacks(batch, heads, loss_fn, words):
    given = {"teacher_output_layer_weight_by_index": heads}
    with pytest.raises(ValueError, match=words):
        nemo_rl.prepare_opd_full_loss_input(data()[0], batch, loss_fn, **given)
    hidden, weight = head()
    with pytest.raises(ValueError, match=words):
        nemo_rl.prepare_opd_full_loss_input_from_hidden_states(
            hidden.transpose(0, 1), weight, batch, loss_fn, **given
        )
