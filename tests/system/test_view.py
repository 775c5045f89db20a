"""The pages of `actors view` in a real headless Chromium.

Every page, every filter, keys, both themes, narrow windows, a run that grows, a dead run, and hostile texts. Pictures
of all pages go to the folder that VIEW_PICTURES names.
"""

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.datasets.prepared import digest_of
from actors.packer.sample_images import FOLDER
from actors.telemetry import writer
from tests.actors.ops.trace.timelines import ten_steps, write_spans
from tests.actors.view.one_token import loss_by_hand, short_quickstart
from tests.actors.view.runs import MadeGroup, MadeRun, made_config, record_values
from tests.actors.view.test_pictures import shown as shown_images
from tests.images import png
from tests.system.chromium import Page, browser
from tests.system.tools import missing, tool
from tests.trace_format import problems_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
HOSTILE = [
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 2'><svg onload='window.hit = 3'>",
    "</pre></div><iframe srcdoc='<script>parent.hit = 4</script>'></iframe><a href='javascript:window.hit = 5'>x</a>",
    "\u202eevil \u2066\u200f\ufeff right to left \x1b[31mred\x07 and אבג",
    "x" * (1 << 20),
]
STEERING = re.compile("[\x07\x1b\u200f\u202e\u2066\ufeff]")
"""Characters of these texts that are written out, since they are invisible or turn the line."""
NARROW, WIDE = 360, 1280


@pytest.fixture(scope="module")
def program() -> str:
    """The browser's program."""
    return tool("chromium", "apt-get install chromium")


