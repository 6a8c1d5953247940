"""Text of this machine as token streams: the standard library's sources, or any folder of text
files."""

import hashlib
import json
import os
import random
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from objective import IGNORE

END = 0  # id of the token after every document
SMALLEST = 1 + 256  # vocabulary size: END and all bytes
SKIP = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "encodings",
}


def documents(folder: str | None, megabytes: float) -> list[str]:
    """Up to `megabytes` of text, one document per file, in an order that depends on the names
    alone."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*" if folder else "*.py"))
    if not folder:
        paths = [path for path in paths if not SKIP & {*path.relative_to(root).parts}]
    random.Random(0).shuffle(paths)
    texts, left = [], int(megabytes * 1e6)
    for path in paths:
        if left <= 0:
            break
        try:
            if not path.is_file():  # a folder, or a pipe or device, which would be waited for
                continue
            with path.open(encoding="utf-8") as file:
                text = file.read(left)
        except (UnicodeDecodeError, OSError):
            continue  # not text
        if text.strip():
            texts.append(text)
            left -= len(text)
    if len(texts) < 20 and left <= 0:
        said = f"the first {len(texts)} text files of {root} have {megabytes:g} MB already"
        raise SystemExit(
            f"{said}; at least 20 files are needed: a larger --corpus-mb, or smaller files "
            "(--corpus DIR)"
        )
    if len(texts) < 20:
        raise SystemExit(
            f"{root} holds {len(texts)} text files; at least 20 are needed (--corpus DIR)"
        )
    return texts


def prepare(cache: Path, folder: str | None, megabytes: float, vocab_size: int) -> Path:
    """Train the tokenizer and write the token streams, once per text and vocabulary size; returns
    their folder."""
    if vocab_size < SMALLEST:
        raise SystemExit(
            f"--vocab must be at least {SMALLEST}, all bytes and the end of a text, got "
            f"{vocab_size}"
        )
    texts = documents(folder, megabytes)
    key = hashlib.sha256(json.dumps([vocab_size, texts]).encode()).hexdigest()[:16]
    final = cache / key
    if final.exists():
        return final
    size = sum(map(len, texts)) / 1e6
    print(f"data: training a tokenizer on {len(texts)} documents, {size:.1f} MB", flush=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise SystemExit(f"this text gives only {found} of {vocab_size} tokens: lower --vocab")
    part = cache / f"{key}.{os.getpid()}.part"
    part.mkdir(parents=True, exist_ok=True)  # of a killed process that had the same id
    ids = [
        [*encoding.ids, END] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    for split, chosen in {
        "validation": ids[::10],
        "train": [x for i, x in enumerate(ids) if i % 10],
    }.items():
        np.save(part / f"{split}.npy", np.concatenate(chosen).astype(np.int32))
    tokenizer.save(str(part / "tokenizer.json"))
    try:
        part.rename(final)
    except OSError:  # another run was faster
        shutil.rmtree(part)
    return final


class Corpus:
    """Batches as a stateless function of (seed, step), so that a resumed run sees exactly what it
    would have seen."""

    def __init__(self, path: Path, length: int):
        self.key, self.length = path.name, length
        self.streams = {}
        for split in ("train", "validation"):
            file = path / f"{split}.npy"
            try:
                stream = self.streams[split] = np.load(file)
            except (OSError, ValueError, EOFError) as error:
                raise SystemExit(f"{file} must be an array of tokens: {error}") from None
            if len(stream) <= length + 1:
                raise SystemExit(
                    f"the {split} text has {len(stream)} tokens, too few for --length {length}"
                )

    def batch(
        self, split: str, rows: int, seed: int, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs, labels [rows, length]. Labels beyond the end of a document, or of a short row,
        are ignored."""
        draw = np.random.default_rng([seed, step])
        stream = self.streams[split]
        starts = draw.integers(0, len(stream) - self.length - 1, rows)
        window = stream[starts[:, None] + np.arange(self.length + 1)].astype(np.int64)
        inputs, labels = window[:, :-1], window[:, 1:].copy()
        # A quarter of the rows are shorter, as samples of a fine-tuning set would be.
        lengths = np.where(
            draw.random(rows) < 0.25, draw.integers(1, self.length + 1, rows), self.length
        )
        ended = np.cumsum(inputs == END, axis=1) > 0
        labels[ended | (np.arange(self.length) >= lengths[:, None])] = IGNORE
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def load(
    ranks, cache: str, folder: str | None, megabytes: float, vocab_size: int, length: int
) -> Corpus:
    """Rank 0 prepares the data; the others wait for its answer."""
    path = ranks.first(lambda: prepare(Path(cache), folder, megabytes, vocab_size))
    with ranks.together():
        return Corpus(path, length)
