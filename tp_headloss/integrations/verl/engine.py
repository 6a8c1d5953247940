"""verl's Megatron engine with this package's head: `install` registers it in the place of verl's own.

    with install():                      # or, for the whole process, the line of verl's configuration
        engine = EngineRegistry.new("language_model", "megatron", ...)

The engine's method that makes log-probs, entropies, sum_pi_squared and top-K distillation from logits is replaced. With
verl's ``use_fused_kernels`` the same results come from hidden states, and logits never exist as a whole. That goes
through verl's general forward, so it takes what verl's own fused forward refuses: temperatures per sample,
sum_pi_squared, top-K distillation, and batches with padding. Multi-token prediction turns it off, with verl's warning.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn import functional as F

from ...arguments.options import Options
from ...linear_head import Linear
from ...spec import Size, checked
from .. import require
from ..megatron.layer import layer_shard, logits_transform, refuse_options
from ..megatron.postprocess import TakenHidden, hidden_in_place_of_logits
from ..replacement import Counted, expect_close, normal, replaced
from .functions import IGNORED_LABEL, LOWEST_TEMPERATURE
from .heads import HiddenHead, LogitsHead, topk_distillation

require("verl")
require("megatron-core")
from megatron.core import parallel_state  # noqa: E402
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine  # noqa: E402
from verl.trainer.distillation.losses import distillation_ppo_loss  # noqa: E402
from verl.utils.megatron_utils import unwrap_model  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead  # noqa: E402

MODEL_TYPE, BACKEND = "language_model", "megatron"
SIGNATURES = {  # methods of verl's engine that are overridden -> their parameters
    "_maybe_enable_fused_kernels": ("self",),
    "forward_step": (
        "self",
        "batch_iter",
        "model",
        "logits_processor_func",
        "postprocess_micro_batch_func",
    ),
    "_lm_head_logits_processor": (
        "self",
        "logits",
        "label",
        "temperature",
        "calculate_sum_pi_squared",
        "calculate_entropy",
        "distillation_use_topk",
        "distillation_only",
        "logits_processor_func",
        "batch",
        "data_format",
    ),
}
# of the check call: tokens times the ranks, and columns of logits on a rank
CHECK_TOKENS, CHECK_COLUMNS = 4, 64


class HeadLossEngine(MegatronEngineWithLMHead):
    """verl's Megatron engine of a language model, with this package's head.

    When an engine is initialised, all ranks of a tensor-parallel group compare its head with verl's
    own on random tokens.

    Attributes:
        vocab_size, linear, options, response_only: as in `install`, which sets them on a subclass.
        calls: number of micro-batches that the head has computed, of all engines of the class.
        calls_without_head: number of micro-batches of model chunks without an output layer (earlier
            pipeline stages).
        fuses_head: True where the head computes from hidden states.
    """

    vocab_size: int | None = None
    linear = Linear()
    options: Options | None = None
    response_only = False
    calls = calls_without_head = 0
    fuses_head = False
    _taken = None  # inside of a fused forward: the model, and what its output layer got

    def _maybe_enable_fused_kernels(self):
        if self.model_config.mtp.enable:
            super()._maybe_enable_fused_kernels()  # which warns, and turns the fusion off
        if self.engine_config.use_fused_kernels:
            if self.engine_config.use_megatron_fsdp:
                raise ValueError(
                    "use_fused_kernels needs the output layer's own rows, got "
                    "use_megatron_fsdp=True: set one of them to False"
                )
            self.fuses_head = True
            # so that verl's general forward runs, and no patch of verl's
            self.engine_config.use_fused_kernels = False
        for model in map(_language_model, self.module):
            if model.post_process:
                self._check_head(model)

    def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
        step = super().forward_step
        owner = _language_model(model)
        type(self).calls_without_head += not owner.post_process
        if not self.fuses_head or not owner.post_process:
            return step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)
        with hidden_in_place_of_logits(owner) as taken, replaced(self, _taken=(owner, taken)):
            return step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)

    def _lm_head_logits_processor(
        self,
        logits,
        label,
        temperature,
        *,
        calculate_sum_pi_squared,
        calculate_entropy,
        distillation_use_topk,
        distillation_only,
        logits_processor_func,
        batch,
        data_format,
    ):
        """Return verl's results by name, [b, s] fp32 replicated, of logits [b, s, v/P] sharded on
        V. Inside of a fused forward the logits are ignored."""
        type(self).calls += 1
        head = self._head(logits, temperature.clamp(min=LOWEST_TEMPERATURE))
        names = {} if distillation_only else {"log_probs": "log_prob"}
        names |= {"entropy": "entropy"} if calculate_entropy else {}
        names |= {"sum_pi_squared": "collision"} if calculate_sum_pi_squared else {}
        ids = None
        if distillation_use_topk:
            lowest = _lowest_log_prob(logits_processor_func)
            ids, teacher = (
                _packed(batch[name], data_format) for name in ("teacher_ids", "teacher_logprobs")
            )
        want = tuple(name for name in names.values() if name != "log_prob") + (
            () if ids is None else ("log_probs_at",)
        )
        # None: of the check call
        if valid_only := self.response_only and ids is None and batch is not None:
            label = label.masked_fill(~_is_response(batch, data_format), IGNORED_LABEL)
        stats = head.statistics(None if distillation_only else label, want, ids, valid_only)
        results = {name: stats[statistic] for name, statistic in names.items()}
        if ids is not None:
            results |= topk_distillation(
                stats["log_probs_at"], teacher, ids, head.topk_ids(ids.shape[-1]), lowest
            )
        return results

    def _head(self, logits, temperature) -> LogitsHead | HiddenHead:
        """The head of a call: on hidden states inside of a fused forward, else on these logits."""
        if self._taken is None:
            group = parallel_state.get_tensor_model_parallel_group()
            shard = layer_shard(group, logits.shape[-1], self.vocab_size)
            return LogitsHead(logits, shard, temperature, self.options)
        model, taken = self._taken
        return HiddenHead(
            taken.hidden,
            taken.weight,
            model,
            temperature,
            self.vocab_size,
            self.linear,
            self.options,
        )

    @torch.no_grad()
    def _check_head(self, model):
        """Raise RuntimeError unless log-probs and sum_pi_squared of random tokens are those of
        verl's own method (of the same shape and type alone, if a vocab_size leaves padding out)."""
        group = parallel_state.get_tensor_model_parallel_group()
        generator, count = torch.Generator().manual_seed(0), CHECK_TOKENS * group.size()
        logits, taken = self._check_operands(model, count, generator)
        ids = logits.shape[-1] * group.size() if self.vocab_size is None else self.vocab_size
        label = torch.randint(0, ids, (1, count), generator=generator, device="cpu")
        label = label.to(logits.device)
        place = {"dtype": torch.float32, "device": logits.device}
        temperature = torch.linspace(0.5, 2.0, count, **place).unsqueeze(0)
        wanted = {
            "calculate_sum_pi_squared": True,
            "calculate_entropy": False,
            "distillation_use_topk": False,
            "distillation_only": False,
            "logits_processor_func": None,
            "batch": None,
            "data_format": "thd",
        }
        stock = super()._lm_head_logits_processor(
            logits.clone(), label, temperature.clone(), **wanted
        )
        try:
            with replaced(self, _taken=taken):
                found = self._lm_head_logits_processor(logits, label, temperature, **wanted)
        finally:
            type(self).calls -= 1
        compares = ids == logits.shape[-1] * group.size()
        for name, expected in stock.items():
            expect_close(f"{name} of the check call", found[name], expected, compares)

    def _check_operands(self, model, count: int, generator: torch.Generator):
        """Return logits [1, count, v/P] sharded on V, and, for a head that fuses, the model with
        the hidden states that they are made of, else None."""
        device = next(model.parameters()).device
        group = parallel_state.get_tensor_model_parallel_group()
        if not self.fuses_head:
            columns = (
                CHECK_COLUMNS if self.vocab_size is None else -(-self.vocab_size // group.size())
            )
            logits = normal((1, count, columns * group.size()), generator)
            return logits.split(columns, -1)[group.rank()].to(device), None
        layer, tied = model.output_layer, model.share_embeddings_and_output_weights
        refuse_options(model.config, layer)
        weight = model.shared_embedding_or_output_weight() if tied else layer.weight
        hidden = normal((count, 1, weight.shape[1]), generator).to(weight)
        logits = (
            F.linear(hidden, weight).transpose(0, 1).float() * logits_transform(model.config).scale
        )
        part = hidden.split(CHECK_TOKENS)[group.rank()] if layer.sequence_parallel else hidden
        return logits, (model, TakenHidden(part, weight))


def _language_model(model):
    """Megatron's GPTModel in a model of verl's engine: without wrappers, and of a vision model its
    language part."""
    model = unwrap_model(model)
    return getattr(model, "language_model", model)


def _packed(nested: torch.Tensor, data_format: str, need_roll: bool = False) -> torch.Tensor:
    """Return [b, s, ..] in the order and padding of verl's logits, or with need_roll of its labels,
    of a nested tensor."""
    pack = preprocess_thd_engine if data_format == "thd" else preprocess_bshd_engine
    return pack(nested, pre_process=True, need_roll=need_roll)[0]


def _is_response(batch, data_format: str) -> torch.Tensor:
    """Return the mask [b, s] of verl's labels that its loss_mask, which is of responses or of whole
    sequences, has."""
    from verl.models.mcore.model_forward import _build_mtp_loss_mask_nested as mask_of_sequences

    mask, lengths = batch["loss_mask"].bool(), batch["input_ids"].offsets().diff().tolist()
    attended = None if mask.is_nested else batch["attention_mask"][:, -mask.shape[-1] :]
    return _packed(mask_of_sequences(mask, lengths, attended), data_format, need_roll=True)


def _lowest_log_prob(loss_function) -> float | None:
    """Return the log_prob_min_clamp of verl's distillation loss. ValueError for another loss, which
    would compute from logits."""
    function = getattr(loss_function, "func", loss_function)
    if function is not distillation_ppo_loss or function is loss_function:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ValueError(
            "top-K distillation must be verl's, functools.partial(distillation_ppo_loss, ..), "
            f"which the head computes from log-probs at the teacher's ids, got {name}: remove the "
            "head for other losses of logits"
        )
    return loss_function.keywords["distillation_config"].distillation_loss.log_prob_min_clamp


class InstalledEngine(Counted):
    """The engine that `install` has registered; `remove` gives verl its own back.

    As a context manager it removes the engine at the end of the block, and raises RuntimeError if
    the head has computed nothing (on a rank of an earlier pipeline stage: if no engine of the block
    has run). Engines that were made in between keep the head.

    Attributes:
        engine_class: the subclass of `HeadLossEngine` that is registered.
    """

    def __init__(self, engine_class: type[HeadLossEngine], registry: dict, devices: list):
        super().__init__(registry, *devices)
        self.engine_class = engine_class
        self.install(dict.fromkeys(devices, engine_class))

    @property
    def calls(self) -> int:
        """Number of micro-batches that the head has computed."""
        return self.engine_class.calls

    def uses(self) -> int:
        return self.calls + self.engine_class.calls_without_head

    def expect_use(self, uses: int):
        if not uses:
            raise RuntimeError(
                "the head has computed nothing: were engines made inside of the block, for "
                "'megatron'?"
            )


@checked
def install(
    *,
    vocab_size: Size | None = None,
    linear: Linear | None = None,
    options: Options | None = None,
    response_only: bool = False,
) -> InstalledEngine:
    """Register `HeadLossEngine` in the place of verl's Megatron engine of language models.

    Engines that are made from then on have the head. Each compares it with verl's own when it is
    initialised.

    Args:
        vocab_size: number of ids of the tokenizer: rows of the output layer beyond it are padding
            and do not enter the softmax. None: all rows do, as in verl.
        linear: `Linear` for its budget and engine, of fused heads. The output layer decides how
            gradients are reduced.
        response_only: True: what is computed of labels outside of verl's loss_mask is 0, and a
            fused head leaves their tokens out; it waits for the device, and keeps gathered hidden
            states under sequence parallelism. Without effect on micro-batches with top-K
            distillation.

    Raises:
        ImportError: verl or Megatron-Core is not installed in a supported version.
        TypeError: linear or options is none.
        ValueError: another engine than verl's own is registered, or linear asks for one sweep.
        RuntimeError: the methods of verl's engine take other arguments than those that the head was
            written for.
    """
    linear = linear or Linear()
    if linear.mode == "one_sweep":
        raise ValueError(
            "linear must have mode='recompute' or 'auto', since verl's losses are not linear in "
            "log-probs"
        )
    for name, expected in SIGNATURES.items():
        found = tuple(inspect.signature(getattr(MegatronEngineWithLMHead, name)).parameters)
        if found != expected:
            raise RuntimeError(
                f"verl's MegatronEngineWithLMHead.{name} must take {expected}, got {found}"
            )
    registry = EngineRegistry._engines[MODEL_TYPE][BACKEND]
    devices = [
        device for device, registered in registry.items() if registered is MegatronEngineWithLMHead
    ]
    if not devices:
        others = {device: registered.__qualname__ for device, registered in registry.items()}
        raise ValueError(
            f"verl's MegatronEngineWithLMHead must be registered for 'megatron', got {others}: one "
            "at a time"
        )
    settings = {
        "vocab_size": vocab_size,
        "linear": linear,
        "options": options,
        "response_only": response_only,
    }
    settings |= {"calls": 0, "calls_without_head": 0}
    return InstalledEngine(type("HeadLossEngine", (HeadLossEngine,), settings), registry, devices)
