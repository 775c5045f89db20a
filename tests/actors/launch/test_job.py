"""Programs of clusters, as `actors launch` calls them."""

import sys

import pytest

from actors.launch.job import Program
from schemas.errors import ConfigError

SHOUT = "import sys; print(sys.stdin.read().upper())"
FAIL = "import sys; sys.exit('no such queue')"


def program(seconds: float) -> Program:
    """A program with a limit."""
    return Program("slurm", seconds, "run this on a login node", "sbatch refuses the job: {words}")


def test_the_input_is_given_and_the_output_returned() -> None:
    """As for sbatch, which prints the number of the job."""
    assert program(60.0).call([sys.executable, "-c", SHOUT], "job") == "JOB\n"


def test_a_program_that_does_not_end_is_named_with_its_limit() -> None:
    """A scheduler that hangs would hold `actors launch` up for ever."""
    with pytest.raises(ConfigError, match=r"--on slurm: .* has not ended within 0\.2 s; look whether it has taken"):
        program(0.2).call([sys.executable, "-c", "import time; time.sleep(600)"], "")


def test_a_refusal_and_a_missing_program_say_what_to_do() -> None:
    """In the words of the program, or where to go."""
    with pytest.raises(ConfigError, match="--on slurm: sbatch refuses the job: no such queue"):
        program(60.0).call([sys.executable, "-c", FAIL], "")
    with pytest.raises(ConfigError, match="can't be started: No such file or directory; run this on a login node"):
        program(60.0).call(["/no/such/sbatch"], "")
