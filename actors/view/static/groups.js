// The list of groups: filters, search and pages, all of them in the address.

import { ask } from "./api.js";
import { strip } from "./charts.js";
import { address, badge, counted, h, part, shown, visible } from "./dom.js";

const STATES = ["issued", "settled", "composed", "trained", "durable", "dropped", "compacted"];
const FILTERS = ["purpose", "environment", "state", "reason", "stop", "step_min", "step_max", "reward_min", "reward_max",
  "length_min", "length_max", "text"];
const WAIT = 250;

export const title = "Groups";

export async function render(params, app) {
  const run = app.run(params);
  const asked = Object.fromEntries([...FILTERS, "before"].map((name) => [name, params.get(name) ?? ""]));
  const found = await ask(`runs/${run.run}/facts`);
  const bar = part((value) => indexed(value), { class: "quiet", role: "status" });
  const rows = part((value) => list(value, run, asked, app));
  const page = h("div", {}, h("h1", {}, `Groups of ${run.name}`), form(found, asked, app), bar.element, rows.element);

  async function update() {
    const started = performance.now();
    const [value, now] = await Promise.all([ask(`runs/${run.run}/groups`, asked), ask(`runs/${run.run}/facts`)]);
    rows.show(value);
    bar.show(now);
    page.dataset.milliseconds = Math.round(performance.now() - started);
  }
  await update();
  // a page of older groups does not change
  return { page, update: asked.before ? null : update, keys: keys(page, app) };
}

function indexed(value) {
  const parts = [`${counted(value.groups, "group")}, ${counted(value.trajectories, "trajectory").replace("trajectorys", "trajectories")}`];
  if (value.indexed < 1) parts.push(`${Math.floor(100 * value.indexed)} % of samples.jsonl read so far, the newest first${value.left ? `, ${value.left}` : ""}`);
  if (value.problem) parts.push(`the list is not up to date: ${value.problem}`);
  return parts.join("; ");
}

function form(found, asked, app) {
  let timer;
  const later = () => { clearTimeout(timer); timer = setTimeout(() => app.change(values(), true), WAIT); };
  const now = () => { clearTimeout(timer); app.change(values(), true); };
  const choice = (name, words, options) => h("label", {}, words, h("select", { name, onchange: now },
    options.map(([value, text]) => h("option", { value, selected: value === asked[name] }, text))));
  const any = (names) => [["", "any"], ...names.map((one) => [one, one])];
  const between = (name, words, step) => h("div", { class: "between", role: "group", "aria-label": words }, h("span", { class: "label" }, words), h("div", {},
    ["min", "max"].map((end) => h("input", { type: "number", step, name: `${name}_${end}`, value: asked[`${name}_${end}`],
      placeholder: end === "min" ? "from" : "to", "aria-label": `${words} ${end === "min" ? "from" : "to"}`, oninput: later }))));
  const element = h("form", { class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); now(); } },
    h("label", { class: "search" }, "Text in a completion or its prompt",
      h("input", { type: "search", name: "text", value: asked.text, oninput: later, id: "search", autocomplete: "off", spellcheck: "false" })),
    choice("purpose", "Purpose", [["", "training"], ["eval", "evaluation"]]),
    choice("environment", "Environment", any(found.environments)),
    choice("state", "State", any(STATES)),
    found.reasons.length ? choice("reason", "Dropped because", any(found.reasons)) : "",
    choice("stop", "End of a completion", any(found.stops)),
    between("reward", "Reward", "any"), between("length", "Characters written", "1"), between("step", "Step", "1"),
    h("button", { type: "button", onclick: () => app.change(Object.fromEntries([...FILTERS, "before"].map((name) => [name, ""]))) }, "No filter"));
  function values() {
    const data = new FormData(element);
    return { ...Object.fromEntries(FILTERS.map((name) => [name, (data.get(name) ?? "").toString()])), before: "" };
  }
  return element;
}

function list(value, run, asked, app) {
  if (!value.groups.length && value.complete) return h("p", { class: "empty" }, asked.before ? "no older group matches" : "no group matches");
  const older = value.next === null ? "" : h("a", { class: "button", rel: "next", id: "older",
    href: address({ page: "groups", run: run.run, ...asked, before: value.next }) },
  value.complete ? "Older groups" : "Search older groups");
  return [
    h("ol", { class: "rows" }, value.groups.map((group) => row(group, run))),
    value.complete ? "" : h("p", { class: "quiet" }, "The search has taken its time and stopped; older groups may match too."),
    h("nav", { class: "pager", "aria-label": "pages" },
      asked.before ? h("a", { class: "button", href: address({ page: "groups", run: run.run, ...asked, before: "" }) }, "Newest groups") : "", older)];
}

function row(group, run) {
  const href = address({ page: "group", run: run.run, group: group.ordinal });
  const rewards = group.rewards.map((one) => shown(one, 3)).join(", ");
  const lengths = group.characters;
  return h("li", { class: "row" },
    h("a", { class: "ordinal", href }, `group ${group.ordinal}`),
    h("span", { class: "row-facts" },
      group.step === null ? "" : group.ordinal < 0 ? `version ${group.step}` : h("a", { href: address({ page: "step", run: run.run, step: group.step }) }, `step ${group.step}`),
      h("span", {}, group.environment), badge(group.state, group.state === "dropped" ? "bad" : ""),
      group.reason ? badge(group.reason, "bad") : "",
      group.failures ? badge(`${group.failures} failed`, "bad") : "",
      Object.entries(group.stops).map(([name, number]) => h("span", { class: "quiet" }, `${name} ×${number}`)),
      lengths.length ? h("span", { class: "quiet" }, `${shown(Math.min(...lengths))}–${shown(Math.max(...lengths))} characters`) : ""),
    h("span", { class: "row-reward" }, group.completions
      ? [strip(group.rewards, `rewards ${rewards}`), h("b", {}, shown(group.reward_mean, 3))]
      : h("span", { class: "quiet" }, "no completion known")),
    h("p", { class: "head" }, group.found
      ? [h("span", { class: "quiet" }, group.found.completion === null ? "prompt: " : `completion ${group.found.completion}: `),
        visible(group.found.before), h("mark", {}, visible(group.found.match)), visible(group.found.after)]
      : visible(group.head ?? "")));
}

function keys(page, app) {
  const rows = () => [...page.querySelectorAll(".ordinal")];
  const move = (by) => {
    const all = rows(), at = all.indexOf(document.activeElement);
    all[Math.max(0, Math.min(all.length - 1, at + by))]?.focus();
  };
  return {
    j: () => move(1), k: () => move(-1),
    n: () => page.querySelector("#older")?.click(), p: () => history.back(),
    "/": () => page.querySelector("#search").focus(),
  };
}
