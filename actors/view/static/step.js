// A step: its packing as a picture, the timeline of all actors, and its values.

import { ask } from "./api.js";
import { address, counted, facts, fill, h, percent, shown, table } from "./dom.js";
import { timeline } from "./timeline.js";

const ROW = 16, GAP = 3;

export const title = "Step";

export async function render(params, app) {
  const run = app.run(params);
  const number = params.get("step") ? Number(params.get("step")) : (await ask(`runs/${run.run}`)).step;
  const value = await ask(`runs/${run.run}/steps/${number}`);
  const to = (step) => address({ page: "step", run: run.run, step });
  const spans = h("section", { id: "timeline" }, h("h2", {}, "Timeline"), h("p", { class: "quiet" }, "reading the spans of all actors …"));
  const page = h("div", {}, h("h1", {}, `Step ${number}`),
    h("p", { class: "crumbs" }, h("a", { href: address({ page: "groups", run: run.run, step_min: number, step_max: number }) }, "its groups"),
      h("span", { class: "pager" }, number > 1 ? h("a", { href: to(number - 1), id: "before", rel: "prev" }, "← previous") : "",
        number < value.last ? h("a", { href: to(number + 1), id: "after", rel: "next" }, "next →") : "")),
    packing(value.packing, run), spans, values(value.values));
  // behind the page: the files of spans may be large
  ask(`runs/${run.run}/steps/${number}/timeline`).then((found) => fill(spans, timeline(found, `/api/runs/${run.run}/steps/${number}/trace`)),
    (error) => { if (error.name !== "AbortError") fill(spans, h("h2", {}, "Timeline"), h("p", { class: "bad", role: "alert" }, error.message)); });
  return { page, keys: { "[": () => page.querySelector("#before")?.click(), "]": () => page.querySelector("#after")?.click() } };
}

function packing(value, run) {
  const dropped = value.dropped ?? [];
  const head = [h("h2", {}, "Packing"), value.words ? h("p", { class: "words" }, value.words) : ""];
  if (!value.ranks.length) return h("section", {}, head);
  const rows = value.ranks.flatMap((rank) => rank.rows);
  const room = rows.length * value.sequence_len, used = rows.reduce((sum, row) => sum + row.used, 0);
  const most = Math.max(...value.ranks.map((rank) => rank.tokens), 1);
  const ordinals = value.ordinals;
  return h("section", {}, head,
    h("p", {}, `${counted(ordinals.length, "group")} in ${counted(rows.length, "row")} of ${shown(value.sequence_len)} tokens on ${counted(value.ranks.length, "rank")}; `,
      h("b", {}, percent(room ? used / room : 0)), " of the room is used."),
    h("ul", { class: "legend" }, h("li", {}, h("i", { class: "swatch prompt-part" }), "prompt, once for completions that share it"),
      h("li", {}, h("i", { class: "swatch", style: { background: "hsl(210 55% 55%)" } }), "completion, a colour for each group"),
      h("li", {}, h("i", { class: "swatch free-part" }), "room left over")),
    value.ranks.map((rank) => h("div", { class: "rank" },
      h("h3", {}, `Rank ${rank.rank}`, h("span", { class: "quiet" }, ` ${counted(rank.tokens, "token")}, ${percent(rank.tokens / most)} of the fullest rank`)),
      h("div", { class: "packing" }, rank.rows.map((row, index) => picture(row, index, rank, value, run))))),
    dropped.length ? h("details", {}, h("summary", {}, `${counted(dropped.length, "group")} dropped since the step before`),
      h("ul", {}, dropped.map(([ordinal, reason]) => h("li", {}, h("a", { href: address({ page: "group", run: run.run, group: ordinal }) }, `group ${ordinal}`), ` ${reason}`)))) : "");
}

function picture(row, index, rank, value, run) {
  const whole = Math.max(value.sequence_len, row.used, 1);
  const share = (tokens) => `${(100 * tokens) / whole}%`;
  const starts = rank.minibatches.includes(index) && index ? " minibatch" : "";
  return h("div", { class: `packing-row${starts}`, style: { height: `${ROW}px`, "margin-bottom": `${GAP}px` }, role: "group",
    "aria-label": `row ${index}: ${row.used} of ${value.sequence_len} tokens, ${row.samples.length} samples` },
  row.samples.map((one) => {
    const hue = (value.ordinals.indexOf(one.ordinal) * 137.5) % 360;
    const words = `group ${one.ordinal}, completion ${one.completion}: ${one.prompt} prompt tokens${one.shared ? ` (${one.shared} more shared)` : ""}, ${one.tokens} behind it, ${one.loss_tokens} in the loss`;
    return h("a", { href: address({ page: "trajectory", run: run.run, group: one.ordinal, completion: one.completion }), title: words, "aria-label": words,
      style: { width: share(one.prompt + one.tokens) } },
    h("i", { class: "prompt-part", style: { width: `${(100 * one.prompt) / Math.max(1, one.prompt + one.tokens)}%` } }),
    h("i", { style: { width: `${(100 * one.tokens) / Math.max(1, one.prompt + one.tokens)}%`, background: `hsl(${hue} 55% 55%)` } }));
  }),
  h("i", { class: "free-part", style: { width: share(row.free) }, title: `${row.free} tokens of room left over` }));
}

function values(found) {
  const rows = Object.entries(found);
  if (!rows.length) return h("p", { class: "quiet" }, "metrics.jsonl has no line of this step yet");
  const seconds = rows.filter(([name]) => name.startsWith("seconds_")), others = rows.filter(([name]) => !name.startsWith("seconds_"));
  return h("section", {}, h("h2", {}, "Values"), h("div", { class: "two" },
    table(["name", "value"], others.map(([name, value]) => [name, name === "time" ? new Date(value * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : shown(value, 5)]), { label: "values" }),
    seconds.length ? h("div", {}, h("h3", {}, "Seconds of the trainer"), facts(seconds.map(([name, value]) => [name.replace("seconds_", ""), shown(value, 3)]))) : ""));
}
