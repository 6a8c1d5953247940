"""Defaults of torch for new tensors, which programs set for their own."""

import contextlib

import torch


@contextlib.contextmanager
def torch_defaults(dtype: torch.dtype | None = None, device: str | None = None):
    """Other defaults of torch's for new tensors, within; None leaves one as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device(device) if device else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)
