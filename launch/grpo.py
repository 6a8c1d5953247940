"""Train a small policy by GRPO (arXiv:2402.03300), from random weights, to reverse a string; the
vocabulary is sharded.

torchrun --standalone --nproc-per-node 2 launch/grpo.py             # 2 shards
torchrun --standalone --nproc-per-node 4 launch/grpo.py --tp 2      # 2 replicas of 2 shards
python launch/grpo.py                                               # one process, unsharded

All of them draw the same prompts and the same noise, so they differ by rounding only. Logits are
never gathered over the vocabulary: sampling, the old and the reference log-probs and the loss
exchange a few numbers per token.

With --top-p or --top-k the sampler keeps some ids of each token, and all log-probs are renormalised
over them, so that the policy that is trained is the one that was sampled. --no-replay leaves that
out; "token_mult_prob_error", 1 without mismatch, then shows how far the trainer's log-probs are
from the sampler's.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS

import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel
from model import Transformer
from options import at_least, check_multiple, non_negative_float, parser_of, positive_int
from record import refuse_older_run
from tp_headloss import (
    Entropy,
    GeneratorMetrics,
    HeadLoss,
    HeadLossOutput,
    IdSets,
    KLToReference,
    PolicyGradient,
    PolicyMetrics,
    SamplingRule,
    Sequences,
    VocabShard,
    clip_grad_norm_,
    combine_metrics,
    mean_metrics,
    reduce_metrics,
    sample,
)

END, BLANK, ANSWER, FIRST_SYMBOL = range(4)  # ids of the vocabulary
IGNORE = -100
# DAPO's (arXiv:2503.14476): the higher upper bound keeps the entropy from collapsing early
CLIP = (0.2, 0.28)
# accuracy: the sampled id is the likeliest one; token_mult_prob_error: mean exp |trainer's -
# sampler's log-prob|
TOKEN_MEANS = ("kl_reference", "entropy", "clip_fraction", "accuracy", "token_mult_prob_error")
SHOWN = (
    "reward",
    "exact_match",
    "kl_reference",
    "entropy",
    "clip_fraction",
    "token_mult_prob_error",
    "seconds",
)


def parse() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        tp=None,
        vocab=101,
        pad_to=128,
        layers=2,
        width=64,
        heads=4,
        steps=250,
        lr=1e-3,
        clip=1.0,
        seed=0,
    )
    add = parser.add_argument
    add("--out", default="runs/grpo", help="folder of the run")
    add("--overwrite", action="store_true", help="replace an older run in --out")
    add(
        "--symbols",
        type=positive_int,
        default=10,
        help="ids that occur in strings, spread over the vocabulary",
    )
    add("--shortest", type=positive_int, default=2, help="symbols in the shortest string")
    add("--longest", type=positive_int, default=3, help="symbols in the longest string")
    add("--prompts", type=positive_int, default=64, help="prompts per step, over all replicas")
    add(
        "--group",
        type=at_least(int, 2),
        default=16,
        help="samples per prompt, which an advantage compares",
    )
    add(
        "--minibatches",
        type=positive_int,
        default=4,
        help="updates per step, each on its part of the rollouts",
    )
    add("--kl-weight", type=non_negative_float, default=0.01)
    add("--entropy-weight", type=non_negative_float, default=0.03)
    add(
        "--refresh",
        type=positive_int,
        default=20,
        help="every so many steps the policy becomes the new reference",
    )
    add(
        "--top-k", type=positive_int, help="ids that the sampler keeps of each token (default: all)"
    )
    add(
        "--top-p",
        type=at_least(float, 0, maximum=1, above=True),
        help="their share of probability (default: 1)",
    )
    add(
        "--no-replay",
        action="store_true",
        help="train over the whole vocabulary, whatever the sampler kept",
    )
    args = parser.parse_args()
    check_multiple(parser, "--width", args.width, 2 * args.heads, "2 x --heads")
    if args.shortest > args.longest:
        parser.error(
            f"argument --shortest: must be at most --longest = {args.longest}, got {args.shortest}"
        )
    if args.vocab < (smallest := args.symbols + FIRST_SYMBOL):
        parser.error(
            f"argument --vocab: must be at least --symbols + {FIRST_SYMBOL} = {smallest}, got {args.vocab}"
        )
    return args


def until_end(ids: torch.Tensor) -> torch.Tensor:
    """ids [.., T] -> bool: up to the first END, that one included."""
    end = ids == END
    return end.cumsum(-1) <= end


class Reversal:
    """Prompt: symbols, blanks up to the longest string, ANSWER. Right answer: the symbols in
    reverse order, END."""

    def __init__(self, args):
        self.shortest, self.longest = args.shortest, args.longest
        apart = (args.vocab - FIRST_SYMBOL) // args.symbols
        self.symbols = FIRST_SYMBOL + apart * torch.arange(args.symbols)

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """prompts, answers [count, longest + 1]; a short answer is followed by more END."""
        lengths = torch.randint(self.shortest, self.longest + 1, (count, 1), generator=generator)
        string = self.symbols[
            torch.randint(len(self.symbols), (count, self.longest), generator=generator)
        ]
        places = torch.arange(self.longest)
        reverse = string.gather(1, (lengths - 1 - places).clamp(min=0))
        mark, end = torch.full((count, 1), ANSWER), torch.full((count, 1), END)
        prompts = torch.where(places < lengths, string, BLANK)
        return torch.cat([prompts, mark], 1), torch.cat(
            [torch.where(places < lengths, reverse, END), end], 1
        )

    @staticmethod
    def reward(given: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """given, right [.., T] -> [..], the share of places that are right, of the longer one's; 1:
        an exact match.

        Credit for each place, because a random policy sees less than one exact match in a
        million."""
        places = until_end(given) | until_end(right)
        return ((given == right) & places).sum(-1) / places.sum(-1)


class Trainer:
    def __init__(self, args, ranks):
        self.args, self.ranks, self.task = args, ranks, Reversal(args)
        self.samples = args.prompts * args.group  # per step, over all replicas
        if args.prompts % (ranks.dp * args.minibatches):
            raise SystemExit(
                f"--prompts must be a multiple of replicas x minibatches = {ranks.dp * args.minibatches}"
            )
        padded = -(-args.vocab // args.pad_to) * args.pad_to
        self.shard = VocabShard.from_group(ranks.tp_group, args.vocab, padded_size=padded)
        self.policy, self.reference = self._transformer(), self._transformer()
        # In groups of one mesh each, or foreach kernels would meet DTensors of different meshes.
        groups = [
            {"params": p}
            for p in (self.policy.sharded_parameters(), self.policy.replicated_parameters())
        ]
        self.optimizer = torch.optim.Adam(groups, lr=args.lr, betas=(0.9, 0.95))
        self.rule = (
            SamplingRule(top_k=args.top_k, top_p=args.top_p) if args.top_k or args.top_p else None
        )
        self.replay = self.rule is not None and not args.no_replay
        over = {"over": "sets" if self.replay else "vocabulary"}
        self.head_loss = HeadLoss(
            [
                PolicyGradient("clip", clip=CLIP, **over),
                KLToReference(args.kl_weight, "k3", **over),
                Entropy(args.entropy_weight, **over),
            ],
            metrics=(
                "entropy",
                "accuracy",
                PolicyMetrics(CLIP, reference=True, **over),
                GeneratorMetrics(**over),
            ),
            reduction="seq-mean-token-mean",
            ignore_index=IGNORE,
        )

    def _transformer(self):
        # prompt and answer, without the last id: it is never an input
        a, length = self.args, 2 * self.args.longest + 1
        model = Transformer(self.shard, a.width, a.layers, a.heads, length, a.seed)
        model.to(self.ranks.device)
        if self.ranks.mesh is not None:
            model.distribute(self.ranks.mesh)
        return model

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, first: torch.Tensor) -> dict[str, torch.Tensor]:
        """Prompts ids [N, T] -> sampled answers [N, longest + 1], their log-probs, and the ids that
        the rule kept.

        A short answer is followed by more END. first [N]: where each sample's own positions begin,
        which decide on its noise, so that neither shards nor replicas nor batches change what is
        sampled."""
        prompt, done = ids.shape[1], torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        log_probs, kept = [], []
        for step in range(self.task.longest + 1):
            logits = self.policy.output(self.policy(ids)[:, -1])
            draw = sample(
                logits,
                seed=self.args.seed,
                positions=first + step,
                rule=self.rule,
                shard=self.shard,
            )
            sampled = draw.ids.masked_fill(done, END)
            done = sampled == END
            ids = torch.cat([ids, sampled.unsqueeze(1)], 1)
            log_probs.append(draw.log_probs)
            kept.append(draw.sets)
        sets = IdSets.stack(kept, 1) if self.replay else None
        return {"answers": ids[:, prompt:], "log_probs": torch.stack(log_probs, 1), "sets": sets}

    @torch.no_grad()
    def score(
        self, model: Transformer, inputs: torch.Tensor, labels: torch.Tensor, sets: IdSets | None
    ) -> torch.Tensor:
        """inputs, labels [N, T] -> log-probs [N, T] of the labels, for a policy that is not trained
        on them."""
        if sets is None:
            return model.output.statistics(model(inputs), labels).log_prob
        return model.output.statistics(
            model(inputs), labels, ("set_log_prob",), sets=sets
        ).set_log_prob

    def rollouts(self, step: int) -> tuple[dict, dict]:
        """What `update` takes, [N, ..] for the samples of this replica, and the sums of rewards."""
        args, ranks = self.args, self.ranks
        # the same on every rank
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + step)
        prompts, right = self.task.draw(args.prompts, generator)
        # Minibatch m of all replicas together has the same samples for every number of replicas.
        samples = (
            torch.arange(self.samples)
            .view(args.minibatches, ranks.dp, -1)[:, ranks.dp_rank]
            .flatten()
        )
        prompts, right = (x[samples // args.group].to(ranks.device) for x in (prompts, right))
        first = (step * self.samples + samples) * (self.task.longest + 1)
        generated = self.generate(prompts, first.to(ranks.device))
        answers = generated["answers"]
        reward = self.task.reward(answers, right)
        groups = reward.view(-1, args.group)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

        inputs = torch.cat([prompts, answers[:, :-1]], 1)
        before = prompts.shape[1] - 1, 0  # tokens that have no label
        labels = F.pad(answers.masked_fill(~until_end(answers), IGNORE), before, value=IGNORE)
        sets = generated["sets"]
        if sets is not None:
            sets = sets.scatter(F.pad(torch.ones_like(answers, dtype=torch.bool), before))
        batch = {
            "inputs": inputs,
            "labels": labels,
            "advantages": advantages.view(-1, 1),
            "old_log_prob": self.score(self.policy, inputs, labels, sets),
            "reference_log_prob": self.score(self.reference, inputs, labels, sets),
            "generator_log_prob": F.pad(generated["log_probs"], before),
        }
        if sets is not None:
            batch["sets"] = sets
        return batch, {"reward": reward.sum(), "exact": (reward == 1).sum()}

    def update(self, inputs, labels, **signals) -> tuple[HeadLossOutput, dict]:
        """One clipped update by a minibatch -> its output, and this replica's loss and the
        gradient's norm."""
        out = self.policy.output(
            self.policy(inputs),
            labels,
            head_loss=self.head_loss,
            denominator=self.samples // self.args.minibatches,  # sequences of all replicas
            inputs={**signals, "sequences": Sequences.from_mask(labels != IGNORE)},
        )
        # FSDP averages over dp, but the losses of the ranks add up
        (self.ranks.dp * out.loss).backward()
        loss = out.loss.detach()
        norm = clip_grad_norm_(self.policy.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return out._replace(loss=loss, stats=None), {"loss": loss, "max_grad_norm": norm}

    def step(self, step: int) -> dict:
        """Rollouts of the current policy and the updates by them -> a row of metrics, over all
        replicas."""
        begin = time.perf_counter()
        if step % self.args.refresh == 0:
            self.reference.load_state_dict(self.policy.state_dict())
        batch, sums = self.rollouts(step)
        rows = torch.arange(len(batch["labels"])).chunk(self.args.minibatches)
        outputs, parts = zip(
            *(self.update(**{name: x[some] for name, x in batch.items()}) for some in rows)
        )
        means = mean_metrics(outputs, self.ranks.dp_group)
        sums = reduce_metrics(sums | combine_metrics(parts), self.ranks.dp_group)
        sums = {name: float(x) for name, x in (means | sums).items()}
        return {
            "step": step + 1,
            "reward": sums["reward"] / self.samples,
            "exact_match": sums["exact"] / self.samples,
            **{
                name: sums[name]
                for name in (*TOKEN_MEANS, "max_ratio", "min_ratio", "max_grad_norm")
            },
            "loss": sums["loss"] / self.args.minibatches,
            "tokens": int(sums["num_tokens"]),
            "seconds": time.perf_counter() - begin,
        }


def main() -> None:
    args = parse()
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranks = parallel.start(args.tp, args.device)
    out = Path(args.out)
    if not args.overwrite:
        ranks.first(lambda: refuse_older_run([out / "metrics.jsonl"]))
    trainer = Trainer(args, ranks)
    with ranks.together():
        if ranks.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            file = (out / "metrics.jsonl").open("w", buffering=1)
    for step in range(args.steps):
        row = trainer.step(step)
        if ranks.rank > 0:
            continue
        file.write(json.dumps({"split": "train", **row}) + "\n")
        if step % 10 == 9 or step + 1 == args.steps:
            print(
                f"step {step + 1}/{args.steps}:",
                ", ".join(f"{name} {row[name]:.3f}" for name in SHOWN),
                flush=True,
            )
    if ranks.rank == 0:
        file.close()
        from plot_grpo import plot

        plot([out], out / "grpo.png", args.refresh)
        print(f"curves: {out / 'grpo.png'}", flush=True)
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
