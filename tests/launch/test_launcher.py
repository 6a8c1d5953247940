import pytest
from launcher import run_script


def test_the_port_of_a_launch_is_taken_before_its_processes_start(tmp_path):
    script = tmp_path / "connects.py"
    script.write_text(
        "import os, socket\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])), timeout=10)\n"
    )
    run_script(script, ranks=2)


@pytest.mark.parametrize(
    ("last", "message"), [("raise KeyError('lost')", r"(?s)\[-9, 1\].*lost"), ("import os; os._exit(3)", r"\[-9, 3\]")]
)
def test_a_rank_that_fails_ends_the_launch(tmp_path, last, message):
    script = tmp_path / "fails.py"
    script.write_text(f"import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(10**6)\n{last}\n")
    with pytest.raises(AssertionError, match=message):
        run_script(script, ranks=2)
