"""The kernels' tanh and its slope, to a few ulp and with bits of each element that those beside it
do not change, and their maximum of a tile."""

import oracle
import pytest
import torch
import triton
import triton.language as tl

from tp_headloss.statistics import numerics_triton
from tp_headloss.statistics.numerics_triton import largest, tanh_and_slope

BLOCK = 256


@triton.jit
def tanh_kernel(tanh_ptr, slope_ptr, a_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tanh, slope = tanh_and_slope(tl.load(a_ptr + i))
    tl.store(tanh_ptr + i, tanh)
    tl.store(slope_ptr + i, slope)


def kernels(a):
    """tanh(a) and 1 - tanh(a)^2 of whole blocks."""
    tanh, slope = torch.empty_like(a), torch.empty_like(a)
    tanh_kernel[(len(a) // BLOCK,)](tanh, slope, a, BLOCK)
    return tanh, slope


def test_tanh_and_its_slope_are_right_to_a_few_ulp(device):
    a = torch.cat([torch.linspace(-40, 40, 8 * BLOCK), torch.linspace(-0.6, 0.6, 8 * BLOCK)]).to(
        device
    )
    tanh, slope = (x.double().cpu() for x in kernels(a))
    a = a.double().cpu()
    assert ((tanh - a.tanh()).abs() <= 3 * oracle.ulp(a.tanh())).all()
    true = a.cosh() ** -2
    assert ((slope - true).abs() <= 4 * (1 + a.abs()) * oracle.ulp(true)).all()


def test_special_values(device):
    special = torch.tensor(
        [0.0, -0.0, 1e-30, torch.inf, -torch.inf, torch.nan, 100.0, -100.0], device=device
    )
    tanh, slope = kernels(torch.nn.functional.pad(special, (0, BLOCK - len(special))))
    assert torch.equal(tanh[:5].cpu(), torch.tensor([0.0, 0.0, 1e-30, 1.0, -1.0]))
    assert tanh[5].isnan() and slope[5].isnan() and tanh[6:8].tolist() == [1.0, -1.0]
    assert slope[:5].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0] and slope[6:8].tolist() == [0.0, 0.0]
    assert (slope[8:] == 1).all() and (tanh[8:] == 0).all()


@pytest.mark.parametrize("beside", [0.551, 0.58, 30.0, torch.inf, torch.nan])
def test_no_element_changes_the_bits_of_another(beside, device):
    a = torch.linspace(-0.5499, 0.5499, BLOCK, device=device)
    alone = kernels(a)
    a[-1] = beside
    for x, with_others in zip(alone, kernels(a)):
        assert torch.equal(x[:-1], with_others[:-1])
    a[0] = 0.57  # of which the element beside it decides nothing, either
    mixed = kernels(a)
    a[-1] = 0.1
    assert all(torch.equal(x[:-1], y[:-1]) for x, y in zip(mixed, kernels(a)))


@triton.jit
def largest_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, largest(tl.load(x_ptr + row * BLOCK + tl.arange(0, BLOCK)), 16))


@pytest.mark.parametrize("block", [128, 512])
def test_the_largest_of_a_tile_whose_order_is_that_of_integers(block, device, monkeypatch):
    if device == "cpu":  # which takes the other way
        monkeypatch.setattr(numerics_triton, "PTX", tl.constexpr(True))
    x = 4 * torch.randn(12, block, generator=torch.Generator().manual_seed(3))
    x[1] = -x[1].abs()
    x[2], x[3], x[4, 7], x[5] = -torch.inf, 0.0, torch.inf, 1e-40
    x[6, ::2], x[7, 1:] = torch.nan, torch.nan  # which are left out, as tl.max does
    x[8] = -torch.arange(block) * 1e-38
    x[8, 0] = -torch.inf
    out = torch.empty(12, device=device)
    largest_kernel[(12,)](out, x.to(device), block)
    assert torch.equal(out.cpu(), x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1))