@pytest.fixture(scope="module")
def axe() -> str:
    """Source of axe-core, out of a package whose own code is not imported."""
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        missing("install axe-playwright-python (pip install -r tests/system/requirements.txt)")
    return Path(spec.origin).with_name("axe.min.js").read_text()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what is written."""
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 60.0)


@contextmanager
def viewing(folder: Path, *runs: MadeRun | Path) -> Iterator[str]:
    """The address of the program `actors view` about these runs, or the runs in these folders."""
    outputs = [str(run if isinstance(run, Path) else run.config.output) for run in runs]
    command = [sys.executable, "-m", "actors", "view", *outputs, "--port", "0", "--cache", str(folder / "cache")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(120.0) == 0


def make_runs(folder: Path) -> tuple[MadeRun, MadeRun, MadeRun]:
    """A living run with all that a page can show, a dead one, and one of hostile texts."""
    recorded = {"telemetry": {"token_details": 3}, "trainer": {"max_steps": 40, "loss": {"type": "surogate"}}}
    alive, dead = (MadeRun(made_config(folder / name, name, **recorded)) for name in ("alpha", "beta"))
    hostile = MadeRun(made_config(folder / "gamma", "gamma", packer={"sequence_len": 2 << 20, "groups_per_step": 1}))
    for run, steps in ((alive, 18), (dead, 26)):
        for step in range(steps):
            if step % 8 == 0:
                run.add_evaluation(step)
            messages = run.add_step(sampled=2, dropped=int(step % 8 == 5))
            if run is alive:
                record_values(run.config, messages, run.last, 3)
        run.save(8)
    write_spans(alive.config.output / "events", ten_steps())
    hostile.add_step(groups=[MadeGroup("a <b>hostile</b> prompt", HOSTILE, [1.0, 0.0, 0.0, 0.0])])
    alive.add_issued(failures=1)
    # ahead of its time, so that it is alive however long the test takes
    alive.report(age=-3600.0)
    dead.report(age=4000.0)
    return alive, dead, hostile


async def check(page: Page, address: str) -> None:
    """Nothing went wrong: no error, no code out of a text, no request to another host, no control without a name."""
    assert page.errors == []
    assert await page.value("window.hit") is None
    assert await page.value("document.querySelectorAll('main script, main iframe, main img, main object').length") == 0
    hosts = {urllib.parse.urlsplit(request).netloc for request in page.requests if request.startswith("http")}
    assert hosts <= {urllib.parse.urlsplit(address).netloc}
    assert await page.unnamed() == []
    assert await page.value("document.querySelectorAll('h1').length") == 1


COLOURS = (
    "logprob", "advantage", "version", "loss", "turn", "trainer_logprob", "ratio", "entropy", "value", "rule",
)  # fmt: skip
"""Values by which tokens are coloured."""


async def picture(page: Page, name: str) -> None:
    """A picture of the whole page, for people."""
    if folder := os.environ.get("VIEW_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        await page.picture(Path(folder) / f"{name}.png", whole=True)


PAGES = {
    "overview": "?runs=0,1",
    "groups": "?page=groups&run=0",
    "search": "?page=groups&run=0&text=step+by&reward_min=1",
    "group": "?page=group&run=0&group=20",
    "hostile": "?page=group&run=2&group=0",
    "trajectory": "?page=trajectory&run=0&group=20&completion=1",
    "tools": "?page=trajectory&run=0&group=44&completion=1&colour=origin",
    "rules": "?page=trajectory&run=0&group=20&completion=3&colour=rule",
    "not-recorded": "?page=trajectory&run=1&group=20&completion=1",
    "step": "?page=step&run=0&step=9",
    "no-timeline": "?page=step&run=0&step=12",
}


@pytest.mark.usefixtures("patience")
async def test_every_page_is_drawn_dark_and_light_wide_and_narrow(tmp_path: Path, program: str) -> None:
    """No page is wider than its window, shows an error, or loads anything of another host."""
    runs = make_runs(tmp_path)
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            for width, dark in ((WIDE, False), (WIDE, True), (NARROW, False)):
                await page.size(width, 900, dark)
                for name in PAGES:
                    await opened(page, address, name)
                    await check(page, address)
                    assert await page.value("document.documentElement.scrollWidth") <= width, (name, width)
                    heading = (await page.texts("h1"))[0]
                    assert "can't be shown" not in heading, name
                    await picture(page, f"{name}-{width}{'-dark' if dark else ''}")
            assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 250)"
            await page.size(WIDE, 900, dark=True)
            assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 28)"
            await page.press("t", "t")  # dark, then light, whatever the system prefers
            assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 250)"
    for run in runs:
        run.close()


async def opened(page: Page, address: str, name: str) -> None:
    """Open one of the pages, and wait until all of its parts are there."""
    await page.open(address + PAGES[name])
    if "timeline" in name or name == "step":
        await page.until("!!document.querySelector('#timeline .timeline, #timeline .words')")
    if name in ("groups", "search"):
        await page.until("document.querySelectorAll('.row').length > 3")


@pytest.mark.usefixtures("patience")
async def test_images_of_a_prompt_are_shown_between_its_texts(tmp_path: Path, program: str, axe: str) -> None:
    """On the pages of group and trajectory, dark and light, no wider than the window; a lost one is told in words."""
    run = MadeRun(made_config(tmp_path / "alpha", "alpha"))
    small, wide, lost = png(48, 64), png(200, 1600, seed=1), png(8, 8, seed=2)
    run.add_step(groups=[shown_images(small, wide, lost)])
    run.add_step()
    run.compact(1)
    (run.config.output / FOLDER / digest_of(lost)).unlink()
    with viewing(tmp_path, run) as address:
        async with browser(program) as page:
            for width, dark in ((WIDE, False), (WIDE, True), (NARROW, False)):
                await page.size(width, 900, dark)
                for name in ("?page=group&run=0&group=0", "?page=trajectory&run=0&group=0&completion=1"):
                    await page.open(address + name)
                    await page.until(
                        "[...document.images].every((one) => (one.scrollIntoView(), one.complete && one.naturalWidth))"
                    )
                    drawn = "[...document.images].map((one) => [one.naturalWidth, one.naturalHeight, one.alt])"
                    assert await page.value(drawn) == [
                        [64, 48, f"image 64x48 {digest_of(small)[:6]}"],
                        [1024, 128, f"image 1600x200 {digest_of(wide)[:6]}"],
                    ]
                    parts = "[...document.querySelector('.message').children].map((one) => one.tagName)"
                    assert await page.value(parts) == ["DIV", "PRE", "IMG", "IMG", "PRE"]
                    assert (await page.texts(".message pre"))[1].startswith(f"[image {digest_of(lost)}] this square")
                    assert await page.value("document.documentElement.scrollWidth") <= width
                    assert (page.errors, await page.unnamed(), await page.findings(axe)) == ([], [], [])
                    await picture(page, f"images-{name[6]}-{width}{'-dark' if dark else ''}")
            (run.config.output / FOLDER / digest_of(wide)).write_bytes(small)
            await page.open(f"{address}?page=group&run=0&group=0")
            await page.until(f"document.querySelector('.message').innerText.includes('[image {digest_of(wide)}]')")
    run.close()


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_axe_has_no_serious_finding_on_any_page(tmp_path: Path, program: str, axe: str, dark: bool) -> None:
    """Contrast, names, roles and order, on every page, on the list of keys, and on a page that can't be shown."""
    runs = make_runs(tmp_path)
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900, dark)
            findings = {}
            for name in PAGES:
                await opened(page, address, name)
                findings[name] = await page.findings(axe)
            await page.press("?")
            findings["keys"] = await page.findings(axe)
            await page.open(f"{address}?page=group&run=0&group=999999")
            findings["missing"] = await page.findings(axe)
            assert {name: found for name, found in findings.items() if found} == {}
            # the checker is at work: a control without a name is found
            await page.value("document.querySelector('main').append(document.createElement('button'))")
            assert any("button-name" in one for one in await page.findings(axe))
    for run in runs:
        run.close()


