// The timeline of a step: a row per thread, all on one axis of time. Spans inside of others are drawn inside.

import { ticks } from "./charts.js";
import { counted, facts, h, part, s, shown } from "./dom.js";

const ROW = 18, INSET = 3, DEEPEST = 3, SHOWN_NAMES = 12;

/** The section's content. `file`: address of the file for Perfetto. */
export function timeline(value, file) {
  if (value.words) return [h("h2", {}, "Timeline"), h("p", { class: "words" }, value.words)];
  const all = [], seconds = value.seconds || 1, paint = painter(value);
  const detail = part((one) => (one === null ? h("p", { class: "quiet" }, "Point at a span, or move with the arrow keys.") : facts(one)),
    { class: "span-detail", role: "status" });
  detail.show(null);
  const percentOf = (time) => `${(100 * time) / seconds}%`;
  let current = -1;
  const point = (index) => {
    all[current]?.element.classList.remove("pointed");
    current = index;
    all[current].element.classList.add("pointed");
    const { actor, title, span } = all[current];
    detail.show([["actor", actor], ["thread", title], [span[3] ? "waits" : "works", span[2]], ["from", `${shown(span[0], 5)} s`], ["length", span[5]]]);
  };
  const draw = (actor, title, span) => {
    const inset = INSET * Math.min(span[4], DEEPEST), index = all.length;
    const element = s("rect", { x: percentOf(span[0]), width: percentOf(span[1]), y: inset, height: ROW - 2 * inset, "data-index": index,
      class: span[3] ? "span waits" : "span", style: span[3] ? null : { fill: paint(span[2]) } });
    all.push({ element, actor, title, span });
    return element;
  };
  const rows = value.actors.map((one) => h("div", { class: "lanes" }, h("h3", {}, one.actor,
    h("span", { class: "quiet" }, one.hidden ? ` ${counted(one.hidden, "span")} in further rows` : "")),
  one.rows.map((row) => h("div", { class: "lane" }, h("span", { class: "lane-name" }, row.title),
    s("svg", { width: "100%", height: ROW, "aria-hidden": "true" }, row.spans.map((span) => draw(one.actor, row.title, span)))))));
  const short = value.actors.reduce((sum, one) => sum + one.short, 0);
  return [h("h2", {}, "Timeline ", h("span", { class: "quiet" }, `${shown(seconds, 4)} s, from the trainer's wait for the batch to the end of the step`)),
    h("div", { class: "tools" }, h("a", { class: "button", href: file, download: "", id: "trace" }, "Download for Perfetto"),
      h("span", { class: "quiet" }, "open it with ui.perfetto.dev, which sends nothing anywhere")),
    legend(value, paint),
    h("div", { class: "timeline", role: "group", tabindex: 0, "aria-label": "timeline: arrow keys move along the spans, the words below tell the same",
      onpointerover: (event) => { const at = event.target.dataset?.index; if (at !== undefined) point(Number(at)); },
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!by || !all.length) return;
        point(Math.max(0, Math.min(all.length - 1, current + by)));
        event.preventDefault();
      } },
    h("div", { class: "lane axis", "aria-hidden": "true" }, h("span", { class: "lane-name" }, "seconds"),
      h("div", { class: "axis-room" }, ticks(0, seconds, 5).map((time) => h("span", { style: { left: percentOf(time) } }, shown(time))))),
    rows),
    detail.element,
    short ? h("p", { class: "quiet" }, `${counted(short, "span")} shorter than ${shown(1000 * value.shortest, 2)} ms are in the file for Perfetto only.`) : "",
    h("details", {}, h("summary", {}, "In words"), h("pre", { class: "text", tabindex: 0 }, value.said))];
}

// neighbours in the alphabet are far apart on the circle of hues
function painter(value) {
  const names = [...new Set(value.actors.flatMap((actor) => actor.rows.flatMap((row) => row.spans.filter((span) => !span[3]).map((span) => span[2]))))].sort();
  return (name) => `hsl(${(names.indexOf(name) * 137.5) % 360} 60% 55%)`;
}

function legend(value, paint) {
  const spent = new Map();
  for (const actor of value.actors) for (const row of actor.rows) for (const span of row.spans) {
    if (!span[3]) spent.set(span[2], (spent.get(span[2]) ?? 0) + span[1]);
  }
  const names = [...spent].sort((a, b) => b[1] - a[1]).slice(0, SHOWN_NAMES).map(([name]) => name);
  return h("ul", { class: "legend" }, h("li", {}, h("i", { class: "swatch waiting" }), "waits"),
    names.map((name) => h("li", {}, h("i", { class: "swatch", style: { background: paint(name) } }), name)));
}
