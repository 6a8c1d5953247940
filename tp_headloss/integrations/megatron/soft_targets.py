"""The main head as the teacher of the depths of multi-token prediction: its hidden states at each
depth's positions."""

from __future__ import annotations

from contextlib import contextmanager

import torch


class MainStates:
    """Hidden states of the main head, detached, at the positions where it predicts the same tokens
    as a depth.

    Depth d (from 1) predicts at position t what the main head predicts at position t + d. Megatron
    moves the labels and the loss mask of a depth one position to the left to get those of the next
    one, with zeros at the ends of sequences: `roll_tensor`, which knows packed sequences and
    context parallelism. Hidden states are moved by this very function, so they stay beside the
    labels. Zeros have a finite loss, which the mask takes out.
    """

    def __init__(self, model, hidden_states, packed_seq_params):
        self.model, self.packed_seq_params = model, packed_seq_params
        # [(1 + D) * s, b, h], the main head's first; sequence parallel: s/P
        self.all_depths = hidden_states
        self.states: torch.Tensor | None = None  # [s, b, h], moved as far as the last depth needed

    @torch.no_grad()
    def moved(self) -> torch.Tensor:
        """Move the states by one position more -> [s, b, h], or this rank's [s/P, b, h] under
        sequence parallelism."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        layer = self.model.output_layer
        if self.states is None:
            states = self.all_depths.chunk(1 + self.model.config.mtp_num_layers)[0].detach()
            if layer.sequence_parallel:
                states = gather_from_sequence_parallel_region(states, group=layer.tp_group)
            self.states = states
        # packed sequences are rolled along the last dimension alone
        last = self.states.movedim(0, -1)
        last, _ = roll_tensor(
            last,
            shifts=-1,
            dims=-1,
            cp_group=self.model.pg_collection.cp,
            packed_seq_params=self.packed_seq_params,
        )
        self.states = last.movedim(-1, 0)
        if not layer.sequence_parallel:
            return self.states
        return self.states.chunk(layer.tp_group.size())[layer.tp_group.rank()]


@contextmanager
def main_states_of(model, hidden_states, packed_seq_params):
    """Yield the `MainStates` of a forward: from the output of the model's depths, or
    `hidden_states` if they ran."""
    states, block = MainStates(model, hidden_states, packed_seq_params), getattr(model, "mtp", None)

    def keep(module, args, output):
        states.all_depths = output

    hook = None if block is None else block.register_forward_hook(keep)
    try:
        yield states
    finally:
        if hook is not None:
            hook.remove()
