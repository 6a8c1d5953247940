"""CUDA graphs of Megatron-Core (0.19): of each transformer layer, "local", or of everything but the
optimizer, "full_iteration"."""

import torch

GRAPHS = ("none", "local", "full_iteration")
# eager steps before "full_iteration" captures one; "local" captures layers after the first step
WARMUP = 3


def seed(seed: int, graph: str) -> None:
    """Seed Megatron's random states, in the form that its graphs need; none of them is drawn from
    without dropout."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(
        seed, use_cudagraphable_rng=graph != "none", force_reset_rng=True
    )


def capture_stream(graph: str):
    """The stream on which the data-parallel wrapper must be made, as in Megatron's trainer:
    autograd runs its hooks there, and a capture sees no other stream. None: any."""
    if graph != "full_iteration":
        return None
    from megatron.core.full_cuda_graph import get_shared_capture_stream

    stream = get_shared_capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def schedule(graph: str):
    """Megatron's function for forward and backward of all micro-batches. With a graph of these, its
    data iterator must give dicts of tensors, and what it returns is overwritten by the next
    step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    function = get_forward_backward_func()
    if graph != "full_iteration":
        return function
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    return FullCudaGraphWrapper(function, cuda_graph_warmup_steps=WARMUP)


def forget(graph: str, model, forward_backward) -> None:
    """Drop the graphs of a model, which Megatron keeps for the whole process."""
    if graph == "local":
        from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

        # Outputs hold the autograd graph, and that the hooks and the model: a cycle that Python's
        # collector cannot see.
        for module in model.modules():
            for runner in getattr(
                getattr(module, "cudagraph_manager", None), "cudagraph_runners", ()
            ):
                runner.fwd_graph = runner.bwd_graph = runner.fwd_graph_outputs = (
                    runner.fwd_graph_output_surface
                ) = None
        delete_cuda_graphs()
        torch.cuda.set_stream(torch.cuda.default_stream())
    elif graph == "full_iteration":
        forward_backward.reset_cuda_graph()
