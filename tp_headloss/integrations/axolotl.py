"""axolotl: a plugin that computes the loss of supervised training by `transformers.fuse_head`,
without logits.

    plugins:
      - tp_headloss.integrations.axolotl.HeadLossPlugin

axolotl prints an ImportError that it gets while it imports a plugin, and trains without the plugin.
Versions are therefore checked in a hook, whose errors end the run.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin

from ..head_loss import HeadLoss
from . import require

if TYPE_CHECKING:
    from .transformers import FusedHead

_log = logging.getLogger("tp_headloss")

# Settings of axolotl that train with another loss than the model's own, or replace that one
OTHER_LOSSES = (
    "rl",
    "reward_model",
    "process_reward_model",
    "orpo_alpha",
    "use_eaft",
    "kd_trainer",
    "diffusion",
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)


class HeadLossPlugin(BasePlugin):
    """Installs `transformers.fuse_head` on the model that axolotl has loaded: on one GPU, with DDP,
    with FSDP2, and with ``tensor_parallel_size``, where the output layer's weight [V/P, H] and the
    loss stay sharded on V. LoRA may adapt the model.

    For another loss than cross-entropy, name a subclass that overrides `head_loss`.

    Attributes:
        fused: the installed head, whose ``.last`` has the metrics of the last call; None before a
            model was loaded.
    """

    fused: FusedHead | None = None

    def head_loss(self, cfg: Any) -> HeadLoss:
        """Return the loss to train with; cross-entropy unless a subclass overrides this.

        Args:
            cfg: axolotl's configuration, in which a setting that is missing is None.
        """
        return HeadLoss()

    def pre_model_load(self, cfg: Any):
        """Check versions and configuration. axolotl calls this before it loads the model.

        Raises:
            ImportError: axolotl or transformers are older than the versions that are supported.
            ValueError: the configuration names another loss (`OTHER_LOSSES`), or
                ``cpu_ram_efficient_loading``, which leaves most ranks without weights for the check
                call of `fuse_head`.
        """
        require("axolotl")
        require("transformers")
        for name in OTHER_LOSSES:
            if cfg.get(name):
                raise ValueError(
                    f"HeadLossPlugin is for the model's own cross-entropy of labels, got {name}: "
                    f"{cfg[name]!r}, which is another loss: leave out one of the two"
                )
        if (cfg.get("fsdp_config") or {}).get("cpu_ram_efficient_loading"):
            raise ValueError(
                "HeadLossPlugin compares its loss with the model's own before FSDP wraps it, and so "
                "needs fsdp_config.cpu_ram_efficient_loading: false, got true, with which all ranks "
                "but one have no weights yet"
            )

    def post_model_load(self, cfg: Any, model: Any):
        """Install the head. axolotl calls this on every rank, after it has added adapters.

        Args:
            cfg: as in `head_loss`.
            model: a causal language model of transformers, or PEFT's wrapper of one.

        Raises:
            TypeError, ValueError: as `transformers.fuse_head`.
        """
        from .transformers import fuse_head

        self.fused = fuse_head(model, self.head_loss(cfg))
        _log.info("axolotl trains with %r", self.fused)
