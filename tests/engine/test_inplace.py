"""inplace=True: the gradient overwrites the logits, and only where it can."""

import pytest
import torch
from logits_problem import rows
from odd_outcome import lay_out

from tp_headloss import HeadLoss, Options, Teacher, vocab_statistics


@pytest.mark.parametrize("calls", [1, 3])  # the third is prepared
@pytest.mark.parametrize("hooks", ["same", "clone", "save_on_cpu"])
def test_inplace_has_one_backward_where_hooks_hide_what_it_wrote(hooks, calls, backend, device):
    graph = torch.autograd.graph
    pairs = {
        "same": lambda: graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "clone": lambda: graph.saved_tensors_hooks(torch.clone, lambda t: t),
        "save_on_cpu": graph.save_on_cpu,
    }
    x, labels = rows(device)
    head = HeadLoss(options=Options(backend=backend, inplace=True))
    leaf = x.clone().requires_grad_()
    for _ in range(calls):
        with pairs[hooks]():
            loss = head(leaf * 1.0, labels).loss
        (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        with pytest.raises(
            RuntimeError, match=r"Options\(inplace=True\) writes .* there is one backward"
        ):
            torch.autograd.grad(loss, leaf)
    (expected,) = torch.autograd.grad(
        HeadLoss(options=Options(backend=backend))(leaf, labels).loss, leaf
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["transposed", "column-strided", "sliced"])
def test_inplace_writes_the_gradient_over_logits_of_any_layout(layout, backend, device):
    x, labels = rows(device)
    grads = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        options, places = Options(backend=backend, inplace=inplace), []
        logits = lay_out(leaf, layout)
        logits.register_hook(lambda grad, places=places: places.append(grad.data_ptr()))
        vocab_statistics(logits, labels, options=options).log_prob.sum().backward()
        assert (places == [logits.data_ptr()]) == inplace
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_inplace_refuses_what_it_cannot_overwrite(device):
    x = torch.zeros(2, 3, 5, 8, device=device)
    labels = torch.zeros(2, 3, 5, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="one row stride"):
        vocab_statistics(x[:, :, 1:3], labels[:, :, 1:3], options=Options(inplace=True))
    flat = torch.zeros(16, device=device)
    for shared in (
        x[0, 0, :1].expand(5, 8),
        x[0, 0, :, :1].expand(5, 8),
        flat.as_strided((5, 8), (1, 1)),
    ):
        with pytest.raises(ValueError, match="share memory"):
            vocab_statistics(shared, labels[0, 0], options=Options(inplace=True))


def test_inplace_refuses_a_teacher_that_would_be_overwritten(backend, device):
    rows, labels = (
        torch.randn(7, 40, device=device),
        torch.zeros(6, dtype=torch.long, device=device),
    )
    options = Options(backend=backend, inplace=True)
    for logits, teacher in (
        (rows[:-1], rows[1:]),
        (rows[1:], rows[:-1]),
        (rows[:6, :8], rows[:6, 4:12]),
    ):
        with pytest.raises(
            ValueError, match="the teacher's must be exactly these or share no memory"
        ):
            vocab_statistics(
                logits, labels, want=("forward_kl",), teacher=Teacher(teacher), options=options
            )
    one = rows[:1].expand(6, 40)
    with pytest.raises(ValueError, match="whose elements do not share memory"):
        vocab_statistics(
            one,
            labels,
            want=("forward_kl",),
            teacher=Teacher(rows[1:2].expand(6, 40)),
            options=options,
        )


@pytest.mark.parametrize(
    "teacher", [(0, slice(8)), (0, slice(8, 16)), (1, slice(8))], ids=["same", "beside", "apart"]
)
def test_inplace_beside_a_teacher_that_is_not_overwritten(teacher, backend, device):
    whole, labels = (
        torch.randn(2, 6, 16, device=device),
        torch.zeros(6, dtype=torch.long, device=device),
    )
    layer, columns = teacher
    grads = []
    for inplace in (False, True):
        own = whole.clone()
        x, given = own[0, :, :8].requires_grad_(), Teacher(own[layer, :, columns].detach())
        options = Options(backend=backend, inplace=inplace)
        stats = vocab_statistics(x, labels, want=("forward_kl",), teacher=given, options=options)
        (grad,) = torch.autograd.grad(stats.forward_kl.sum() + stats.log_prob.sum(), x)
        grads.append(grad.clone())
    assert torch.equal(*grads)


def _log_probs(x, labels, options):
    return vocab_statistics(x, labels, options=options).log_prob.sum()


def _loss(x, labels, options):
    return HeadLoss(options=options)(x, labels).loss


@pytest.mark.parametrize("call", [_log_probs, _loss])
def test_inplace_without_fullgraph_runs_in_eager_and_is_right(call, device):
    """torch.compile breaks the graph where something is refused, and calls it outside of the
    graph."""
    x, labels = rows(device)

    def step(t):
        return call(t * 1.0, labels, Options(inplace=True))

    grads = [torch.autograd.grad(f(t), t)[0] for f in (step, torch.compile(step, backend="eager"))
             for t in [x.clone().requires_grad_()]]  # fmt: skip
    assert torch.equal(*grads)
    torch._dynamo.reset()


@pytest.mark.parametrize("option", ["inplace", "check"])
def test_what_needs_eager_is_refused_under_compile(option, device):
    x, labels = rows(device)
    options = Options(**{option: True})
    compiled = torch.compile(
        lambda t: vocab_statistics(t, labels, options=options).lse, fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match=f"{option}=True is for eager"):
        compiled(x)
