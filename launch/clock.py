"""When things happened."""

import time

import torch


class Clock:
    """Points in time: CUDA events on a GPU, so that measuring makes nothing wait; the host's clock
    elsewhere."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin, end) -> float:
        """On a GPU: only once the events have happened."""
        return begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
