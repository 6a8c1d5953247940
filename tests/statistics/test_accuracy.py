"""Values and gradients against the float64 oracle, within a-priori bounds in units in the last
place."""

import oracle
import pytest
import torch
from known import PLAIN, TRAINED

from tp_headloss import Options, Teacher, Transform, vocab_statistics

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(v, dtype) for v in (1, 17, 1000, 32003, 50257, 65537) for dtype in DTYPES]
SIZES += [(129920, torch.bfloat16), (262144, torch.bfloat16)]
U = 2.0**-24  # fp32 unit roundoff


def make_rows(vocab_size, dtype, device):
    """Rows of increasing difficulty: spread, confident and improbable targets, -inf columns,
    shifts, edges."""
    n = 7 if device == "cpu" else 64
    x = (
        torch.randn(n, vocab_size)
        * torch.tensor([1.0, 3.0, 10.0, 1.0, 1.0, 3.0, 1.0]).repeat(-(-n // 7))[:n, None]
    )
    labels = torch.randint(0, vocab_size, (n,))
    x[3, labels[3]] += 30.0  # margin of about 25 to 30: loss near 1e-12
    x[4, labels[4]] -= 20.0
    x[5] = torch.where(torch.rand(vocab_size) < 0.5, -torch.inf, x[5])
    x[5, labels[5]] = 1.0
    x[6] = (x[6] + 200.0).round()
    labels[0], labels[1] = 0, vocab_size - 1
    some = slice(3, 6) if device == "cpu" and vocab_size > 1e5 else slice(None)
    return x[some].to(dtype).to(device), labels[some].to(device)


def run(x, labels, backend, upstream, transform=None, **kwargs):
    x = x.clone().requires_grad_()
    stats = vocab_statistics(
        x, labels, want=PLAIN, transform=transform, options=Options(backend=backend), **kwargs
    )
    sum((getattr(stats, name) * g.to(x.device)).sum() for name, g in upstream.items()).backward()
    return stats, x.grad


def assert_loss_exact(stats, z, labels):
    truth = oracle.statistics(z, labels.cpu())
    loss, expected = -stats.log_prob.double().cpu(), -truth["log_prob"]
    margin = oracle.margin(z, labels.cpu())
    allowed = 4 + (margin - 8).clamp(0, 200)
    if stats.lse.is_cuda:
        allowed = 8 + margin.clamp(0, 200)
    error = (loss - expected).abs() / oracle.ulp(expected)
    assert (error <= allowed).all(), (error / allowed).max()
    return truth


def assert_gradient_exact(grad, z, labels, expected):
    """The bounds of an fp32 exponential of a rounded difference, then one rounding to the logits'
    dtype."""
    labels, distance = labels.cpu(), (z - z.max(-1, keepdim=True).values).abs()
    slack = (3 * distance + 16) if grad.is_cuda else (distance + 8)
    at = torch.zeros_like(z, dtype=torch.bool).scatter(1, labels[:, None], True)
    slack = torch.where(at, distance + 40, slack)
    error = (grad.double().cpu() - expected).abs()
    # probabilities below 2^-126 count as 0, times an upstream gradient of up to 8
    flushed = 8 * 2.0**-126
    allowed = torch.where(expected == 0, 0.0, slack * U * expected.abs() + flushed)
    if grad.dtype == torch.bfloat16:
        allowed = 0.505 * oracle.ulp(expected, torch.bfloat16) + flushed
        nearest = (error <= 0.5 * oracle.ulp(expected, torch.bfloat16) + flushed).double().mean()
        assert nearest >= 0.999 or error.numel() < 10_000
    if grad.dtype == torch.float16:
        allowed = torch.maximum(
            0.55 * oracle.ulp(expected, torch.float16), torch.tensor(2.0**-25 * 1.1)
        )
    assert (error <= allowed).all(), (error / allowed.clamp(min=2.0**-140)).max()


# 32003 columns are several programs of several tiles: more of them only take longer
@pytest.mark.interpreted_only(vocab_size=(1, 17, 1000, 32003))
@pytest.mark.each_argument
@pytest.mark.parametrize("vocab_size, dtype", SIZES)
def test_cross_entropy_is_exact_to_a_few_ulp(vocab_size, dtype, backend, device):
    x, labels = make_rows(vocab_size, dtype, device)
    upstream = {"log_prob": torch.randn(len(x)) * 2}
    stats, grad = run(x, labels, backend, upstream)
    z, slope = oracle.transform(x)
    truth = assert_loss_exact(stats, z, labels)
    assert_gradient_exact(grad, z, labels, oracle.gradient(z, slope, labels.cpu(), upstream))
    assert torch.equal(stats.argmax.cpu(), truth["argmax"])
    assert torch.equal(stats.target_logit.cpu().double(), truth["target_logit"])
    assert (stats.log_prob <= 0).all()
    assert (
        (stats.lse.double().cpu() - truth["lse"]).abs() <= 4 * oracle.ulp(truth["lse"]) + 1e-6
    ).all()


TRANSFORMS = {
    "plain": {}, "scale": {"scale": 0.7}, "softcap": {"softcap": 5.0}, "temperature": {"temperature": 0.6},
    "temperatures": {"temperature": True}, "all": {"bias": True, "scale": 1.3, "softcap": 4.0, "temperature": True},
}  # fmt: skip


def plain_torch(z, labels, weight):
    """Every statistic with a gradient as one writes it in fp32."""
    log_p = z.log_softmax(-1)
    return {
        "lse": z.logsumexp(-1),
        "log_prob": log_p.gather(1, labels[:, None])[:, 0],
        "target_logit": z.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1),
        "collision": log_p.exp().square().sum(-1),
        "total": (z.masked_fill(z == -torch.inf, 0.0) * weight).sum(-1),
    }


STATISTICS_CASES = [(v, name, dtype) for v in (17, 1000) for name in TRANSFORMS for dtype in DTYPES]
# several tiles to a chunk
STATISTICS_CASES += [(9001, name, torch.float32) for name in ("plain", "all")]


@pytest.mark.each_argument
@pytest.mark.parametrize("vocab_size, name, dtype", STATISTICS_CASES)
def test_every_statistic_and_transformation_is_at_most_twice_as_far_off_as_torch(
    vocab_size, name, dtype, backend, device
):
    """Truth is float64; the yardstick is plain fp32 torch on eight times as many rows, as its
    largest error varies."""
    n, ours = 96, slice(12)
    options = dict(TRANSFORMS[name])
    x = (torch.randn(n, vocab_size) * 3).to(dtype).to(device)
    x[1, vocab_size // 2] = -torch.inf if "softcap" not in options else 0.0
    labels = torch.randint(0, vocab_size, (n,), device=device)
    labels[1] = 0
    if options.get("bias"):
        options["bias"] = torch.randn(vocab_size, device=device)
    if options.get("temperature") is True:
        options["temperature"] = torch.rand(n, device=device) + 0.5
    weight = torch.rand(vocab_size, device=device)
    upstream = {key: torch.randn(n) for key in TRAINED}
    temperature = options.get("temperature", 1.0)
    own = {"temperature": temperature[ours]} if isinstance(temperature, torch.Tensor) else {}
    some = {key: g[ours] for key, g in upstream.items()}
    stats, grad = run(
        x[ours], labels[ours], backend, some, Transform(**options | own), total_weight=weight
    )
    z, slope = oracle.transform(x, **options)
    truth = oracle.statistics(z, labels.cpu(), weight)
    expected = oracle.gradient(z, slope, labels.cpu(), upstream, weight)

    plain = x.float().clone().requires_grad_()
    zt = plain if options.get("bias") is None else plain + options["bias"]
    zt = zt * options.get("scale", 1.0)
    zt = options["softcap"] * torch.tanh(zt / options["softcap"]) if "softcap" in options else zt
    zt = zt / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    values = plain_torch(zt, labels, weight)
    missing = [key for key in TRAINED if key not in values]
    assert not missing, f"no formula of {missing} in `plain_torch`"
    sum((values[key] * g.to(device)).sum() for key, g in upstream.items()).backward()
    # a GPU's exponential of a rounded product: an allowance that follows from the distance to the
    # maximum
    distance = (z - z.max(-1, keepdim=True).values).abs()
    gpu = (3 * distance[distance < torch.inf].max() + 16) * U if device == "cuda" else 0.0
    for key in TRAINED:
        error = (getattr(stats, key).double().cpu() - truth[key][ours]).abs().max()
        theirs = (values[key].double().cpu() - truth[key]).abs().max()
        assert error <= 2 * theirs + 4 * oracle.ulp(truth[key].abs().max()) + gpu, (
            key,
            error,
            theirs,
        )
    theirs = (plain.grad.to(dtype).double().cpu() - expected).abs().max()
    error = (grad.double().cpu() - expected[ours]).abs().max()
    largest = expected.abs().max()
    assert error <= 2 * theirs + oracle.ulp(largest) + gpu * largest, (error, theirs)
    assert torch.equal(stats.argmax.cpu(), truth["argmax"][ours])


@pytest.mark.parametrize("label", [7, 600, 3000, -100])
def test_the_lowest_id_wins_a_tie_whichever_tile_is_read_last(label, options, device):
    """Two tiles to a chunk; the one that holds the label is read after the other."""
    x = torch.zeros(1, 8192, device=device)
    x[0, [5, 600, 1500]] = 3.0
    stats = vocab_statistics(
        x, torch.tensor([label], device=device), want=("argmax",), options=options
    )
    assert stats.argmax.item() == (5 if label >= 0 else -1)
    assert not stats.correct.item()


@pytest.mark.parametrize("apart", [0.0, 60.0, 2000.0])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_a_kl_between_logits_that_lie_apart(divergence, apart, options, device):
    """docs/theory.md: off by up to twice the distance, in units of roundoff."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, 16, 500, generator=generator)
    student, teacher = student + apart / 2, teacher - apart / 2
    x = student.clone().to(device).requires_grad_()
    stats = vocab_statistics(
        x,
        torch.zeros(16, dtype=torch.int64, device=device),
        want=(divergence,),
        teacher=Teacher(teacher.to(device)),
        options=options,
    )
    found = getattr(stats, divergence)
    found.sum().backward()
    z = student.double().requires_grad_()
    log_p, log_q = z.log_softmax(-1), teacher.double().log_softmax(-1)
    if divergence == "forward_kl":
        log_p, log_q = log_q, log_p
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected.sum().backward()
    error = (x.grad.double().cpu() - z.grad).abs().amax() / z.grad.abs().amax()
    allowed = (2 * apart + 100) * U
    assert error < allowed
    assert (found.double().cpu() - expected).abs().max() < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softcaps_gradient_of_rows_that_need_several_programs(dtype, options, device):
    """A program has eight tiles of 512, the last one fewer; the second row is ignored."""
    x = (2 * torch.randn(3, 9999, generator=torch.Generator().manual_seed(5))).to(dtype)
    x[:, ::1111] = 9.0
    labels = torch.tensor([4095, -100, 9998])
    local = x.clone().to(device).requires_grad_()
    stats = vocab_statistics(
        local, labels.to(device), transform=Transform(softcap=10.0), options=options
    )
    stats.log_prob.sum().backward()
    z, slope = oracle.transform(x, softcap=10.0)
    truth = oracle.gradient(z, slope, labels.clamp(min=0), {"log_prob": (labels >= 0).double()})
    assert local.grad is not None
    rtol = 2e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(local.grad.double().cpu(), truth, rtol=rtol, atol=1e-30)
