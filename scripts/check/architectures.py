"""fuse_head on a tiny model of every causal architecture that transformers knows: right, refused,
or wrong.

    .hosts/transformers-5.24.0/bin/python scripts/check/architectures.py [NAME...]

A line each: the error of loss and gradients against the model's own, or what was said. The exit
status is 1 if a result was wrong, or an error was neither ValueError nor TypeError.
"""

import collections
import contextlib
import os
import sys
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tp_headloss.integrations.transformers import fuse_head

SMALL = {  # sizes by the names that configurations give them
    32: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim",
    64: "intermediate_size ffn_dim n_inner d_ff ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size "
    "encoder_ffn_dim decoder_ffn_dim max_position_embeddings n_positions intermediate_size_mlp "
    "mlp_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads n_kv_heads "
    "num_experts_per_tok moe_topk",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts",
    8: "head_dim attention_head_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    128: "vocab_size unpadded_vocab_size",
}
LARGEST = 30_000_000  # parameters; a configuration whose sizes have other names is left out


def small_config(kind):
    config = kind()
    layers = {
        getattr(config, name, None)
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    }
    for size, names in SMALL.items():
        for name in names.split():
            if getattr(config, name, None) is not None:
                with contextlib.suppress(Exception):
                    setattr(config, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, 1)
    given = {name: value for name, value in config.to_dict().items() if name != "model_type"}
    # lists with an item for each layer are made anew for two
    return kind(
        **{name: x for name, x in given.items() if not (isinstance(x, list) and len(x) in layers)}
    )


def outcome(config_name: str) -> tuple[str, str]:
    """-> "right", "refused", "wrong" or "not made", and a number or the message."""
    try:
        config = small_config(getattr(transformers, config_name))
        with torch.device("meta"):
            if AutoModelForCausalLM.from_config(config).num_parameters() > LARGEST:
                return "not made", "its sizes have other names"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.randint(3, 128, (2, 12))
        own = model(input_ids=ids, labels=ids).loss
        own.backward()
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    try:
        with fuse_head(model):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    except (ValueError, TypeError) as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    errors = [float(abs(loss - own) / own)]
    largest = max(float(grad.norm()) for grad in expected if grad is not None)
    # those of keys' biases are 0, up to rounding
    for p, grad in zip(model.parameters(), expected, strict=True):
        if grad is not None:
            ours = torch.zeros_like(p) if p.grad is None else p.grad
            errors.append(float((ours - grad).norm() / grad.norm().clamp(min=1e-5 * largest)))
    return ("right" if max(errors) < 1e-4 else "wrong"), f"{max(errors):.0e}"


def main():
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    counts: collections.Counter[str] = collections.Counter()
    for name in names:
        kind, said = outcome(configs[name])
        counts[kind] += 1
        print(f"{name}: {kind}: {' '.join(said.split())[:160]}", flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {dict(counts)}")
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
