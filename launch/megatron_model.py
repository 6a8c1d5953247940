"""A small Megatron-Core GPTModel that needs neither Transformer Engine nor Apex, with its
data-parallel wrapper."""

import torch
import torch.nn.functional as F
from torch import nn

import megatron_graphs


class Attention(nn.Module):
    """Core attention of torch: q, k, v [s, b, heads/P, d] -> [s, b, h/P]."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **kwargs):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.Module):
    """RMS norm of torch, which Megatron's wrapper refuses under sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
        super().__init__()
        self.weight, self.eps = (
            nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)),
            eps,
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def model_of(args, loss: str, graph: str, ranks):
    """Config, GPTModel, and the wrapper that is trained, for a choice of --losses and one of
    --cuda-graph."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    bf16 = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, add_bias_linear=False,
        tensor_model_parallel_size=args.tp, sequence_parallel=args.sequence_parallel, use_cpu_initialization=not bf16,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=bf16, params_dtype=dtype, pipeline_dtype=dtype,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, cross_entropy_loss_fusion=loss in ("stock-fused", "stock-te"),
        cross_entropy_fusion_impl="te" if loss == "stock-te" else "native", deterministic_mode=args.deterministic,
        **({} if graph == "none" else {"cuda_graph_impl": graph}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    block = TransformerBlockSubmodules(layer_specs=[spec] * args.layers, layer_norm=Norm)
    torch.manual_seed(args.seed)
    gpt = GPTModel(
        config=config, transformer_layer_spec=block, vocab_size=args.vocab, max_sequence_length=args.length,
        share_embeddings_and_output_weights=args.tied,
    ).to(ranks.device)  # fmt: skip
    module = Float16Module(config, gpt) if bf16 else gpt
    with torch.cuda.stream(megatron_graphs.capture_stream(graph)):
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
        )
    config.finalize_model_grads_func = finalize_model_grads
    return config, gpt, model
