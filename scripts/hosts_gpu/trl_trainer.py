"""TRL's SFTTrainer, or with --ways GRPO its GRPOTrainer, on one GPU or tensor parallel by the
model's plan, with TRL's fused head and with `fuse_log_probs`. GRPO trains on 8 samples for each
row, of an eighth of its tokens: half are a prompt, half generated; its curve is the policy's
entropy.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/trl_trainer.py --json trl.json
python scripts/hosts_gpu/trl_trainer.py --ways GRPO --json trl_grpo.json
"""

import contextlib

import llama
from datasets import Dataset, disable_progress_bars
from measure import OURS, Run, Train, main
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tp_headloss.integrations.trl import fuse_log_probs

disable_progress_bars()
SAMPLES = 8


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Its words are the ids themselves."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {str(n): n for n in range(3, vocab)}
    found = Tokenizer(WordLevel(words, unk_token="<pad>"))
    found.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def reward(completion_ids, **_) -> list[float]:
    """The share of even ids."""
    return [sum(n % 2 == 0 for n in ids) / len(ids) for ids in completion_ids]


def sft(run: Run, model, rows: int, steps: int) -> SFTTrainer:
    texts = [
        {"input_ids": row.tolist()} for step in range(steps) for row in run.rows(rows, step)[:, :-1]
    ]
    config = SFTConfig(**llama.arguments(run, rows, steps), max_length=run.shape.length)
    return SFTTrainer(
        model, config, train_dataset=Dataset.from_list(texts), processing_class=run.tokenizer
    )


def grpo(run: Run, model, rows: int, steps: int) -> GRPOTrainer:
    half = run.shape.length // SAMPLES // 2
    prompts = [run.rows(rows, step)[:, :half].tolist() for step in range(steps)]
    texts = [{"prompt": " ".join(map(str, row))} for step in prompts for row in step]
    config = GRPOConfig(
        **llama.arguments(run, rows * SAMPLES, steps), num_generations=SAMPLES, max_completion_length=half,
        generation_kwargs={"use_cache": True, "min_new_tokens": half},
    )  # fmt: skip
    return GRPOTrainer(
        model, reward, config, Dataset.from_list(texts), processing_class=run.tokenizer
    )


def build(run: Run, fused: bool) -> Train:
    model, make = llama.tensor_parallel(run), grpo if run.args.ways else sft
    own, run.tokenizer = model.forward, tokenizer(run.shape.vocab)

    def train(rows, steps, meter):
        model.forward = own  # a trainer before this one has replaced it
        trainer = make(run, model, rows, steps)
        with fuse_log_probs(model) if fused else contextlib.nullcontext():
            llama.train(trainer, meter, "entropy" if run.args.ways else "loss")

    return train


if __name__ == "__main__":
    main(
        "trl",
        {"TRL": lambda run: build(run, False), OURS: lambda run: build(run, True)},
        ways=["GRPO"],
    )
