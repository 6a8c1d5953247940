"""Every kernel on small shapes, forward and backward: what compute-sanitizer, hundreds of times slower, can watch.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python scripts/small_shapes.py

Without torch's own allocator in between, an access beyond a tensor is one beyond an allocation. On a CPU the kernels
run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch

from tp_headloss import (
    CrossEntropy,
    Distillation,
    Entropy,
    HeadLoss,
    Linear,
    Options,
    Teacher,
    TopKDistillation,
    TopKTeacher,
    Transform,
    ZLoss,
    topk_log_probs,
    vocab_statistics,
)

TRITON = Options(backend="triton")
KL = "forward_kl", "reverse_kl"
OF_TEACHER = [[Distillation(1.0, d) for d in KL], [Distillation(1.0, d) for d in ("jsd", "total_variation")]]
OF_ENTRIES = [[TopKDistillation(1.0, d, over) for d in (*KL, "jsd")] for over in ("topk", "vocabulary")]
TAIL = [TopKDistillation(1.0, d, "tail") for d in KL]


def statistics(logits, labels):
    bias = torch.randn(logits.shape[1], device=logits.device, requires_grad=True)
    temperature = torch.rand(len(logits), device=logits.device) + 0.5
    for transform in (None, Transform(bias, 1.5, 30.0, temperature), Transform(softcap=20.0)):
        for want in ((), ("entropy", "total", "argmax")):
            for given in (labels, None):
                stats = vocab_statistics(logits, given, want=want, transform=transform, options=TRITON)
                values = stats.lse, stats.log_prob, stats.entropy, stats.total
                sum(x.sum() for x in values if x is not None).backward()
    for part in (logits[:, ::3], logits.T.contiguous().T, logits[1:, 7:]):
        vocab_statistics(part, labels[-len(part) :] % part.shape[1], options=TRITON).log_prob.sum().backward()


def losses(logits, labels, teacher, k):
    terms = [CrossEntropy(label_smoothing=0.1), ZLoss(1e-4), Entropy(0.1)]
    HeadLoss(terms, metrics=("accuracy",), options=TRITON)(logits, labels).loss.backward()
    HeadLoss(options=Options("triton", inplace=True))(logits * 1, labels).loss.backward()
    exported = topk_log_probs(teacher, k, options=TRITON)
    entries = TopKTeacher(exported.ids, exported.log_probs, temperature=2.0)
    known = TopKTeacher(exported.ids, exported.log_probs, renormalize=False)
    given = [(terms, Teacher(teacher, temperature=2.0)) for terms in OF_TEACHER]
    for terms, teacher in (*given, *((terms, entries) for terms in OF_ENTRIES), (TAIL, known)):
        HeadLoss(terms, options=TRITON)(logits, labels, inputs={"teacher": teacher}).loss.backward()


def linear(labels, width, dtype, hidden=32):
    states = torch.randn(len(labels), hidden, device=labels.device, dtype=dtype).requires_grad_()
    weight = torch.randn(width, hidden, device=labels.device, dtype=dtype).requires_grad_()
    for mode in ("recompute", "one_sweep"):
        how = Linear(mode, upstream=1.0 if mode == "one_sweep" else None)
        HeadLoss(options=TRITON).linear(states, weight, labels, linear=how).loss.backward()


def main(width=1003, k=6):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = torch.tensor([0, width - 1, -100, 500, width], device=device)  # an ignored one, and a bad one
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.randn(len(labels), width, device=device, dtype=dtype).requires_grad_()
        statistics(logits, labels)
        losses(logits, labels, torch.randn_like(logits), k)
        linear(labels, width, dtype)
    if device == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
