"""What Megatron-Core needs to run on CPUs over gloo: it names CUDA in places where it means "this
device"."""

import contextlib
from unittest import mock

import torch


class _CudaToCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        # by its name the optimizers know what they can train
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        return function(*args, **kwargs)


def pretend():
    """For the rest of this process; before the first model is made."""
    from megatron.core.tensor_parallel import random

    # one random state for all ranks: no CUDA states to fork
    random.initialize_rng_tracker(inference_rng_tracker=True)
    # of recomputation
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args, **kwargs: mock.MagicMock()
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.cuda.FloatTensor = torch.FloatTensor
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    _CudaToCpu().__enter__()
