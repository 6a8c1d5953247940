"""`python -m tp_headloss` on ranks of which rank 1 comes and then ends without a word: see
test_report."""

import os
import sys

from tp_headloss import __main__

join = __main__.join


def join_and_end(given, name):
    """Meet; then rank 1 ends as a killed process does."""
    join(given, name)
    if given.rank == 1:
        os._exit(1)


__main__.join = join_and_end
__main__.uses_gpus = lambda given: False
__main__.ROLL_CALL = 1.0
sys.argv[1:] = []
__main__.main()
