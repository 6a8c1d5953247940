"""launch/train.py in which ranks kill themselves (SIGKILL):

    torchrun .. tests/helpers/killed.py [options of launch/train.py]

On the first attempt rank 0, at step 12, when all files of a checkpoint are written and the one that
names it as the newest is not; on the second torchrun gets SIGTERM from rank 0, within step 15. With
LOSE_NODE set: instead the rank that has LOSE_NODE=1, within step 9, with its torchrun, as if its
host were lost; a first node that is alone waits.
"""

import importlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
sys.path.insert(0, str(LAUNCH))
checkpoint, tp_headloss = (
    importlib.import_module("checkpoint"),
    importlib.import_module("tp_headloss"),
)

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
lose_node = os.environ.get("LOSE_NODE")
if lose_node is not None and (attempt, os.environ["WORLD_SIZE"]) == (0, "1"):
    signal.pause()  # until the second node joins and torchrun starts all ranks anew
clip_grad_norm_, replace, steps = tp_headloss.clip_grad_norm_, os.replace, []


def terminate():
    """Send SIGTERM to torchrun, and wait for the one that it passes on."""
    came, handler = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: (came.append(None), handler(*args)))
    os.kill(os.getppid(), signal.SIGTERM)
    while not came:
        time.sleep(0.01)


def clip_or_die(*args):
    steps.append(None)
    if lose_node == "1" and (attempt, len(steps)) == (0, 9):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if lose_node is None and (attempt, rank, len(steps)) == (1, 0, 9):
        terminate()
    return clip_grad_norm_(*args)


def replace_or_die(source, target):
    first = (attempt, rank) == (0, 0) and lose_node is None
    if first and Path(target).name == "latest" and Path(source).read_text() == "step-00000012":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)


tp_headloss.clip_grad_norm_, checkpoint.os.replace = clip_or_die, replace_or_die
runpy.run_path(str(LAUNCH / "train.py"), run_name="__main__")