@pytest.mark.usefixtures("patience")
async def test_the_overview_shows_both_runs_and_follows_the_living_one(tmp_path: Path, program: str) -> None:
    """What limits it, evaluations, curves of both; a new step appears by itself, and a death is shown."""
    alive, dead, hostile = make_runs(tmp_path)
    with viewing(tmp_path, alive, dead) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900)
            await page.open(address)
            text = (await page.texts("main"))[0]
            assert "Limited by sampling" in text
            assert "the trainer waits 31% of the time" in text
            assert "it has been killed, is frozen" in text
            assert await page.texts(".card .badge") == ["running", "stopped"]
            titles = await page.texts(".chart figcaption")
            assert {"Mean reward", "Lag, mean of a step", "Exact match, sums"} <= set(titles)
            assert await page.value("document.querySelectorAll('.chart svg path[stroke]').length") >= 2 * 8
            await page.point(".chart-picture")
            assert any("version " in values for values in await page.texts(".chart-values"))
            alive.add_step()
            alive.report(age=-3600.0)
            await page.until("document.querySelector('.card').innerText.includes('19 of 40 steps')")
            alive.report(age=1000.0)
            await page.until("document.querySelector('.card .badge').innerText === 'stopped'")
            assert "runs=1" not in await page.value("location.search")
            await page.point(".runs label:first-child input", click=True)
            await page.until("location.search.includes('runs=1')")
            await page.ready()
            assert await page.value("document.querySelectorAll('.card').length") == 1
            await check(page, address)
    for run in (alive, dead, hostile):
        run.close()


async def fill(page: Page, name: str, value: str) -> None:
    """Give a filter a value, as a user does."""
    await page.value(
        f"(() => {{ const one = document.querySelector('[name={name}]'); one.value = {value!r};"
        f" one.dispatchEvent(new Event(one.tagName === 'SELECT' ? 'change' : 'input', {{bubbles: true}})); }})()"
    )
    quoted = urllib.parse.quote_plus(value)
    await page.until(
        f"location.search.includes('{name}={quoted}')" if value else f"!location.search.includes('{name}=')"
    )
    await page.ready()


async def shown(page: Page) -> list[int]:
    """Ordinals of the list."""
    return [int(text.removeprefix("group ")) for text in await page.texts(".row .ordinal")]


@pytest.mark.usefixtures("patience")
async def test_every_filter_narrows_the_list_and_is_in_the_address(tmp_path: Path, program: str) -> None:
    """A page that is opened by this address shows the same list; pages follow each other without gap or repetition."""
    runs = make_runs(tmp_path)
    groups = len(runs[0].store.groups())
    trajectories = 4 * 18 * 3 + 6  # six of evaluations, of a single completion
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900)
            await page.open(f"{address}?page=groups&run=0")
            await page.until(f"document.querySelector('[role=status]').innerText.includes('{trajectories} traj')")
            await page.open(f"{address}?page=groups&run=0")
            everything = await shown(page)
            assert len(everything) == 25
            for name, value in {
                "environment": "shop", "state": "dropped", "reason": "stale", "stop": "length", "reward_min": "1.1",
                "reward_max": "0", "length_min": "80", "length_max": "3", "step_min": "15", "step_max": "3",
                "text": "Step BY step", "purpose": "eval",
            }.items():  # fmt: skip
                await fill(page, name, value)
                narrowed = await shown(page)
                assert narrowed, name
                assert narrowed != everything, name
                await page.open(await page.value("location.href"))
                assert await shown(page) == narrowed, name
                assert await page.value(f"document.querySelector('[name={name}]').value") == value
                await fill(page, name, "")
                assert await shown(page) == everything, name
            await page.point("#older", click=True)
            await page.until("location.search.includes('before=')")
            await page.ready()
            older = await shown(page)
            assert min(everything) > max(older)
            assert len(everything) + len(older) >= min(groups, 50) - 1
            await page.press("p")
            await page.until("!location.search.includes('before=')")
            await page.ready()
            assert await shown(page) == everything
            await check(page, address)
    for run in runs:
        run.close()


