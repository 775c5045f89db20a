"""Server of the pages: `/` and its files, and `/api/…` with the values of runs as JSON. Nothing is written.

Each question is answered in a thread, with a limit of MAX_QUESTIONS at a time. The addresses:

    /api/runs                                      all runs, in the order of the command line
    /api/runs/N                                    overview of run N, from 0
    /api/runs/N/curves?name=reward_mean&points=400
    /api/runs/N/facts                              values for filters
    /api/runs/N/groups?environment=…&text=…        a page of the list; the parameters of `query_of`
    /api/runs/N/groups/O                           a group by its ordinal
    /api/runs/N/groups/O/life
    /api/runs/N/groups/O/images/D                  an image by its digest, as a PNG that is encoded here
    /api/runs/N/groups/O/trajectories/C            a completion
    /api/runs/N/groups/O/samples/S?start=0         tokens of a sample
    /api/runs/N/steps/K
    /api/runs/N/steps/K/timeline                   spans of all actors
    /api/runs/N/steps/K/trace                      the same as a file for Perfetto
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any, Literal, cast

from aiohttp import web

from actors.view.access import guarded
from actors.view.curves import MAX_POINTS, POINTS
from actors.view.listing import MAX_GROUPS, PAGE_GROUPS, Query
from actors.view.plain import number
from actors.view.tokens import MAX_TOKENS
from actors.view.viewed_run import MissingError, ViewedRun
from bus import threads
from schemas.errors import ConfigError

MAX_QUESTIONS = 8
"""Questions answered at a time; further ones wait."""
ANSWER_SECONDS = 60.0
"""Longest time of an answer: a disk that hangs must not keep a page without a word."""
PAGES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Content types of the files of the pages, by suffix."""
LARGEST = 1 << 62
"""Largest number in an address, which SQLite can hold."""
Answer = Callable[[], Any]


class BadQuestionError(Exception):
    """A parameter of an address can't be used; the text names it."""


def application(runs: Sequence[ViewedRun], token: str) -> web.Application:
    """Return the application for these runs.

    Args:
        runs: the runs, in the order of their numbers.
        token: secret that each request needs; empty: requests from this machine need none.
    """
    app = web.Application(middlewares=[guarded(token)])
    questions = _Questions(runs)
    of_group = "/api/runs/{run}/groups/{ordinal}"
    app.add_routes(
        [
            web.get("/", questions.page),
            web.get("/static/{name}", questions.page),
            web.get("/api/runs", questions.ask(_all_runs)),
            web.get("/api/runs/{run}", questions.ask(_overview)),
            web.get("/api/runs/{run}/curves", questions.ask(_curves)),
            web.get("/api/runs/{run}/facts", questions.ask(_facts)),
            web.get("/api/runs/{run}/groups", questions.ask(_groups)),
            web.get(of_group, questions.ask(_group)),
            web.get(f"{of_group}/life", questions.ask(_life)),
            web.get(f"{of_group}/images/{{digest}}", questions.ask(_picture, kind="image/png")),
            web.get(f"{of_group}/trajectories/{{completion}}", questions.ask(_trajectory)),
            web.get(f"{of_group}/samples/{{sample}}", questions.ask(_tokens)),
            web.get("/api/runs/{run}/steps/{step}", questions.ask(_step)),
            web.get("/api/runs/{run}/steps/{step}/timeline", questions.ask(_timeline)),
            web.get("/api/runs/{run}/steps/{step}/trace", questions.ask(_trace, "trace-{step}.json")),
        ]
    )
    app.on_cleanup.append(questions.close)
    return app


