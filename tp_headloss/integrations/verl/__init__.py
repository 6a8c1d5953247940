"""verl: its Megatron engine with this package's head, and its functions of vocabulary-sharded
logits.

One line of verl's configuration puts the head into the engine of the actor and of the reference:

    actor_rollout_ref.model.external_lib=tp_headloss.integrations.verl.external_lib

It calls `engine.install`, which other programs call themselves. The functions, whose names and
contracts are verl's, import nothing of verl, and no process group is looked up: the group is an
argument, and None means not sharded. As in verl, labels are not shifted: verl's engine has done
that.

Unlike in verl, results are fp32 for logits of any dtype (float64 for float64); logits and
temperatures are not written into (verl divides the logits in place and rounds the quotient to their
dtype); a label of -100 has log-prob 0, and a label outside of the vocabulary has NaN; nothing waits
for the device.
"""

from typing import TYPE_CHECKING

from .. import refuse_other_names
from .functions import (
    IGNORED_LABEL,
    LOWEST_TEMPERATURE,
    UNREDUCED_HIDDEN_GRAD,
    linear_cross_entropy,
    logits_processor,
)

__all__ = [
    "IGNORED_LABEL",
    "LOWEST_TEMPERATURE",
    "UNREDUCED_HIDDEN_GRAD",
    "linear_cross_entropy",
    "logits_processor",
]

if not TYPE_CHECKING:  # to which a module with it would have every name
    __getattr__ = refuse_other_names(__name__, __all__)
