"""The page about a run: complete, alone in one file, and with hostile texts shown as texts."""

import base64
import io
import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from actors.cli import main
from actors.datasets.prepared import digest_of
from actors.ops.compare.figures import Evaluated
from actors.ops.compare.picture import MEAN_OF
from actors.ops.report import command
from actors.ops.report.command import changed_keys, content_of
from actors.ops.report.curves import curves_of
from actors.ops.report.page import LONGEST_TEXT, shown
from actors.ops.report.picks import picked
from actors.ops.report.pictures import draw
from actors.ops.report.svg import POINTS, curve, thinned
from actors.packer.sample_images import FOLDER, sizes_of
from schemas.config import load_config
from tests.actors.ops.compare.test_compare import EVALS, leave_run
from tests.images import png
from tests.ring.harness import ring_config

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "section", "div", "svg", "text", "path",
    "circle", "table", "tr", "th", "td", "pre", "details", "summary", "figure", "figcaption",
}  # fmt: skip
"""Elements that a page may have; none of them runs or loads anything."""
HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></div><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<!-- ", "]]>", "&lt;b&gt;&amp;", "<style>*{display:none}</style>", "{{7*7}}", "javascript:alert(1)",
    "\x00\x1b[31mred\x07\x9b", "\u202emoc.live\u2066", "\ufeff\u200b\u2028", "\ud800", "שלום مرحبا", "e\u0301" * 50,
]  # fmt: skip


class Elements(HTMLParser):
    """Elements with their attributes, and the text in between."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the element."""
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.text += data


def group(step: int, completions: list[str], values: list[float | None], **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "step": step, "ordinal": 8 * step, "purpose": "train", "environment": "reverse_text", "prompt": "ab=",
        "columns": {}, "completions": completions, "stop_conditions": ["stop"] * len(completions), "reward": values,
        "rewards": {"characters_in_place": values}, "advantages": [0.0] * len(completions), "versions": [step - 1],
    } | more  # fmt: skip


def with_samples(output: Path, groups: list[dict[str, Any]]) -> Path:
    """Write samples of a run; return its folder."""
    (output / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in groups))
    return output


def report(output: Path, *options: str) -> str:
    """The page, written by the command; pictures, which take a second, only where they are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if "--pictures" not in options:
            patch.setattr("actors.ops.report.command.can_draw", lambda: False)
        assert main(["report", str(output), *options]) == 0
    return (output / "report.html").read_text(encoding="utf-8")


def test_the_page_has_all_of_a_run(tmp_path: Path, capsys: Any) -> None:
    """Result, curves, evaluations, costs, completions by choice, configuration."""
    groups = [group(n, [f"worse {n}", f"better {n}"], [0.1 * n, 0.2 * n]) for n in range(1, 5)]
    output = with_samples(leave_run(tmp_path), groups)
    text = report(output, "--num", "2", "--price", "12")
    assert capsys.readouterr().out == f"wrote {output / 'report.html'}\n"
    page = Elements(text)
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Curves", "Evaluations", "Costs", "Completions, best", "Completions, worst", "Completions, by chance",
        "Configuration",
    ]  # fmt: skip
    for words in (
        "done: 8 steps in 30 s", "sampled reward", "reverse_text: best 0.7500 at version 4, 0.5000 at the newest",
        "20.0%", "800", "25% of the time", "0.10", "better 4", "max_steps: 8", "groups_per_step: 3",
    ):  # fmt: skip
        assert words in page.text, words
    best = text[text.index("Completions, best") : text.index("Completions, worst")]
    assert re.findall(r"better \d|worse \d", best) == ["better 4", "better 3"]
    worst = text[text.index("Completions, worst") : text.index("Completions, by chance")]
    # worse 2 and better 1 have the same reward
    assert re.findall(r"better \d|worse \d", worst) == ["worse 1", "worse 2"]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """No script, no link, no address but names of XML."""
    text = report(with_samples(leave_run(tmp_path), [group(1, ["a"], [1.0])]))
    page = Elements(text)
    assert {tag for tag, _ in page.found} <= ALLOWED
    assert not {name for _, attributes in page.found for name in attributes if name.startswith("on")}
    assert not {name for _, attributes in page.found for name in attributes if name in ("src", "href", "action")}
    assert "url(" not in text
    assert "@import" not in text
    policy = next(attributes for tag, attributes in page.found if "http-equiv" in attributes)
    assert str(policy["content"]).startswith("default-src 'none'")


def with_images(output: Path, *files: bytes, num_groups: int = 1) -> Path:
    """Keep these images with samples of a run whose prompts show all of them; return the run's folder."""
    digests = [digest_of(data) for data in files]
    (output / FOLDER).mkdir()
    for digest, data in zip(digests, files, strict=True):
        (output / FOLDER / digest).write_bytes(data)
    parts = [{"type": "image", "digest": digest} for digest in digests]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    images = sizes_of(dict(zip(digests, files, strict=True)))
    groups = [group(n, ["a"], [1.0], prompt=prompt, images=images) for n in range(1, num_groups + 1)]
    return with_samples(output, groups)