@pytest.mark.usefixtures("patience")
async def test_keys_lead_from_the_list_to_a_token(tmp_path: Path, program: str) -> None:
    """g, j, Enter, n, arrows: a group, its first completion, and what is known of each token."""
    runs = make_runs(tmp_path)
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900)
            await page.open(address)
            await page.press("g")
            await page.until("document.querySelectorAll('.row').length > 20 && location.search.includes('page=groups')")
            await page.press("/")
            assert await page.value("document.activeElement.name") == "text"
            await page.press("Escape", "j", "j", "j")
            assert "group" in await page.value("document.activeElement.innerText")
            ordinal = int((await page.value("document.activeElement.innerText")).split()[1])
            await page.press("Enter")
            await page.until(f"document.querySelector('h1').innerText === 'Group {ordinal}'")
            assert await page.value("document.querySelectorAll('.completion').length") == 4
            life = await page.texts(".life li")
            assert [line.split()[0] for line in life][:4] == ["issued", "sampled", "settled", "composed"]
            await page.press("n")
            await page.until(f"document.querySelector('h1').innerText === 'Completion 0 of group {ordinal}'")
            await page.until("document.querySelectorAll('.token').length > 0")
            completion = 0
            if await page.value("document.querySelectorAll('.token').length") < 4:  # a number alone
                completion = 1
                await page.press("]")
                await page.until(f"document.querySelector('h1').innerText === 'Completion 1 of group {ordinal}'")
                await page.until("document.querySelectorAll('.token').length > 4")
            await page.value("document.querySelector('.token').focus()")
            detail = (await page.texts(".token-detail"))[0]
            for words in (
                "engine's logprob",
                "probability",
                "advantage",
                "version",
                "in the loss",
                "ratio",
                "entropy",
                "rule",
            ):
                assert words in detail
            before = detail
            await page.press("ArrowRight")
            assert (await page.texts(".token-detail"))[0] != before
            colours = []
            for by in COLOURS:
                await page.value(
                    f"(() => {{ const one = document.querySelector('#colour'); one.value = '{by}';"
                    " one.dispatchEvent(new Event('change', {bubbles: true})); })()"
                )
                await page.until(f"location.search.includes('colour={by}')")
                await page.ready()
                colours.append(
                    await page.value("[...document.querySelectorAll('.token')].map((t) => t.style.background).join()")
                )
            assert len(set(colours)) >= 7
            await page.press("]")
            following = f"Completion {completion + 1} of group {ordinal}"
            await page.until(f"document.querySelector('h1').innerText === '{following}'")
            await page.press("s")
            await page.until("document.querySelector('h1').innerText.startsWith('Step ')")
            assert await page.value("document.querySelectorAll('.packing-row a').length") == 12
            await page.press("?")
            assert await page.value("document.querySelector('#help').open")
            await check(page, address)
    for run in runs:
        run.close()


@pytest.mark.usefixtures("patience")
async def test_hostile_texts_are_shown_as_they_are(tmp_path: Path, program: str) -> None:
    """Letter by letter on the page of the trajectory; nothing of them has run."""
    runs = make_runs(tmp_path)
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900)
            await page.open(f"{address}?page=group&run=2&group=0")
            await check(page, address)
            for completion, text in enumerate(HOSTILE):
                await page.open(f"{address}?page=trajectory&run=2&group=0&completion={completion}")
                whole = await page.value("[...document.querySelectorAll('.message .text')].at(-1).textContent")
                assert whole == STEERING.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text)
                await asyncio.sleep(0.2)  # time for code, were there any
                await check(page, address)
    for run in runs:
        run.close()


@pytest.mark.usefixtures("patience")
async def test_tokens_without_a_record_name_the_key_and_offer_no_colour_by_it(tmp_path: Path, program: str) -> None:
    """A run without `telemetry.token_details` for its steps; a colour in the address falls back to the engine's."""
    runs = make_runs(tmp_path)
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            await page.open(f"{address}?page=trajectory&run=2&group=0&colour=ratio")
            assert "Set telemetry.token_details: 1" in (await page.texts("#not-recorded"))[0]
            assert await page.value("document.querySelector('#colour').value") == "logprob"
            closed = await page.value(
                "[...document.querySelectorAll('#colour option:disabled')].map((one) => one.value)"
            )
            assert closed == ["trainer_logprob", "ratio", "rule", "entropy", "value"]
            await page.value("document.querySelector('.token').focus()")
            assert "not recorded" in (await page.texts(".token-detail"))[0]
            await check(page, address)
    for run in runs:
        run.close()


