// The first page: how each run stands, what limits it, and the curves of all runs over the same steps.

import { ask } from "./api.js";
import { chart, shares } from "./charts.js";
import { address, badge, counted, facts, h, part, percent, shown, table } from "./dom.js";

const CURVES = [
  ["Learning", [
    ["reward_mean", "Mean reward"], ["reward_std", "Deviation of rewards"], ["entropy", "Entropy, nats per token"],
    ["grad_norm", "Gradient norm"], ["kl", "KL to the reference"], ["learning_rate", "Learning rate"]]],
  ["Staleness and weight updates", [
    ["lag_mean", "Lag, mean of a step"], ["lag_max", "Lag, largest of a step"],
    ["mismatch_kl", "KL of trainer and engine"], ["seconds_publish", "Seconds to publish weights"]]],
  ["Waste", [
    ["groups_without_variance", "Groups whose rewards are equal"], ["truncated_fraction", "Cut off completions"],
    ["reward_unscorable", "Completions without a reward"], ["failed_fraction", "Trajectories whose environment failed"]]],
  ["Time and length", [
    ["seconds_wait_batch", "Seconds the trainer waits for a batch"], ["completion_tokens_mean", "Tokens of a completion"],
    ["turns_mean", "Turns of a trajectory"], ["tokens", "Tokens of a step"]]],
];
const MEASURES = { mean_reward: "Mean reward", exact_match: "Exact match" };
const STATES = { running: "good", starting: "good", finishing: "good", done: "good", stopped: "bad", failed: "bad" };
const STAGES = {
  sampling: "being sampled", scoring: "with reward actors", scored: "scored, wait for their step",
  packed: "packed, wait for the trainer", batches: "batches on their way",
};
const DROPPED = ["#c0504d", "#d98c3f", "#8a6fb0", "#5b8db8", "#9a9a4a"];

export const title = "Overview";

export async function render(params, app) {
  const chosen = app.chosen(params);
  const cards = new Map(chosen.map((run) => [run.run, part((value) => card(value, run), { class: "card-slot" })]));
  const more = (params.get("more") ?? "").split(",").filter(Boolean);
  const plots = part((value) => curves(value, chosen, more, app), { class: "plots" });
  const scores = part((value) => evaluations(value, chosen), { class: "plots" });
  const picker = part((names) => pick(names, more, params, app));
  const page = h("div", {},
    h("h1", { class: "hidden" }, "Overview"),
    h("div", { class: "cards" }, chosen.map((run) => cards.get(run.run).element)),
    scores.element, plots.element, picker.element);

  async function update() {
    const names = [...new Set([...CURVES.flatMap(([, curves]) => curves.map(([name]) => name)), ...more])];
    const [states, columns] = await Promise.all([
      Promise.all(chosen.map((run) => ask(`runs/${run.run}`))),
      Promise.all(chosen.map((run) => ask(`runs/${run.run}/curves`, { name: names })))]);
    chosen.forEach((run, index) => cards.get(run.run).show(withoutAge(states[index])));
    scores.show(states.map((state) => state.evaluations));
    plots.show(columns);
    picker.show([...new Set(states.flatMap((state) => state.columns))].sort());
  }
  await update();
  return { page, update };
}

// the age changes with each look, and would build the card again
function withoutAge(state) {
  return { ...state, age: state.alive || state.age === null ? null : Math.round(state.age / 60) };
}

function card(state, run) {
  const done = state.max_steps ? Math.min(1, state.step / state.max_steps) : 0;
  return h("article", { class: "card", "aria-label": `run ${state.name}` },
    h("header", {},
      h("h2", {}, h("i", { class: "swatch", style: { background: run.color } }), state.name),
      badge(state.state, STATES[state.state])),
    h("p", { class: "quiet path" }, state.output),
    h("div", { class: "progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": 0, "aria-valuemax": 100,
      "aria-valuenow": Math.round(100 * done) }, h("i", { style: { width: `${100 * done}%`, background: run.color } })),
    h("p", {}, h("b", {}, shown(state.step)), ` of ${shown(state.max_steps)} steps`,
      state.time_left ? h("span", { class: "quiet" }, `, ${state.time_left}`) : ""),
    state.words ? h("p", { class: "words" }, state.words) : "",
    state.alive ? h("section", { class: "limit" }, h("h3", {}, "Limited by ", h("b", {}, state.limit.stage)),
      h("p", {}, state.limit.because),
      state.limit.change ? h("p", { class: "quiet" }, "Change: ", state.limit.change) : "") : "",
    list("Trouble", state.trouble, "bad"), list("Notes", state.notes, ""), list("Recovered", state.recovered, ""),
    h("section", {}, h("h3", {}, "Newest figures ", h("span", { class: "quiet" }, `means of ${state.figure_steps} steps`)),
      facts([...state.figures.map((one) => [one.words, shown(one.value)]),
        ["policy", policy(state.policy)],
        ["tokens per second", state.alive && state.tokens_per_second && shown(state.tokens_per_second, 3)],
        ["trainer idle", !state.alive || state.idle === null || state.idle === undefined ? null : percent(state.idle)]])),
    waste(state, run), queues(state), actors(state));
}

function policy({ trained, served, durable }) {
  if (trained === null || trained === undefined) return null;
  const parts = [`version ${trained} trained`];
  if (served !== null && served !== undefined) parts.push(`${served} served`);
  if (durable !== null && durable !== undefined) parts.push(`${durable} in a checkpoint`);
  return parts.join(", ");
}

