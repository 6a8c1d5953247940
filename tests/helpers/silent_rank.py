"""`python -m tp_headloss` on two ranks of which rank 1 comes and then does not answer, until rank 0 has
ended: see test_report."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tp_headloss import __main__

join = __main__.join


def join_and_answer_late(given, name):
    """Meet within the time of the command; from then on wait a second for an answer."""
    join(given, name)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == __main__.WAIT
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    if given.rank == 1:
        dist.distributed_c10d._get_default_store().wait(["end"], timedelta(minutes=10))
        sys.exit(1)


__main__.join = join_and_answer_late
__main__.uses_gpus = lambda given: False
__main__.ROLL_CALL = 1.0
sys.argv[1:] = []
try:
    __main__.main()
finally:
    if os.environ["RANK"] == "0":
        dist.distributed_c10d._get_default_store().set("end", "")