FACTS = (
    "Object.fromEntries([...document.querySelectorAll('{} .facts > div')]"
    ".map((one) => [one.firstChild.innerText, one.lastChild.innerText]))"
)
"""Names and values that a part of the page shows."""


async def test_the_loss_of_a_token_of_the_quickstart_is_recomputed_from_what_chromium_shows(
    tmp_path: Path, program: str
) -> None:
    """To 1e-5, each token of a page: logprobs, advantage and keys as a person reads them, and the formula by hand."""
    output = short_quickstart(tmp_path)
    with viewing(tmp_path, output) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900)
            await page.open(f"{address}?page=step&run=0&step=3")
            ordinal = await page.value(
                "fetch('/api/runs/0/steps/3').then((r) => r.json()).then((v) => v.packing.ordinals[0])"
            )
            largest = 0.0
            for completion in range(4):
                await page.open(f"{address}?page=trajectory&run=0&group={ordinal}&completion={completion}&colour=ratio")
                loss = await page.value(FACTS.format("#loss"))
                keys = {name.removeprefix("trainer.loss."): value for name, value in loss.items()}
                for index in range(await page.value("document.querySelectorAll('.token').length")):
                    await page.value(f"document.querySelectorAll('.token')[{index}].focus()")
                    token = await page.value(FACTS.format(".token-detail"))
                    q = float(token["engine's logprob"].split()[0])
                    shown = {"q": q, "logp": float(token["trainer's logprob"])}
                    shown["advantage"] = float(token["advantage in the loss"])
                    is_kept = token["rule"].startswith("none")
                    by_hand = loss_by_hand(shown, keys) if is_kept else 0.0
                    assert float(token["loss before the average"]) == pytest.approx(by_hand, abs=1e-5)
                    part = by_hand / float(keys["loss tokens of the step"].replace(",", ""))
                    assert float(token["part of the step's loss"]) == pytest.approx(part, abs=1e-5)
                    largest = max(largest, abs(by_hand))
            assert largest > 0.1
            await check(page, address)


@pytest.mark.usefixtures("patience")
async def test_a_step_has_a_timeline_of_all_actors_and_a_file_for_perfetto(tmp_path: Path, program: str) -> None:
    """Each span at its place in time, told by pointer and arrow keys; the file is one that Perfetto's format allows."""
    runs = make_runs(tmp_path)
    with viewing(tmp_path, *runs) as address:
        async with browser(program) as page:
            await page.size(WIDE, 900)
            await page.open(f"{address}?page=step&run=0&step=9")
            await page.until("document.querySelectorAll('#timeline .span').length > 5")
            assert await page.texts("#timeline h3") == ["packer-0", "trainer-0", "inference-0", "rollout-0", "reward-0"]
            # half of the step, from a quarter of it on
            box = await page.value(
                "(() => { const row = [...document.querySelectorAll('.lanes')][1].querySelector('svg');"
                " const whole = row.getBoundingClientRect();"
                " return [...row.children].map((one) => { const box = one.getBoundingClientRect();"
                " return [(box.x - whole.x) / whole.width, box.width / whole.width]; }); })()"
            )
            # wait for batch, the step, and in it forward and backward, publish weights
            expected = [[0.0, 0.25], [0.25, 0.75], [0.25, 0.5], [0.75, 0.25]]
            assert [pytest.approx(one, abs=0.01) for one in expected] == box
            await page.point("#timeline .span.waits")
            await page.until("document.querySelector('.span-detail').innerText.includes('waits')")
            await page.value("document.querySelector('.timeline').focus()")
            before = (await page.texts(".span-detail"))[0]
            await page.press("ArrowRight")
            assert (await page.texts(".span-detail"))[0] != before
            link = await page.value("document.querySelector('#trace').getAttribute('href')")
            document = await page.value(f"fetch({link!r}).then((answer) => answer.json())")
            assert problems_of(document) == []
            assert document["otherData"]["steps"] == "9..9"
            await page.open(f"{address}?page=step&run=0&step=12")
            await page.until("!!document.querySelector('#timeline .words')")
            assert "telemetry.events_bytes" in (await page.texts("#timeline"))[0]
            await check(page, address)
    for run in runs:
        run.close()
