"""Slurm: one batch script, with a task per node that runs `actors node`. Nothing of Slurm is imported.

    sbatch ──▶ batch shell ──srun──▶ a shell per node ──▶ actors node ──▶ actors

Slurm signals every process of a step. `actors node` drains on SIGTERM and SIGUSR1, and its actors listen to it alone.
Before the end of the job's time Slurm sends SIGUSR1 to the batch shell, which passes it on and then requeues the job.
A killed node is started again by its shell; a node that fails ends the job.
"""

import shlex
from pathlib import Path

from actors.launch.job import CALL_SECONDS, Job, Program, restarting
from actors.launch.placement import table
from actors.process.output_dir import take
from schemas.errors import ConfigError

SBATCH = Program(
    "slurm",
    CALL_SECONDS,
    "run this on a login node",
    "sbatch refuses the job: {words} (launch.sbatch has its options)",
)
SCRIPT = """#!/bin/bash
{options}
#
{places}

# addresses in the order of SLURM_NODEID
nodes=$(for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  scontrol -o show node "$name" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p'
done | paste -sd,)
export nodes

again=0
trap 'again=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap : TERM
srun --kill-on-bad-exit=1 --wait=0 bash -c {node} &
step=$!
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step
code=$?
if [ $again -eq 1 ] && [ $code -eq 0 ] && [ ! -e {summary} ]; then
  echo "the job's time is over: requeued"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def script(job: Job) -> str:
    """Return the batch script of a run.

    Raises:
        ConfigError: `launch.image` is set: which containers a Slurm starts differs from cluster to cluster.
    """
    config, launch = job.config, job.config.launch
    if launch.image:
        raise ConfigError(
            "launch.image: is not used by --on slurm; remove it, or start the container with launch.sbatch, e.g. "
            "{container-image: …} with pyxis"
        )
    given: dict[str, object] = {
        "job-name": config.name,
        "output": str(config.output / "logs" / "slurm-%j.log"),
        "nodes": launch.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": launch.gpus_per_node or None,
        "cpus-per-task": launch.cpus_per_node or None,
        "mem": launch.memory_per_node.removesuffix("i") or None,
        "signal": f"B:USR1@{launch.stop_timeout}",
        "open-mode": "append",
        "requeue": True,
        **launch.sbatch,
    }
    options = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={_quoted(value)}"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    command = job.node_command('"$SLURM_NODEID"', '"$nodes"', job.program())
    node = "\n".join(["", *launch.commands, restarting(command), ""])
    return SCRIPT.format(
        options="\n".join(options),
        places="\n".join(f"# {line}" for line in table(config, job.nodes).splitlines()),
        node=shlex.quote(node),
        summary=shlex.quote(str(config.output / "summary.json")),
    )


def _quoted(value: object) -> str:
    """Return a value as sbatch reads it: between quotation marks if it has blanks."""
    return f'"{value}"' if " " in str(value) else str(value)


def submit(job: Job) -> str:
    """Submit the batch script; return how to watch, stop and resume the run.

    Raises:
        ConfigError: sbatch is not there or refuses the script, or output_dir can't be written to.
    """
    text = script(job)
    take(job.config)
    (job.config.output / "logs").mkdir(exist_ok=True)
    told = SBATCH.call(["sbatch", "--parsable"], text)
    number = told.strip().partition(";")[0]
    return how_to(job.config.output, number)


def how_to(output: Path, number: str) -> str:
    """Return the commands for a submitted job."""
    return "\n".join(
        [
            f"submitted job {number}",
            f"watch:   actors top {output}; tail -F {output}/logs/slurm-{number}.log; squeue -j {number}",
            f"stop:    scancel --signal=TERM {number} (drains, and saves a checkpoint)",
            "resume:  the same command; a job that loses a node, or whose time ends, is requeued and resumes by itself",
        ]
    )
