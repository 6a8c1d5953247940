"""Parts of a torchtitan Trainer that need no files: its batches, tokenizer and log; and what it
needs to run on CPUs.

For CPUs, set ``torchtitan.tools.utils.device_type`` and ``.device_module`` before this is imported:
others copy them.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torchtitan.components.metrics as titan_metrics
import torchtitan.distributed.utils as titan_distributed
import torchtitan.models.llama3 as llama3
import torchtitan.trainer as titan_trainer
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools import utils

# what it offers runs on GPUs only
llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
titan_trainer.time = types.SimpleNamespace(
    perf_counter=titan_trainer.time.perf_counter, sleep=lambda seconds: None
)
if utils.device_type == "cpu":
    memory = types.SimpleNamespace(
        device_name="cpu",
        reset_peak_stats=lambda: None,
        get_peak_stats=lambda: DeviceMemStats(0, 0, 0, 0, 0, 0),
    )
    titan_metrics.build_device_memory_monitor = lambda: memory
    titan_distributed.set_pg_timeouts = lambda **_: None  # a barrier that names a GPU


class Tokenizer(BaseTokenizer):
    """Reads no text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *args, **kwargs) -> list[int]:
        raise NotImplementedError

    def decode(self, *args, **kwargs) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Batches(BaseDataLoader):
    """Batches of one function."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        # rows, rank of data parallelism -> ids, labels [rows, length], one pair after the other
        make: Callable[[int, int], Iterator[tuple[torch.Tensor, torch.Tensor]]]
        infinite: bool = True  # as the validator sets it

    def __init__(self, config, *, dp_rank, local_batch_size, **_):
        self.make, self.rows, self.rank = config.make, local_batch_size, dp_rank

    def __iter__(self):
        for ids, labels in self.make(self.rows, self.rank):
            yield {"input": ids, "positions": torch.arange(ids.shape[1]).expand(ids.shape)}, labels

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class Seen(MetricsProcessor):
    """Keeps what the trainer logs: losses, and everything."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.losses, self.seen = [], []

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        self.losses.append(global_avg_loss)
        self.seen += [global_avg_loss, global_max_loss, grad_norm]

    def log_validation(self, loss, step, extra_metrics=None):
        self.seen.append(loss)


def sums_of_gloo(model):
    """The model with sums of gradients that gloo has, too, if it is on a CPU."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and utils.device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    return model