def sources(text: str) -> list[tuple[str | None, str | None]]:
    """Words and addresses of the images of a page."""
    return [(each.get("alt"), each.get("src")) for tag, each in Elements(text).found if tag == "img"]


def test_images_of_prompts_are_in_the_page_itself(tmp_path: Path) -> None:
    """As PNG files that are encoded for the page; the text says the same words where the image stands."""
    small, large = png(48, 64), png(600, 300, seed=1)
    text = report(with_images(leave_run(tmp_path), small, large))
    words = [f"[image 64x48 {digest_of(small)[:6]}]", f"[image 300x600 {digest_of(large)[:6]}]"]
    found = sources(text)
    # the only completion is the best, the worst, and one by chance
    assert [alt for alt, _ in found] == words * 3
    sizes = []
    for _, source in found[:2]:
        head, _, data = str(source).partition(",")
        assert head == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            sizes.append(image.size)
    assert sizes == [(64, 48), (128, 256)]
    assert f"{words[0]} {words[1]} Which?" in Elements(text).text
    assert "img-src data:" in text


def test_a_report_without_an_image_has_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that is lost, one that is no image, an image beyond the page's limit, or without Pillow."""
    image, script, lost = png(48, 64), b"<svg onload=alert(1)>", png(8, 8)
    output = with_images(leave_run(tmp_path), image, script, lost, num_groups=3)
    (output / FOLDER / digest_of(lost)).unlink()
    text = report(output)
    assert {alt for alt, _ in sources(text)} == {f"[image 64x48 {digest_of(image)[:6]}]"}
    length = len(str(sources(text)[0][1]))
    assert len(sources(text)) == 9
    for limit, number in ((9 * length, 9), (9 * length - 1, 0)):
        monkeypatch.setattr(command, "MAX_IMAGES_CHARACTERS", limit)
        text = report(output)
        assert len(sources(text)) == number
    monkeypatch.undo()
    monkeypatch.setattr(command, "can_show", lambda: False)
    text = report(output)
    assert sources(text) == []
    for words in ("64x48 " + digest_of(image)[:6], digest_of(script)[:6], "8x8 " + digest_of(lost)[:6]):
        assert f"[image {words}]" in Elements(text).text


@pytest.mark.parametrize("place", ["completion", "prompt", "messages", "names"])
def test_hostile_texts_are_shown_as_texts(tmp_path: Path, place: str) -> None:
    """Wherever a text of the model, of the data or of the user stands: not an element more than with plain texts."""
    counts = []
    for name, texts in (("plain", ["x"] * len(HOSTILE)), ("hostile", HOSTILE)):
        groups = []
        for n, text in enumerate(texts, 1):
            more: dict[str, Any] = {}
            if place == "prompt":
                more = {"prompt": [{"role": text, "content": text}]}
            elif place == "messages":
                call = {"function": {"name": text, "arguments": text}}
                more = {"messages": [[{"role": text, "content": text, "tool_calls": [call]}]]}
            elif place == "names":
                more = {"environment": text, "rewards": {text: [1.0]}, "stop_conditions": [text]}
            groups.append(group(n, [text if place == "completion" else "x"], [1.0], **more))
        written = report(with_samples(leave_run(tmp_path / name), groups), "--num", "99")
        page = Elements(written)
        counts.append([tag for tag, _ in page.found])
        if name == "hostile":
            assert {tag for tag, _ in page.found} <= ALLOWED
            for text in HOSTILE:
                # what is not steering is there, letter by letter
                for part in re.split("[^ -~\u05d0-\u06ff]+", text):
                    assert part in page.text
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066\ufeff\u200b\u2028]", written)
            assert "\\u202e" in written
    assert counts[0] == counts[1]


