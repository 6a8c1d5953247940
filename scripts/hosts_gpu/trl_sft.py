"""TRL's SFTTrainer on one GPU, or tensor parallel by the model's plan, with its fused head and with `fuse_log_probs`.

torchrun --standalone --nproc-per-node 2 scripts/hosts_gpu/trl_sft.py --json trl.json
"""

import contextlib

import llama
from datasets import Dataset, disable_progress_bars
from measure import OURS, Run, Train, main
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tp_headloss.integrations.trl import fuse_log_probs

disable_progress_bars()
words = Tokenizer(WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))  # rows are ids already
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def build(run: Run, fused: bool) -> Train:
    model = llama.tensor_parallel(run)
    own = model.forward

    def train(rows, steps, meter):
        texts = [{"input_ids": row.tolist()} for step in range(steps) for row in run.rows(rows, step)[:, :-1]]
        config = SFTConfig(**llama.arguments(run, rows, steps), max_length=run.shape.length)
        model.forward = own  # a trainer before this one has replaced it
        trainer = SFTTrainer(
            model, args=config, train_dataset=Dataset.from_list(texts), processing_class=TOKENIZER
        )  # fmt: skip
        with fuse_log_probs(model) if fused else contextlib.nullcontext():
            llama.train(trainer, meter)

    return train


if __name__ == "__main__":
    main("trl", {"TRL": lambda run: build(run, False), OURS: lambda run: build(run, True)})
