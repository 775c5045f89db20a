"""Pages of `actors view` about a run with a million trajectories: the catalogue, the first page, filters and searches.

The run is made: samples.jsonl with the file before it, 125 000 groups of 8 trajectories of about 300 characters, and a
ledger with a row for each group. Two times are of interest before the catalogue is whole: until the first page has
groups, and until everything is in it; meanwhile searches are asked, a few in a second. Then each question is asked over
HTTP, with several values, while the process that follows the run is at work. `cpu_ms` is the CPU time of the process of
the server, server and client together: on a machine with other work it says more than the time on the clock.

    python -m benchmarks.view [--trajectories 1000000] [--json PATH]
"""

import argparse
import asyncio
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from actors.ledger import Store
from actors.view.server import application
from actors.view.viewed_run import ViewedRun
from benchmarks.machine import publish, scratch
from schemas.config import RunConfig, check_tree
from schemas.config.resolved import write_resolved

SIZE, GROUPS_PER_STEP, CHARACTERS = 8, 64, 290
ENVIRONMENTS = ("sums", "code", "shop")
ROUNDS = 5
FIRST_PAGE_MS, SEARCH_MS = 300.0, 1000.0
RARE = "the needle in this haystack"
QUESTIONS: dict[str, list[str]] = {
    "first page": ["", "limit=100", "purpose=train"],
    "page from the middle": ["before=60000", "before=1000"],
    "environment": ["environment=code", "environment=sums&state=durable"],
    "reward": ["reward_min=0.99", "reward_max=-5", "reward_min=0.9&stop=length&length_max=100"],
    "length": ["length_min=309", "length_min=100000"],
    "step": ["step_min=100&step_max=101", "step_max=2"],
    "search: many have it": ["text=answer", "text=the", "text=a"],
    "search: few have it": [f"text={RARE}".replace(" ", "%20"), "text=NEEDLE"],
    "search: no group has it": ["text=zqxjzqxj", "text=no%20group%20has%20this", "text=%E6%97%A5%E6%9C%AC%E8%AA%9E"],
    "search with filters": ["text=answer&reward_min=0.999", "text=needle&stop=stop", "text=the&reward_max=-5"],
    "facts for the filters": ["facts"],
}
"""Questions by kind."""
MEANWHILE = ["text=answer", "text=the%20answer", "text=NEEDLE", "text=zqxjzqxj", ""]
"""Questions that are asked while the catalogue is made: searches that many, few and no groups match, and the list."""


def config(folder: Path) -> RunConfig:
    """Return the configuration of a run without a model."""
    tree: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"path": "none"},
        "environments": [{"type": "reverse_text", "name": name} for name in ENVIRONMENTS],
        "rollout": {"group_size": SIZE, "max_tokens": 64},
        "reward": {"functions": [{"path": "exact_match"}]},
        "packer": {"groups_per_step": GROUPS_PER_STEP, "sequence_len": 1024},
        "trainer": {"max_steps": 10_000},
        "inference": {"engine": {"type": "fake"}},
    }
    return check_tree(tree)


