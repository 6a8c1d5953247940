"""The head loss of language models whose vocabulary is sharded over GPUs: one pass, one collective,
one backward."""

import sys
from typing import TYPE_CHECKING

import torch

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 11):
    raise ImportError(f"tp_headloss needs torch >= 2.11, got {torch.__version__}")

from . import head_loss, losses
from .arguments.id_sets import IdSets
from .arguments.options import Options, Transform
from .arguments.sampling_rule import SamplingRule
from .arguments.sequences import Sequences
from .arguments.teachers import Teacher, TeacherHead, TopKTeacher
from .call.statistics import LogProbs, log_probs, vocab_statistics
from .engine.registration import register_statistic
from .head_loss import *  # noqa: F403 (its __all__)
from .linear_head import Linear, linear_vocab_statistics
from .modules.clipping import clip_grad_norm_
from .modules.embedding import VocabParallelEmbedding
from .modules.layers import VocabParallelHead, multi_token_targets
from .modules.selected_rows import select_rows
from .modules.vocab_rows import Init
from .ranks.comm import combine_metrics, reduce_metrics
from .ranks.shard import VocabShard
from .search.sampling import Sample, kept_ids, sample
from .search.topk import TopK, topk_log_probs
from .spec.aliases import hint, is_from_import
from .statistics import VocabStatistics
from .version import __version__ as __version__

__all__ = [
    "IdSets",
    "Init",
    "Linear",
    "LogProbs",
    "Options",
    "Sample",
    "SamplingRule",
    "Sequences",
    "Teacher",
    "TeacherHead",
    "TopK",
    "TopKTeacher",
    "Transform",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "VocabShard",
    "VocabStatistics",
    "clip_grad_norm_",
    "combine_metrics",
    "kept_ids",
    "linear_vocab_statistics",
    "log_probs",
    "losses",
    "multi_token_targets",
    "reduce_metrics",
    "register_statistic",
    "sample",
    "select_rows",
    "topk_log_probs",
    "vocab_statistics",
]
__all__ += head_loss.__all__


if not TYPE_CHECKING:  # a type checker would believe that every name is there

    def __getattr__(name: str):
        said = ""
        if name == "integrations":
            said = f": import {__name__}.integrations.megatron, say, each host's by itself"
        elif name in losses.__all__:
            said = f": {__name__}.losses.{name}"
        elif not name.startswith("_"):
            said = hint(name, __all__, "package")
        # of an AttributeError an import says nothing, or takes a module of that name
        is_module = f"{__name__}.{name}" in sys.modules
        is_import = said and not is_module and is_from_import(sys._getframe(1))
        kind = ImportError if is_import else AttributeError
        raise kind(f"module {__name__!r} has no attribute {name!r}{said}")