def test_a_long_text_loses_its_middle() -> None:
    """A million letters in a row stay a page that opens."""
    text = shown("a" * 500_000 + "b" * 500_000)
    assert len(text) < 2 * LONGEST_TEXT
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert f"{1_000_000 - LONGEST_TEXT} characters left out" in text


@pytest.mark.parametrize("num_groups", [0, 1, 3, 2000])
def test_completions_are_chosen_in_one_pass(num_groups: int) -> None:
    """The best and the worst by reward; without a reward a completion is among those by chance alone."""
    groups = [group(n, ["a", "b", "c"], [n / 10_000, None, -n / 10_000]) for n in range(1, num_groups + 1)]
    found = picked(iter(groups), 2)
    rewards = {words: [pick.reward for pick in picks] for words, picks in found.items()}
    some = min(num_groups, 2)
    assert rewards["best"][:some] == [n / 10_000 for n in range(num_groups, num_groups - some, -1)]
    assert rewards["worst"][:some] == [-n / 10_000 for n in range(num_groups, num_groups - some, -1)]
    assert len(rewards["by chance"]) == min(2, 3 * num_groups)
    assert picked(iter(groups), 2) == found


def test_a_group_has_one_of_the_best_and_one_of_the_worst() -> None:
    """Completions of a group are often the same text."""
    found = picked([group(1, ["a", "b", "c"], [1.0, 1.0, 0.5]), group(2, ["d", "e", "f"], [0.0, 0.2, None])], 3)
    assert [pick.reward for pick in found["best"]] == [1.0, 0.2]
    assert [pick.reward for pick in found["worst"]] == [0.0, 0.5]
    assert len(found["by chance"]) == 3