def lines(groups: int) -> Iterator[bytes]:
    """Yield lines of samples.jsonl, the same ones each time: words by Zipf's law, as in text."""
    draw = random.Random(0)
    words = ["".join(draw.choice("etaoinshrdlucmfwypvbgk") for _ in range(draw.randint(2, 9))) for _ in range(30_000)]
    words[:4] = ["the", "answer", "is", "number"]
    pool = " ".join(draw.choices(words, [1 / (rank + 1) for rank in range(len(words))], k=500_000))

    def text(length: int) -> str:
        at = draw.randrange(len(pool) - length)
        return pool[at : at + length]

    for ordinal in range(groups):
        texts = [f"{text(CHARACTERS)} {draw.random()}" for _ in range(SIZE)]
        if ordinal % 20_000 == 77:
            texts[3] += f" {RARE}"
        rewards = [round(draw.random(), 3) for _ in range(SIZE)]
        line = {
            "step": 1 + ordinal // GROUPS_PER_STEP,
            "ordinal": ordinal,
            "purpose": "train",
            "environment": ENVIRONMENTS[ordinal % 3],
            "prompt": text(100),
            "columns": {},
            "completions": texts,
            "stop_conditions": ["length" if draw.random() < 0.1 else "stop" for _ in range(SIZE)],
            "reward": rewards,
            "rewards": {"exact_match": rewards},
            "advantages": [round(reward - 0.5, 3) for reward in rewards],
            "versions": [ordinal // GROUPS_PER_STEP],
        }
        yield json.dumps(line).encode() + b"\n"


def make(run: RunConfig, groups: int) -> int:
    """Write the run; return the bytes of its samples."""
    run.output.mkdir(parents=True)
    write_resolved(run)
    with (run.output / "samples.older.jsonl").open("wb") as older, (run.output / "samples.jsonl").open("wb") as newer:
        for ordinal, line in enumerate(lines(groups)):
            (older if ordinal < groups // 2 else newer).write(line)
        total = older.tell() + newer.tell()
    store = Store(run.ledger_path)
    store.database.execute("BEGIN")
    store.database.executemany(
        "INSERT INTO groups VALUES (?,?,?,?,?,?,?,NULL,NULL,'durable',1,'open',0,0,NULL,?,?,?,NULL,NULL,0,?)",
        (
            (
                o,
                ENVIRONMENTS[o % 3],
                o,
                f"key{o}",
                o,
                SIZE,
                0,
                o // GROUPS_PER_STEP,
                o,
                1 + o // GROUPS_PER_STEP,
                o,
            )
            for o in range(groups)
        ),
    )
    store.database.execute("COMMIT")
    store.close()
    return total


Took = tuple[float, float]
"""Milliseconds on the clock, and of CPU time."""


async def ask(session: aiohttp.ClientSession, base: str, question: str) -> tuple[Took, dict[str, Any]]:
    """Ask over HTTP; return the milliseconds and the answer."""
    path = "facts" if question == "facts" else f"groups?{question}"
    started, cpu = time.perf_counter(), time.process_time()
    async with session.get(f"{base}/api/runs/0/{path}") as response:
        answer = await response.read()
        assert response.status == 200, answer
    return (1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - cpu)), json.loads(answer)


def _row(what: str, times: list[Took], limit: float | None = None, complete: bool = True) -> dict[str, Any]:
    """Return a row: median and worst milliseconds, and whether each answer was whole within its time."""
    clock, cpu = zip(*times, strict=True)
    return {
        "of": what,
        "ms": statistics.median(clock),
        "worst_ms": max(clock),
        "limit_ms": limit,
        "cpu_ms": statistics.median(cpu),
        "complete": complete,
    }


async def measure(run: RunConfig, cache: Path, groups: int) -> list[dict[str, Any]]:
    """Make the catalogue, then ask all questions; return a row for each figure."""
    began, cpu = time.perf_counter(), time.process_time()

    def since() -> Took:
        return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - cpu)

    viewed = ViewedRun(run, cache)
    runner = web.AppRunner(application([viewed], ""), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    rows: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as session:
        while not (first := (await ask(session, base, ""))[1]["groups"]) or not first[0]["completions"]:
            await asyncio.sleep(0.02)
        rows.append(_row("start until the first page has groups", [since()]))
        during: list[Took] = []
        is_whole = True
        while (facts := (await ask(session, base, "facts"))[1])["trajectories"] < groups * SIZE:
            for question in MEANWHILE:
                took, answer = await ask(session, base, question)
                during.append(took)
                is_whole = is_whole and answer["complete"]
            await asyncio.sleep(0.3)
        assert (facts["groups"], facts["indexed"]) == (groups, 1.0)
        rows.append(_row("start until the catalogue is whole", [since()]))
        rows.append(_row("a search meanwhile", during or [(0.0, 0.0)], SEARCH_MS, is_whole))
        for kind, questions in QUESTIONS.items():
            times: list[Took] = []
            whole = True
            for question in questions:
                for _ in range(ROUNDS):
                    took, answer = await ask(session, base, question)
                    times.append(took)
                    whole = whole and answer.get("complete", True)
            rows.append(_row(kind, times, FIRST_PAGE_MS if kind == "first page" else SEARCH_MS, whole))
    viewed.close()
    await runner.cleanup()
    return rows


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    groups = arguments.trajectories // SIZE
    with scratch() as folder:
        run = config(folder)
        sample_bytes = make(run, groups)
        cpu = time.process_time()
        rows = asyncio.run(measure(run, folder / "cache", groups))
        cpu = time.process_time() - cpu
        # the process that keeps the catalogue has ended with the viewer
        kept = resource.getrusage(resource.RUSAGE_CHILDREN)
        room = sum(path.stat().st_size for path in (folder / "cache").iterdir())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    results = {
        "trajectories": groups * SIZE,
        "samples_mb": sample_bytes / 1e6,
        "catalogue_mb": room / 1e6,
        "cpu_seconds": cpu,
        "keeper_cpu_seconds": kept.ru_utime + kept.ru_stime,
        "peak_memory_mib": memory,
        "keeper_peak_memory_mib": kept.ru_maxrss / 1024,
        "rows": rows,
    }
    publish(results, rows, arguments.json)
    print({name: value for name, value in results.items() if name != "rows"})


if __name__ == "__main__":
    main()
