"""One device of gloo for all groups of a process.

Each group has a device of its own otherwise, and each device a thread that wakes up a hundred times
a second for as long as its process lives: those of a hundred groups take much of a processor.
"""

import functools
import os

from torch.distributed import ProcessGroupGloo


@functools.cache
def _device_of(process):
    return ProcessGroupGloo.create_default_device()


def share_one_device():
    """Groups that this process makes from now on, and processes forked from it, share a device."""
    init = ProcessGroupGloo.__init__

    def init_with_device(self, store, rank, size, timeout):
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [_device_of(os.getpid())], timeout
        init(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_with_device