def test_the_choice_by_chance_is_even() -> None:
    """Over a thousand seeds each tenth of a hundred completions is chosen about a tenth of the time."""
    groups = [group(n, ["a"], [0.0]) for n in range(100)]
    tenths = [0] * 10
    for seed in range(1000):
        (pick,) = picked(groups, 1, seed)["by chance"]
        tenths[pick.group["step"] // 10] += 1
    assert all(60 < number < 140 for number in tenths), tenths


@pytest.mark.parametrize("steps", [1, 2, POINTS, 25 * POINTS])
def test_a_curve_has_few_points_within_its_frame(steps: int) -> None:
    """The mean of all points is that of all values; a constant is drawn too."""
    values = {step: float(step % 7) for step in range(1, steps + 1)}
    assert len(thinned(values)) <= POINTS
    for found in (values, dict.fromkeys(values, 1.0)):
        picture = curve("title <b>", found)
        assert "title &lt;b&gt;" in picture
        heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", picture)]
        assert all(0 <= y <= 170 for y in heights)
    assert "no values" in curve("title", {})


@pytest.mark.parametrize("summary", [True, False])
def test_a_run_without_samples_or_evaluations_has_a_page(tmp_path: Path, summary: bool) -> None:
    """Also a run that has just begun; parts without content are left out."""
    output = leave_run(tmp_path, steps=1, summary=summary, evals=[])
    text = report(output)
    assert "Completions" not in text
    assert "Evaluations" not in text
    (output / "metrics.jsonl").unlink()
    (output / "evals.jsonl").unlink()
    assert "Configuration" in report(output)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    """And a place that can't be written to."""
    assert main(["report", str(tmp_path)]) == 2
    output = leave_run(tmp_path / "run")
    assert main(["report", str(output), "--output", str(tmp_path / "none" / "page.html")]) == 2
    assert "--output: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_long_run_has_a_page_within_seconds(tmp_path: Path) -> None:
    """20 000 steps and 20 000 groups of 8: read once, and the page stays small."""
    output = with_samples(leave_run(tmp_path, 20_000), [group(n, ["a"] * 8, [0.5] * 8) for n in range(20_000)])
    started = time.process_time()
    text = report(output)
    assert time.process_time() - started < 30
    assert len(text) < 300_000
    assert content_of(load_config(output / "config.resolved.yaml"), 4, None).figures.steps == 20_000


def colours(path: Path) -> int:
    """Number of different colours of a picture, read by the program that people look with."""
    pixels = imread(path)
    assert pixels.shape == (384, 840, 4)
    # the four bytes of a pixel as one number: rows of an array are sorted a hundred times slower
    return len(np.unique((pixels.reshape(-1, 4) * 255).astype(np.uint8).view(np.uint32)))


@pytest.mark.parametrize("steps", [1, MEAN_OF, 1200])
def test_each_curve_is_a_picture_too(tmp_path: Path, steps: int) -> None:
    """Those of the page and no other, in the folder asked for; a second report replaces them."""
    output = leave_run(tmp_path / "run", steps, evals=EVALS if steps > 1 else [])
    for _ in range(2):
        text = report(output, "--pictures", str(tmp_path / "for" / "slides"))
    written = sorted(path.name for path in (tmp_path / "for" / "slides").iterdir())
    of_evals = ["eval-1-reverse_text.png"] if steps > 1 else []
    assert written == [*of_evals, "reward_mean.png", "seconds_wait_batch.png", "tokens.png"]
    assert text.count("<svg ") == len(written)
    # the grey of the steps, the blue of their mean, and what lies between them and the paper
    assert all(colours(tmp_path / "for" / "slides" / name) > 20 for name in written)
    assert not (output / "report-pictures").exists()


def test_pictures_follow_the_page(tmp_path: Path, capsys: Any) -> None:
    """In a folder next to it, with its name."""
    output, page = leave_run(tmp_path / "run"), tmp_path / "mine"
    for options, wrote, folder in (
        ([], output / "report.html", output / "report-pictures"),
        (["--output", str(page)], page, tmp_path / "mine-pictures"),
    ):
        assert main(["report", str(output), *options]) == 0
        assert capsys.readouterr().out == f"wrote {wrote}\nwrote 4 pictures to {folder}\n"
        assert len(list(folder.iterdir())) == 4


def test_hostile_names_of_evaluations_are_drawn_and_name_no_other_file(tmp_path: Path) -> None:
    """No formula, no place outside of the folder, no file of another evaluation."""
    labels = [*HOSTILE, "../../up", "/etc/up", "$\\frac{$", "x" * 300, "x" * 301]
    curves = curves_of({label: Evaluated("$exact^{match", {0: 0.5, 4: 1.0}) for label in labels}, {})
    paths = draw(curves, tmp_path / "pictures")
    assert len({path.resolve() for path in paths}) == len(labels)
    assert {path.resolve().parent for path in paths} == {tmp_path.resolve() / "pictures"}
    assert all(re.fullmatch("[A-Za-z0-9._-]{1,100}", path.name) for path in paths)
    assert all(colours(path) > 20 for path in paths)


def test_without_matplotlib_there_is_the_page_and_a_word(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error only for a user who asks for pictures, and then before anything is written."""
    output = leave_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(output), "--pictures", str(tmp_path / "pictures")]) == 2
    words = "needs matplotlib; install grpo-actors[plots]\n"
    assert capsys.readouterr().err == f"--pictures: {words}"
    assert not (output / "report.html").exists()
    assert main(["report", str(output)]) == 0
    assert capsys.readouterr() == (f"wrote {output / 'report.html'}\n", f"no pictures: {words}")


def test_pictures_that_can_not_be_written_are_told_by_their_option(tmp_path: Path, capsys: Any) -> None:
    """A folder under a file."""
    output = leave_run(tmp_path / "run")
    (tmp_path / "file").touch()
    assert main(["report", str(output), "--pictures", str(tmp_path / "file" / "pictures")]) == 2
    assert capsys.readouterr().err.startswith(f"--pictures: {tmp_path / 'file' / 'pictures'} can't be written: ")


def test_changed_keys_have_the_type_of_their_section(tmp_path: Path) -> None:
    """Also a type that is the first one of its section: without it nothing would tell what is trained on."""
    config = ring_config(tmp_path, environments=[{"type": "reverse_text", "max_letters": 9}])
    found = changed_keys(config)
    assert found["environments"] == [{"type": "reverse_text", "max_letters": 9}]
    assert found["inference"] == {"engine": {"type": "fake"}}
    assert "ledger" not in found
