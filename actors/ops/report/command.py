"""The command `actors report`: a run's files to the page and the pictures."""

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from actors.ops.compare.figures import figures_of
from actors.ops.images import can_show, kept_image, picture
from actors.ops.previous_run import read_left
from actors.ops.report.curves import CURVES
from actors.ops.report.page import Content, page
from actors.ops.report.picks import Pick, picked
from actors.ops.report.pictures import can_draw, draw
from actors.ops.screens.diagnostics import dealt_with
from actors.ops.screens.limits import limits
from actors.ops.screens.result import result
from actors.telemetry.conversations import image_digest, image_parts
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES, replace
from actors.telemetry.tail import Tail
from actors.telemetry.totals import is_number
from schemas.config import RunConfig, dump_config
from schemas.errors import ConfigError

REPORT = "report.html"
"""Name of the file in output_dir where no other is given."""
IMAGE_SIDE = 256
"""Most pixels of a side of an image of a prompt."""
MAX_IMAGES_CHARACTERS = 8 << 20
"""Characters of all images in a page."""
NO_MATPLOTLIB = "needs matplotlib; install grpo-actors[plots]"


@dataclass(frozen=True)
class Written:
    """Files of a report.

    Args:
        page: path of the HTML file.
        pictures: paths of the PNG files.
        note: reason why there are no pictures, in words; empty if they are drawn, or if there is no curve.
    """

    page: Path
    pictures: tuple[Path, ...] = ()
    note: str = ""


def write_report(
    config: RunConfig, path: Path | None, num_picks: int, price: float | None, pictures: Path | None = None
) -> Written:
    """Write the report of a run, which may be done, under way or dead: the page, and its curves as pictures.

    Args:
        config: configuration of the run.
        path: file to write; None: REPORT in output_dir.
        num_picks: completions of each choice.
        price: price of an hour of the run; None: not given.
        pictures: folder of the pictures; None: next to the page, if matplotlib is installed.

    Raises:
        ConfigError: the run's files can't be read, a file can't be written, or `pictures` is given without matplotlib.
    """
    target = config.output / REPORT if path is None else path
    draws = can_draw()
    if pictures is not None and not draws:
        raise ConfigError(f"--pictures: {NO_MATPLOTLIB}")
    content = content_of(config, num_picks, price)
    try:
        replace(target, page(content))
    except OSError as error:
        raise ConfigError(f"--output: {target} can't be written: {error.strerror}") from error
    if not draws:
        return Written(target, note=f"no pictures: {NO_MATPLOTLIB}" if content.curves else "")
    return Written(target, tuple(draw(content.curves, pictures or target.with_name(f"{target.stem}-pictures"))))


def content_of(config: RunConfig, num_picks: int, price: float | None) -> Content:
    """Return the content of a report from the run's files. Arguments: as `write_report`."""
    summary, progress = read_left(config, "summary.json"), read_left(config, "progress.json")
    picks = picked(_groups(config.output), num_picks)
    return Content(
        figures_of(config.output),
        columns_of(config.output),
        picks,
        yaml.safe_dump(changed_keys(config), sort_keys=False, allow_unicode=True),
        dump_config(config),
        result(summary) if summary else (),
        limit_words(progress),
        dealt_with(progress) if progress else (),
        summary,
        price,
        image_urls(config.output, [pick for chosen in picks.values() for pick in chosen]),
    )


def image_urls(output: Path, picks: Sequence[Pick]) -> dict[str, str]:
    """Return pictures of the images that completions show, as data URLs by digest.

    Images that were not kept with the samples are left out, and those that would make the page larger than
    MAX_IMAGES_CHARACTERS in all places where they stand.
    """
    if not can_show():
        return {}
    parts = (part for pick in picks for message in pick.messages for part in image_parts(message.get("content")))
    urls, room = {}, MAX_IMAGES_CHARACTERS
    for digest, places in Counter(map(image_digest, parts)).items():
        data = kept_image(output, digest)
        try:
            made = b"" if data is None else picture(data, IMAGE_SIDE)
        except ValueError:
            continue  # no picture can be made of it; the text has its words
        url = f"data:image/png;base64,{base64.b64encode(made).decode()}"
        if made and places * len(url) <= room:
            urls[digest] = url
            room -= places * len(url)
    return urls


def changed_keys(config: RunConfig) -> Any:
    """Return the keys with other values than the defaults, as nested values.

    A section with types also has its `type`, since the other keys of the section depend on the type.
    """
    return _with_types(config.model_dump(mode="json", exclude_defaults=True), config.model_dump(mode="json"))


def _with_types(changed: Any, whole: Any) -> Any:
    if isinstance(changed, Mapping):
        kind = {"type": whole["type"]} if "type" in whole else {}
        return kind | {key: _with_types(value, whole[key]) for key, value in changed.items()}
    if isinstance(changed, list):
        return [_with_types(one, other) for one, other in zip(changed, whole, strict=True)]
    return changed


def columns_of(output: Path) -> dict[str, dict[int, float]]:
    """Return the value by step of each column of CURVES."""
    found: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    for line in Tail(output / "metrics.jsonl").new():
        for name, values in found.items():
            if is_number(value := line.get(name)):
                values[int(line["step"])] = float(value)
    return found


def limit_words(progress: Mapping[str, Any]) -> list[str]:
    """Return what limited the newest steps and the key to change, in words; empty if that is not known."""
    if not progress.get("queues"):
        return []
    limit = limits({**progress, "phase": "running", "missing": [], "eval_open": 0})
    change = [f"Change: {limit.change}"] if limit.change else []
    return [f"{limit.stage}: {limit.because}", *change]


def _groups(output: Path) -> Iterator[dict[str, Any]]:
    for name in (OLDER_SAMPLES, SAMPLES):
        yield from Tail(output / name).new()
