"""Every kernel on small shapes, forward and backward: what compute-sanitizer, hundreds of times
slower, can watch.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python
scripts/bench/small_shapes.py

Without torch's own allocator in between, an access beyond a tensor is one beyond an allocation. On
a CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1). `--plant memcheck` (racecheck,
initcheck) runs a wrong kernel instead, to see that the tool is watching.
"""

import argparse

import torch
import triton
import triton.language as tl

import tp_headloss as hl
from tp_headloss.engine.ways.one_read import CAPABILITY

TRITON = hl.Options(backend="triton")
KL = "forward_kl", "reverse_kl"
OF_TEACHER = [
    [hl.Distillation(1.0, d) for d in KL],
    [hl.Distillation(1.0, d) for d in ("jsd", "total_variation")],
]
OF_ENTRIES = [
    [hl.TopKDistillation(1.0, d, support) for d in (*KL, "jsd")]
    for support in ("topk", "vocabulary")
]
TAIL = [hl.TopKDistillation(1.0, d, "tail") for d in KL]


def statistics(logits, labels):
    bias = torch.randn(logits.shape[1], device=logits.device, requires_grad=True)
    temperature = torch.rand(len(logits), device=logits.device) + 0.5
    for transform in (None, hl.Transform(bias, 1.5, 30.0, temperature), hl.Transform(softcap=20.0)):
        for want in ((), ("entropy", "total", "argmax")):
            for given in (labels, None):
                stats = hl.vocab_statistics(
                    logits, given, want=want, transform=transform, options=TRITON
                )
                values = stats.lse, stats.log_prob, stats.entropy, stats.total
                sum(x.sum() for x in values if x is not None).backward()
    for part in (logits[:, ::3], logits.T.contiguous().T, logits[1:, 7:]):
        hl.vocab_statistics(
            part, labels[-len(part) :] % part.shape[1], options=TRITON
        ).log_prob.sum().backward()


def losses(logits, labels, teacher, k):
    terms = [hl.CrossEntropy(label_smoothing=0.1), hl.ZLoss(1e-4), hl.Entropy(0.1)]
    hl.HeadLoss(terms, metrics=("accuracy",), options=TRITON)(logits, labels).loss.backward()
    hl.HeadLoss(options=hl.Options("triton", inplace=True))(logits * 1, labels).loss.backward()
    exported = hl.topk_log_probs(teacher, k, options=TRITON)
    entries = hl.TopKTeacher(exported.ids, exported.log_probs, temperature=2.0)
    known = hl.TopKTeacher(exported.ids, exported.log_probs, renormalize=False)
    given = [(terms, hl.Teacher(teacher, temperature=2.0)) for terms in OF_TEACHER]
    for terms, teacher in (*given, *((terms, entries) for terms in OF_ENTRIES), (TAIL, known)):
        hl.HeadLoss(terms, options=TRITON)(
            logits, labels, inputs={"teacher": teacher}
        ).loss.backward()


def given_ids(logits, labels, k):
    ids = torch.randint(logits.shape[1], (len(labels), k), device=logits.device)
    want = "log_probs_at", "rank", "collision"
    stats = hl.vocab_statistics(logits, labels, want=want, ids=ids, options=TRITON)
    (stats.log_probs_at.sum() + stats.lse.sum() + stats.collision.sum()).backward()


def samples(logits):
    for rule in (None, hl.SamplingRule(top_p=0.5)):
        hl.sample(
            logits,
            seed=0,
            positions=torch.arange(len(logits), device=logits.device),
            rule=rule,
            options=TRITON,
        )


def linear(labels, width, dtype, hidden=32):
    states = torch.randn(len(labels), hidden, device=labels.device, dtype=dtype).requires_grad_()
    weight = torch.randn(width, hidden, device=labels.device, dtype=dtype).requires_grad_()
    ways = [
        hl.Linear("recompute"),
        hl.Linear("one_sweep", upstream=1.0),
        hl.Linear(exact_logits=True),
    ]
    if dtype == torch.bfloat16:
        ways += [hl.Linear(gradients="fp8"), hl.Linear(gradients="fp8", exact_logits=True)]
    for how in ways:
        hl.HeadLoss(options=TRITON).linear(states, weight, labels, linear=how).loss.backward()


