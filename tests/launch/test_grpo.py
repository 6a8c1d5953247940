"""The GRPO loop, at toy size on CPU: shards and replicas change nothing but rounding, and the
reward rises."""

import json

import pytest
import torch
from launcher import run_script

# 67 ids in shards of 34, one of them padding
TINY = "--device cpu --vocab 67 --pad-to 4 --layers 1 --width 32 --heads 2 --symbols 6"


def run(out, *options, processes):
    run_script("launch/grpo.py", *TINY.split(), *options, "--out", out, ranks=processes)
    assert (out / "grpo.png").stat().st_size > 10_000
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_shards_and_replicas_sample_the_same_answers_and_take_the_same_steps(tmp_path):
    options = (
        "--steps",
        6,
        "--prompts",
        16,
        "--group",
        8,
        "--minibatches",
        2,
        "--refresh",
        2,
        "--lr",
        1e-2,
    )
    alone = run(tmp_path / "alone", *options, processes=1)
    assert len(alone) == 6 and all(row["min_ratio"] < 0.9 < 1.1 < row["max_ratio"] for row in alone)
    assert len({row["reward"] for row in alone}) == 6
    for name, tp in (("shards", 2), ("replicas", 1)):
        rows = run(tmp_path / name, *options, "--tp", tp, processes=2)
        for row, expected in zip(rows, alone, strict=True):
            for key in row.keys() - {"split", "seconds"}:
                # equal answers have equal rewards and token counts, bit for bit but for the order
                # of the sum
                exact = key in ("step", "reward", "exact_match", "tokens")
                close = {"rel": 1e-6} if exact else {"rel": 2e-5, "abs": 2e-6}
                assert row[key] == pytest.approx(expected[key], **close), (name, row["step"], key)


def test_the_reward_rises(tmp_path):
    rows = run(
        tmp_path, "--steps", 40, "--prompts", 16, "--minibatches", 2, "--lr", 5e-3, processes=2
    )
    rewards = torch.tensor([row["reward"] for row in rows])
    first, last = rewards[:5], rewards[-5:]
    noise = torch.cat([first - first.mean(), last - last.mean()]).std()
    assert last.mean() - first.mean() > max(0.15, 6 * noise), rewards


def test_the_sets_of_the_sampler_are_replayed(tmp_path):
    """With them the trainer's log-probs are the sampler's, without them they are not."""
    options = (
        "--steps",
        1,
        "--prompts",
        8,
        "--group",
        4,
        "--minibatches",
        2,
        "--lr",
        1e-2,
        "--top-p",
        0.7,
    )
    (replayed,) = run(tmp_path / "replayed", *options, processes=2)
    (without,) = run(tmp_path / "without", *options, "--no-replay", processes=1)
    assert (
        replayed["reward"] == pytest.approx(without["reward"])
        and replayed["tokens"] == without["tokens"]
    )
    assert replayed["token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    # 1 / 0.7, less what a set's last id is beyond 0.7
    assert without["token_mult_prob_error"] > 1.2
    # 0.03 of an entropy that the truncation makes smaller
    assert replayed["loss"] > without["loss"] + 0.003
