import multiprocessing.connection
import os
from types import SimpleNamespace

import launcher
import pytest
from launcher import run_script


def test_the_port_of_a_launch_is_taken_before_its_processes_start(tmp_path):
    script = tmp_path / "connects.py"
    script.write_text(
        "import os, socket\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), "
        "timeout=10)\n"
    )
    run_script(script, ranks=2)


@pytest.mark.parametrize(
    ("last", "message"),
    [("raise KeyError('lost')", r"(?s)\[-9, 1\].*lost"), ("import os; os._exit(3)", r"\[-9, 3\]")],
)
def test_a_rank_that_fails_ends_the_launch(tmp_path, last, message):
    script = tmp_path / "fails.py"
    script.write_text(
        f"import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(10**6)\n{last}\n"
    )
    with pytest.raises(AssertionError, match=message):
        run_script(script, ranks=2)


def test_ranks_that_all_end_at_once_end_the_launch(tmp_path, monkeypatch):
    class EndsOnceLookedAt:
        """A process that runs for whoever asks first, and has ended for who asks again."""

        def __init__(self, target, args, daemon):
            self.codes = [None]
            self.sentinel, end = os.pipe()
            os.close(end)

        @property
        def exitcode(self):
            return self.codes.pop() if self.codes else 0

        def start(self):
            pass

        kill = join = start

    def wait(sentinels):
        assert len(sentinels) == 2
        return multiprocessing.connection.wait(sentinels)

    monkeypatch.setattr(
        launcher, "start_context", lambda cuda: SimpleNamespace(Process=EndsOnceLookedAt)
    )
    monkeypatch.setattr(launcher, "wait", wait)
    assert run_script(tmp_path / "none.py", ranks=2) == ""
