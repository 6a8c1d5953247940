"""A linear head under torch.compile, and its operators."""

import pytest
import torch
from linear_problem import N, relative, tensors, terms

from tp_headloss import HeadLoss, Linear, linear_vocab_statistics, topk_log_probs
from tp_headloss.engine.request import TeacherOperands, Tensors
from tp_headloss.linear_head.autograd import LinearFacts


def test_torch_compile_sees_one_graph(device):
    """Of operands in any layout, and of any number of tokens."""
    hidden, weight, bias, labels, _ = (x.to(device) for x in tensors())
    weight = weight.t().contiguous().t()
    head = HeadLoss(terms())

    def loss_of(hidden, weight, bias):
        return head.linear(hidden, weight, labels, bias=bias).loss

    results = []
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        operands = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        loss = function(*operands)
        results.append((loss, *torch.autograd.grad(loss, operands)))
    for a, b in zip(*results):
        assert relative(a, b) < 1e-6
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    statistics = torch.compile(linear_vocab_statistics, fullgraph=True, backend=counted)
    for tokens in (4, 9, 17, 31, 40):
        lse = statistics(hidden[:tokens].detach(), weight, labels[:tokens]).lse
        torch.testing.assert_close(
            lse, linear_vocab_statistics(hidden[:tokens], weight, labels[:tokens]).lse
        )
    assert len(graphs) <= 2


def test_what_is_for_eager_breaks_the_graph_and_says_so(device):
    hidden, weight, _, labels, _ = (
        x.to(device).requires_grad_(x.is_floating_point()) for x in tensors()
    )
    one_sweep = Linear("one_sweep")
    for reason, function in (
        (
            "mode='one_sweep' is for",
            lambda x: HeadLoss().linear(2 * x, weight, labels, linear=one_sweep).loss,
        ),
        ("it looks for its backend", lambda x: topk_log_probs(2 * x, 3, weight=weight).log_probs),
    ):
        torch.testing.assert_close(
            torch.compile(function, backend="aot_eager")(hidden), function(hidden)
        )
        torch._dynamo.reset()  # it knows the frame
        with pytest.raises(Exception, match=reason):
            torch.compile(function, backend="aot_eager", fullgraph=True)(hidden)


def test_operators_are_registered_consistently(device):
    hidden, weight, bias, labels, _ = (x.to(device) for x in tensors())
    hidden = hidden.t().contiguous().t()
    stats = linear_vocab_statistics(
        hidden.requires_grad_(), weight, labels, bias=bias, want=("entropy",)
    )
    node = stats.lse.grad_fn
    inputs, no_teacher = (
        (labels, bias, *[None] * (len(Tensors._fields) - 3)),
        TeacherOperands(),
    )
    facts = [list(x) if isinstance(x, tuple) else x for x in node.request.facts]
    fixed = (*no_teacher, *facts, *LinearFacts(*node.linear))
    checks, operators = {"test_utils": ("test_schema", "test_faketensor")}, torch.ops.tp_headloss
    hidden = hidden.detach()
    torch.library.opcheck(
        operators.linear_statistics.default, (hidden, weight, *inputs, *fixed), **checks
    )
    merged = operators.linear_statistics(hidden, weight, *inputs, *fixed)[0]
    grads = [
        torch.randn(N, device=device) if name in ("lse", "entropy") else None
        for name in node.request.layout.gradients
    ]
    for wanted in ([True, True, True], [False, True, False]):
        args = (hidden, weight, *inputs, merged, grads, wanted, *fixed)
        torch.library.opcheck(operators.linear_gradient.default, args, **checks)