def teacher_beside(logits, temperature):
    return {"teacher": hl.Teacher(torch.randn_like(logits.detach()), temperature)}


def one_read(labels, rounds):
    """rounds: of packets, at most."""
    temperatures = torch.rand(len(labels), device=labels.device) + 0.5
    policy = {"advantages": labels.sign().float(), "old_log_prob": -labels.float() / 100}
    for width, dtype in (
        (1000, torch.bfloat16),
        (50304, torch.bfloat16),
        (1000, torch.float32),
    ):
        logits = torch.randn(len(labels), width, device=labels.device, dtype=dtype).requires_grad_()
        mixed = [
            ([hl.Distillation(1.0, "jsd")], ("accuracy",), teacher_beside(logits, 2.0)),
            ([hl.Distillation(1.0, "total_variation")], (), teacher_beside(logits, 1.0)),
        ]
        for terms, metrics, inputs in (
            ([hl.CrossEntropy(), hl.ZLoss(1e-4)], (), None),
            ([hl.CrossEntropy(), hl.Entropy(0.1)], ("accuracy",), None),
            ([hl.PolicyGradient(), hl.Entropy(0.1)], ("accuracy",), policy),
            ([hl.CrossEntropy(label_smoothing=0.1)], ("accuracy", "entropy"), None),
            ([hl.CrossEntropy(), hl.Distillation()], (), teacher_beside(logits, 1.0)),
            (OF_TEACHER[0], ("accuracy",), teacher_beside(logits.float(), 2.0)),
            *(mixed if rounds > 1 else []),
        ):
            head = hl.HeadLoss(
                terms, metrics=metrics, options=hl.Options("triton", gradient="forward")
            )
            for transform in (None, hl.Transform(softcap=9.0, temperature=temperatures)):
                head(logits, labels, transform=transform, inputs=inputs).loss.backward()
        entries = hl.topk_log_probs(torch.randn_like(logits.detach()), 40, options=TRITON)
        teacher = hl.TopKTeacher(entries.ids, entries.log_probs, renormalize=False)
        terms = [
            hl.CrossEntropy(),
            *(hl.TopKDistillation(support=x, name=x) for x in ("topk", "tail")),
        ]
        head = hl.HeadLoss(
            terms, metrics=("accuracy",), options=hl.Options("triton", gradient="forward")
        )
        for transform in (None, hl.Transform(softcap=9.0)):
            given = {"transform": transform, "inputs": {"teacher": teacher}}
            head(logits, labels, **given).loss.backward()


@triton.jit
def write_beyond_kernel(x_ptr, n):
    tl.store(x_ptr + n + tl.arange(0, 128), 1.0)


@triton.jit
def race_kernel(x_ptr):
    """Without the barriers that Triton would put between, were it not inline assembly."""
    at = tl.arange(0, 128)
    shared = tl.inline_asm_elementwise(
        """
        { .shared .align 4 .b32 slot[1]; .reg .b32 a; mov.u32 a, slot;
        st.volatile.shared.b32 [a], $1; ld.volatile.shared.b32 $0, [a]; }
        """,
        "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(x_ptr + at, shared)


def plant(tool: str):
    x = torch.zeros(128, device="cuda", dtype=torch.int32)
    if tool == "memcheck":
        write_beyond_kernel[(1,)](x, 1 << 20)
    elif tool == "initcheck":
        torch.empty(1 << 20, device="cuda").sum()
    else:
        race_kernel[(1,)](x)
    torch.cuda.synchronize()
    print("the planted bug ran")


def main(rounds, width=1003, k=6):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # an ignored one, and a bad one
    labels = torch.tensor([0, width - 1, -100, 500, width], device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.randn(len(labels), width, device=device, dtype=dtype).requires_grad_()
        statistics(logits, labels)
        losses(logits, labels, torch.randn_like(logits), k)
        given_ids(logits, labels, k)
        samples(logits)
        linear(labels, width, dtype)
    if device == "cuda":
        if torch.cuda.get_device_capability() == CAPABILITY:
            one_read(labels, rounds)
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--plant", choices=("memcheck", "racecheck", "initcheck"))
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="of packets in one read, at most (default 2); racecheck is wrong about a second one, "
        "see docs/one_read.md",
    )
    args = parser.parse_args()
    plant(args.plant) if args.plant else main(args.rounds)
