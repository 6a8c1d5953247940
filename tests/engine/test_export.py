"""torch.export: a loss of frozen tensors is a program; one of tensors that require a gradient is
refused."""

import itertools

import pytest
import torch

import tp_headloss as hl

V, H = 37, 8
KINDS = ("logits", "log_probs", "linear", "head")


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.loss = kind, hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(1e-2)])
        self.weight = torch.nn.Parameter(torch.randn(V, H))
        self.head = hl.VocabParallelHead(H, hl.VocabShard.from_group(None, V), head_loss=self.loss)

    def forward(self, hidden, labels):
        if self.kind == "logits":
            return self.loss(hidden @ self.weight.T, labels).loss
        if self.kind == "log_probs":
            return hl.log_probs(hidden @ self.weight.T, labels).log_prob.mean()
        if self.kind == "linear":
            return self.loss.linear(hidden, self.weight, labels).loss
        return self.head(hidden, labels).loss


def example():
    return torch.randn(4, H), torch.randint(0, V, (4,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_frozen_weights_is_a_program(kind):
    model = Model(kind).requires_grad_(False)
    program = torch.export.export(model, example()).module()
    inputs = example()
    torch.testing.assert_close(program(*inputs), model(*inputs))
    hidden = inputs[0].requires_grad_()
    with pytest.raises(RuntimeError, match="holds the forward of tp_headloss and not its backward"):
        program(hidden, inputs[1])


@pytest.mark.parametrize("kind, strict", list(itertools.product(KINDS, (False, True))))
def test_a_loss_that_requires_a_gradient_is_refused(kind, strict):
    model = Model(kind)
    # torch's own, around ours, if strict
    with pytest.raises(Exception, match=r"model\.requires_grad_\(False\)"):
        torch.export.export(model, example(), strict=strict)
    with torch.no_grad():
        program = torch.export.export(model, example(), strict=strict).module()
        inputs = example()
        torch.testing.assert_close(program(*inputs), model(*inputs))
    with pytest.raises(RuntimeError, match=r"export and run it under torch\.no_grad"):
        program(*inputs)