function list(heading, items, kind) {
  return items.length ? h("section", { class: kind }, h("h3", {}, heading), h("ul", {}, items.map((one) => h("li", {}, one)))) : "";
}

function waste(state, run) {
  const { states, dropped, dropped_share: share } = state.groups;
  if (!Object.keys(states).length) return "";
  const inFlight = ["issued", "settled", "composed"].reduce((sum, name) => sum + (states[name] ?? 0), 0);
  const reasons = Object.entries(dropped).map(([name, value], index) => ({ name: `dropped: ${name}`, value, color: DROPPED[index % DROPPED.length] }));
  return h("section", {}, h("h3", {}, "Groups", share === null ? "" : h("span", { class: "quiet" }, ` ${percent(share)} dropped`)),
    shares([
      { name: "trained", value: (states.trained ?? 0) + (states.durable ?? 0), color: "var(--good)" },
      { name: "under way", value: inFlight, color: "var(--line-strong)" }, ...reasons]),
    h("p", {}, h("a", { href: address({ page: "groups", run: run.run }) }, "all groups"),
      Object.keys(dropped).length ? [" · ", h("a", { href: address({ page: "groups", run: run.run, state: "dropped" }) }, "dropped groups")] : "",
      state.failed_attempts ? h("span", { class: "quiet" }, ` · ${counted(state.failed_attempts, "failed attempt")}`) : "",
      state.reissued ? h("span", { class: "quiet" }, ` · ${state.reissued} issued again`) : ""));
}

function queues(state) {
  const rows = Object.entries(state.queues ?? {});
  if (!rows.length) return "";
  return h("section", {}, h("h3", {}, "Where groups are"), h("div", { class: "queues" }, rows.map(([name, [number, room]]) => [
    h("span", {}, name), h("div", { class: "progress thin", title: STAGES[name] ?? name },
      h("i", { style: { width: `${room ? Math.min(100, (100 * number) / room) : 0}%` } })),
    h("span", { class: "quiet" }, `${number} of ${room}`)])));
}

function actors(state) {
  const rows = state.alive ? state.actors ?? [] : [];
  if (!rows.length) return "";
  return h("details", {}, h("summary", {}, counted(rows.length + (state.actors_left_out ?? 0), "actor")),
    table(["actor", "heard", "state"], rows.map((one) => [one.name, `${shown(one.age, 2)} s ago`,
      [one.phase, one.engine, one.version === undefined || one.version === null ? null : `version ${one.version}`, one.doing, one.error].filter(Boolean).join(", ")]),
    { label: "actors" }));
}

function curves(tables, runs, more, app) {
  const plot = ([name, words]) => {
    const series = tables.flatMap((one, index) => name in one.columns
      ? [{ name: runs[index].name, color: runs[index].color, steps: one.steps, ...one.columns[name] }] : []);
    if (!series.length || series.every((one) => one.mean.every((value) => value === null))) return null;
    const onstep = (step) => app.go(address({ page: "step", run: runs[0].run, step }));
    return chart(words, series, { onstep });
  };
  return [...CURVES, ["More columns", more.map((name) => [name, name])]].map(([heading, columns]) => {
    const flat = columns.filter(([name]) => isZero(tables, name)).map(([, words]) => words);
    const plots = columns.filter(([name]) => !isZero(tables, name)).map(plot).filter(Boolean);
    if (!plots.length && !flat.length) return "";
    return h("section", {}, h("h2", {}, heading), h("div", { class: "charts" }, plots),
      flat.length ? h("p", { class: "quiet" }, `0 in all steps: ${flat.join(", ")}`) : "");
  });
}

// a curve that is 0 everywhere says so in a line, and takes no room
function isZero(tables, name) {
  const values = tables.flatMap((one) => one.columns[name]?.high ?? one.columns[name]?.mean ?? []);
  const lowest = tables.flatMap((one) => one.columns[name]?.low ?? []);
  return values.length > 0 && values.every((value) => value === 0 || value === null) && lowest.every((value) => value === 0 || value === null)
    && values.some((value) => value === 0);
}

function evaluations(all, runs) {
  const found = new Map();
  all.forEach((rows, index) => rows.forEach((row) => Object.keys(MEASURES).forEach((measure) => {
    if (row[measure] === null || row[measure] === undefined) return;
    const key = `${MEASURES[measure]}, ${row.environment}`;
    const series = found.get(key) ?? new Map();
    const one = series.get(index) ?? { name: runs[index].name, color: runs[index].color, steps: [], mean: [] };
    one.steps.push(row.version);
    one.mean.push(row[measure]);
    found.set(key, series.set(index, one));
  })));
  if (!found.size) return "";
  return h("section", {}, h("h2", {}, "Evaluation"), h("div", { class: "charts" },
    [...found].map(([name, series]) => chart(name, [...series.values()], { axis: "version" }))));
}

function pick(names, more, params, app) {
  const choice = h("select", { id: "more", onchange: (event) => {
    if (event.target.value) app.change({ more: [...more, event.target.value].join(",") });
  } }, h("option", { value: "" }, "choose a column …"),
  names.filter((name) => !more.includes(name)).map((name) => h("option", { value: name }, name)));
  return h("section", { class: "pick" }, h("label", { for: "more" }, "One more curve "), choice,
    more.map((name) => h("button", { type: "button", onclick: () => app.change({ more: more.filter((one) => one !== name).join(",") }),
      "aria-label": `remove the curve ${name}` }, `${name} ×`)));
}