class _Questions:
    """Handlers of the application."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self._runs = runs
        self._workers = threads.DaemonWorkers(MAX_QUESTIONS, "view")
        # read once: a name in an address never becomes a path
        self._files = {
            file.name: (file.read_bytes(), PAGES[file.name.rpartition(".")[2]])
            for file in resources.files("actors.view").joinpath("static").iterdir()
            if file.name.rpartition(".")[2] in PAGES
        }

    async def page(self, request: web.Request) -> web.Response:
        """Return a file of the pages."""
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            return _answer({"error": "there is no such page"}, 404)
        body, kind = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    def ask(
        self,
        question: Callable[[Sequence[ViewedRun], web.Request], Answer],
        file: str = "",
        kind: str = "application/json",
    ) -> Any:
        """Return the handler of a question, which is answered in a thread.

        Args:
            question: the question.
            file: name under which a browser saves the answer, with `{step}`; empty: the answer is for a page.
            kind: content type of the answer; an answer of another type than JSON is bytes.
        """

        async def handler(request: web.Request) -> web.Response:
            try:
                work = question(self._runs, request)
                future = asyncio.wrap_future(self._workers.submit(partial(_encoded, work)))
                body = await asyncio.wait_for(future, ANSWER_SECONDS)
                response = web.Response(body=body, content_type=kind)
                if file:
                    name = file.format(step=_place(request, "step"))
                    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
                return response
            except BadQuestionError as error:
                return _answer({"error": str(error)}, 400)
            except MissingError as error:
                return _answer({"error": str(error)}, 404)
            except TimeoutError:
                words = f"no answer within {ANSWER_SECONDS:g} s: the disk of the run's files hangs, or is very busy"
                return _answer({"error": words}, 503)
            except ConfigError as error:  # a ledger that can't be read now
                return _answer({"error": "; ".join(error.problems)}, 503)

        return handler

    async def close(self, app: web.Application) -> None:
        """Take no more questions."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _encoded(work: Answer) -> bytes:
    value = work()
    if isinstance(value, bytes):
        return value
    # ASCII: half a surrogate pair of a model's answer stays an escape, which UTF-8 could not hold
    return json.dumps(_plain(value), allow_nan=False, separators=(",", ":")).encode()


def _answer(value: Any, status: int) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


def _plain(value: Any) -> Any:
    """Return a value without NaN and infinity, which columns of a data set may have."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# --- questions -------------------------------------------------------------------------------------------------------


def _all_runs(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return lambda: {"runs": [run.headline() | {"run": index} for index, run in enumerate(runs)]}


def _overview(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return _run(runs, request).overview


def _curves(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    points = _int(request, "points", 1, MAX_POINTS)
    return partial(_run(runs, request).curves, request.query.getall("name", []), POINTS if points is None else points)


def _facts(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return _run(runs, request).facts


def _groups(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).groups, query_of(request))


def _group(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).group, _place(request, "ordinal"))


def _life(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).life, _place(request, "ordinal"))


def _picture(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).picture, _place(request, "ordinal"), request.match_info["digest"])


def _trajectory(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).trajectory, _place(request, "ordinal"), _place(request, "completion"))


def _tokens(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    start, count = _int(request, "start", 0), _int(request, "count", 1, MAX_TOKENS)
    of = (_place(request, "ordinal"), _place(request, "sample"))
    return partial(_run(runs, request).tokens, *of, start or 0, MAX_TOKENS if count is None else count)


def _step(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).step, _place(request, "step"))


def _timeline(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).timeline, _place(request, "step"))


def _trace(runs: Sequence[ViewedRun], request: web.Request) -> Answer:
    return partial(_run(runs, request).trace, _place(request, "step"))


def query_of(request: web.Request) -> Query:
    """Return the filters of an address; a parameter that is absent or empty filters nothing.

    Raises:
        BadQuestionError: a parameter can't be used.
    """
    text = request.query.get
    purpose = text("purpose") or "train"
    if purpose not in ("train", "eval"):
        raise BadQuestionError(f"purpose: is train or eval, got {purpose!r}")
    limit = _int(request, "limit", 1, MAX_GROUPS)
    return Query(
        purpose=cast(Literal["train", "eval"], purpose),
        environment=text("environment", ""),
        state=text("state", ""),
        reason=text("reason", ""),
        stop=text("stop", ""),
        steps=(_int(request, "step_min"), _int(request, "step_max")),
        rewards=(_float(request, "reward_min"), _float(request, "reward_max")),
        characters=(_int(request, "length_min"), _int(request, "length_max")),
        text=text("text", ""),
        before=_int(request, "before"),
        limit=PAGE_GROUPS if limit is None else limit,
    )


def _run(runs: Sequence[ViewedRun], request: web.Request) -> ViewedRun:
    number = _place(request, "run")
    if not 0 <= number < len(runs):
        raise MissingError(f"run {number}: there are {len(runs)}, from 0")
    return runs[number]


def _place(request: web.Request, name: str) -> int:
    return _number(name, request.match_info[name])


def _number(name: str, text: str, low: int = -LARGEST, high: int = LARGEST) -> int:
    try:
        value = int(text)
    except ValueError:
        raise BadQuestionError(f"{name}: needs a whole number, got {text[:40]!r}") from None
    if not low <= value <= high:
        raise BadQuestionError(f"{name}: needs {low} to {high}, got {text[:40]}")
    return value


def _int(request: web.Request, name: str, low: int = -LARGEST, high: int = LARGEST) -> int | None:
    text = request.query.get(name, "")
    return _number(name, text, low, high) if text else None


def _float(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    try:
        value = number(float(text)) if text else None
    except ValueError:
        value = None
    if text and value is None:
        raise BadQuestionError(f"{name}: needs a number, got {text[:40]!r}")
    return value
