"""The page of a report: HTML from a run's figures, samples and configuration. Pure functions of texts and numbers.

A completion may hold anything: markup, control characters, letters that turn the direction of a line, a million
letters in a row. Each text of a run goes through `shown`, and the page itself forbids scripts and other files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from actors.ops.compare.figures import Figures
from actors.ops.report.curves import Curve, curves_of
from actors.ops.report.picks import Pick
from actors.ops.report.svg import curve
from actors.telemetry.conversations import content_text, cut, image_digest, image_parts, part_words

LONGEST_TEXT = 20_000
"""Most characters of a text; a longer one loses its middle."""
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Letters that are not seen, steer a terminal, or turn the direction of the text around them."""
STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--paper:#fff;--soft:#5b6470;--line:#d9dee5;--mark:#2563a8;--box:#f5f7fa}
@media(prefers-color-scheme:dark){:root{--ink:#d7dde5;--paper:#10151c;--soft:#9aa5b1;--line:#2b3440;--mark:#7fb2ff;
--box:#18202a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1100px;margin:auto;
padding:1rem;overflow-wrap:anywhere}
h1{margin-bottom:0}h2{border-bottom:1px solid var(--line);margin-top:2rem}p.soft,figcaption,th{color:var(--soft)}
table{border-collapse:collapse}th,td{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:1rem}
svg{width:100%;height:auto;font-size:11px}svg text{fill:var(--soft)}svg .title{fill:var(--ink);font-weight:600}
.grid{stroke:var(--line)}.curve{fill:none;stroke:var(--mark);stroke-width:1.6}circle{fill:var(--mark)}
pre{white-space:pre-wrap;background:var(--box);padding:.5rem;margin:.2rem 0 .6rem;max-height:24rem;overflow:auto;
unicode-bidi:isolate}
img{max-width:100%;height:auto;border:1px solid var(--line);margin-right:.5rem}
.pick{border-left:3px solid var(--line);padding-left:.8rem;margin:1rem 0}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Rules for the browser: no script and nothing from elsewhere, whatever a text holds."""


@dataclass(frozen=True)
class Content:
    """Content of a report.

    Args:
        figures: figures of the run.
        columns: value by step of each column of `curves.CURVES`.
        picks: completions by the words of their choice.
        differs: keys of the configuration with other values than the defaults, as YAML.
        configuration: the whole configuration as YAML.
        result: result in words.
        limit: what limited the newest steps, in words; empty if unknown.
        troubles: what went wrong and was dealt with, in words.
        summary: values of summary.json; empty while the run is under way.
        price: price of an hour of the run; None: not given.
        images: pictures of images as data URLs, by digest.
    """

    figures: Figures
    columns: Mapping[str, Mapping[int, float]]
    picks: Mapping[str, Sequence[Pick]]
    differs: str
    configuration: str
    result: Sequence[str] = ()
    limit: Sequence[str] = ()
    troubles: Sequence[str] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    price: float | None = None
    images: Mapping[str, str] = field(default_factory=dict)

    @property
    def curves(self) -> list[Curve]:
        """Curves with their titles, in the order of the page."""
        return curves_of(self.figures.evaluations, self.columns)


def shown(value: object, longest: int = LONGEST_TEXT) -> str:
    """Return a text as HTML: markup escaped, steering letters in Python's notation, long texts without their middle."""
    text = STEERING.sub(lambda found: ascii(found[0])[1:-1], cut(str(value), longest))
    return escape(text, quote=True)


def page(content: Content) -> str:
    """Return the whole page."""
    figures = content.figures
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{shown(figures.name)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{shown(figures.name)}</h1>",
        f'<p class="soft">{shown(figures.output)}: {shown(figures.outcome)}</p>',
        *(f"<p>{shown(line)}</p>" for line in content.result),
        *_section("Curves", _curves(content)),
        *_section("Evaluations", _evaluations(figures)),
        *_section("What limited the run", map(_paragraph, [*content.limit, *content.troubles])),
        *_section("Costs", [_table(costs(content))]),
        *_completions(content),
        *_section("Configuration", _configuration(content)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def costs(content: Content) -> list[tuple[str, str]]:
    """Return names and values of the costs, as far as they are known."""
    figures, summary = content.figures, content.summary
    hours = summary["wall_seconds"] / 3600 if "wall_seconds" in summary else None
    price = None if hours is None or content.price is None else hours * content.price
    rows = [
        ("hours", None if hours is None else f"{hours:.3g}"),
        ("price", None if price is None else f"{price:.2f}"),
        ("sampled tokens", _text(summary.get("generated_tokens"))),
        ("trained tokens", _text(figures.tokens)),
        ("sampled and never trained", None if figures.wasted is None else f"{figures.wasted:.1%}"),
        ("trainer without a batch", None if figures.idle is None else f"{figures.idle:.0%} of the time"),
        ("steps per second", None if figures.steps_per_second is None else f"{figures.steps_per_second:.3g}"),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _section(heading: str, parts: "Iterator[str] | Sequence[str] | map[str]") -> list[str]:
    """Return a section; nothing if it has no parts."""
    found = [part for part in parts if part]
    return [f"<section><h2>{shown(heading)}</h2>", *found, "</section>"] if found else []


def _paragraph(text: str) -> str:
    return f"<p>{shown(text)}</p>"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a table; empty without rows."""
    if not rows:
        return ""
    heads = "".join(f"<th>{shown(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{shown(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _curves(content: Content) -> Iterator[str]:
    drawn = [curve(one.title, one.values, dots=one.is_evaluation) for one in content.curves]
    yield f'<div class="curves">{"".join(drawn)}</div>' if drawn else ""


def _evaluations(figures: Figures) -> Iterator[str]:
    for label, one in figures.evaluations.items():
        rows = [(str(version), f"{value:.4f}") for version, value in sorted(one.values.items())]
        best, value = one.best
        yield _paragraph(f"{label}: best {value:.4f} at version {best}, {one.final:.4f} at the newest")
        yield _table(rows, ("version", one.measure))


def _completions(content: Content) -> Iterator[str]:
    for words, picks in content.picks.items():
        yield from _section(f"Completions, {words}", _picks(picks, content.images))


def _picks(picks: Sequence[Pick], images: Mapping[str, str]) -> Iterator[str]:
    for pick in picks:
        group, number = pick.group, pick.number
        rewards = ", ".join(f"{name} {_value(values[number])}" for name, values in group.get("rewards", {}).items())
        facts = [
            f"step {group['step']}, group {group['ordinal']}, {group['environment']}, {group['purpose']}",
            f"reward {_value(pick.reward)} ({rewards})" if rewards else f"reward {_value(pick.reward)}",
            f"advantage {_value(group['advantages'][number])}",
            str(group["stop_conditions"][number]),
        ]
        yield f'<div class="pick"><p class="soft">{shown("; ".join(facts))}</p>{"".join(_messages(pick, images))}</div>'


def _messages(pick: Pick, images: Mapping[str, str]) -> Iterator[str]:
    """Yield the messages of a completion, each with its role and its pictures; the text says where these stand."""
    sizes = pick.group.get("images", {})
    for message in pick.messages:
        calls, content = message.get("tool_calls"), message.get("content")
        texts = [content_text(content, sizes), *([str(calls)] if calls else [])]
        yield f"<div>{shown(message.get('role', ''))}</div>"
        for part in image_parts(content):
            if (url := images.get(image_digest(part))) is not None:
                words = shown(part_words(part, sizes))
                yield f'<img src="{escape(url, quote=True)}" alt="{words}" title="{words}">'
        joined = "\n".join(map(str, texts))
        yield f'<pre dir="auto">{shown(joined)}</pre>'


def _configuration(content: Content) -> Iterator[str]:
    yield "<p>Keys with other values than the defaults:</p>"
    yield f"<pre>{shown(content.differs)}</pre>"
    yield f"<details><summary>all keys</summary><pre>{shown(content.configuration, 10 * LONGEST_TEXT)}</pre></details>"


def _value(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
