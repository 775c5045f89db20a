// A group: its prompt, its completions side by side, and its life.

import { ask } from "./api.js";
import { address, badge, facts, h, shown, table, written } from "./dom.js";
import { conversation, imagesOf } from "./messages.js";

export const title = "Group";

export async function render(params, app) {
  const run = app.run(params), ordinal = Number(params.get("group"));
  // a group under way has a life and no completions
  const [group, life] = await Promise.all([
    ask(`runs/${run.run}/groups/${ordinal}`).catch((error) => { if (error.name === "AbortError") throw error; return { missing: error.message }; }),
    ask(`runs/${run.run}/groups/${ordinal}/life`)]);
  if (group.missing && !life.events.length) throw new Error(`${group.missing}; ${life.words}`);
  const page = h("div", {}, h("h1", {}, `Group ${ordinal}`), crumbs(run, group, ordinal),
    group.missing ? h("p", { class: "words" }, group.missing) : completions(group, run, params, app), story(life, run));
  return { page, keys: {
    n: () => app.go(address({ page: "trajectory", run: run.run, group: ordinal, completion: 0 })) } };
}

function crumbs(run, group, ordinal) {
  const of = ordinal < 0 ? "evaluation" : "training";
  return h("p", { class: "crumbs" }, h("a", { href: address({ page: "groups", run: run.run, purpose: ordinal < 0 ? "eval" : "" }) }, `groups of ${run.name}`),
    ` · ${of}`, group.environment ? ` · ${group.environment}` : "",
    group.step === null || group.step === undefined ? "" : ordinal < 0 ? ` · version ${group.step}`
      : [" · ", h("a", { href: address({ page: "step", run: run.run, step: group.step }) }, `step ${group.step}`)],
    group.versions ? ` · sampled by version ${group.versions.join(", ")}` : "", group.source ? ` · from ${group.source}` : "");
}

function completions(group, run, params, app) {
  const order = params.get("sort") ?? "";
  const sorted = [...group.completions];
  if (order === "best") sorted.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  if (order === "worst") sorted.sort((a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity));
  const largest = Math.max(1e-9, ...group.completions.map((one) => Math.abs(one.advantage ?? 0)));
  const columns = Object.entries(group.columns ?? {});
  return [
    h("section", {}, h("h2", {}, "Prompt"), conversation(group.prompt, imagesOf(run, group)),
      columns.length ? h("details", {}, h("summary", {}, "Columns of the example"),
        facts(columns.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]))) : ""),
    group.words ? h("p", { class: "words" }, group.words) : "",
    h("section", {}, h("h2", {}, `${group.completions.length} completions`),
      h("label", {}, "Order ", h("select", { onchange: (event) => app.change({ sort: event.target.value }, true) },
        [["", "as sampled"], ["best", "highest reward first"], ["worst", "lowest reward first"]].map(([value, text]) =>
          h("option", { value, selected: value === order }, text)))),
      h("div", { class: "side-by-side" }, sorted.map((one) => completion(one, group, run, largest))))];
}

function completion(one, group, run, largest) {
  const href = address({ page: "trajectory", run: run.run, group: group.ordinal, completion: one.index });
  const rewards = Object.entries(one.rewards);
  return h("article", { class: "card completion" },
    h("header", {}, h("h3", {}, h("a", { href }, `Completion ${one.index}`)), badge(one.stop, one.stop === "failed" ? "bad" : "")),
    facts([
      ["reward", shown(one.reward, 4)],
      ["advantage", advantage(one.advantage, largest)],
      ["tokens", one.tokens === null ? null : shown(one.tokens)], ["turns", one.turns],
      ["tool calls", one.tool_calls ? `${one.tool_calls}${one.tool_failures ? `, ${one.tool_failures} failed` : ""}` : null]]),
    rewards.length ? table(["function", "value"], rewards.map(([name, value]) => [name, shown(value, 4)]), { label: "rewards by function" }) : "",
    one.failure ? h("p", { class: "bad" }, one.failure) : "",
    "messages" in one ? conversation(one.messages, imagesOf(run, group), one.turn_rewards) : written(one.text),
    one.cut ? h("p", {}, h("a", { href }, "the whole text")) : "");
}

/** An advantage with its sign as a colour and its size as a bar. */
export function advantage(value, largest) {
  if (value === null || value === undefined) return null;
  const size = `${Math.min(100, (100 * Math.abs(value)) / largest)}%`;
  return h("span", { class: "advantage" }, shown(value, 4),
    h("i", { class: value < 0 ? "minus" : "plus", "aria-hidden": "true" }, h("i", { style: { width: size } })));
}

function story(life, run) {
  if (life.words) return h("section", {}, h("h2", {}, "Life"), h("p", { class: "words" }, life.words));
  return h("section", {}, h("h2", {}, "Life"),
    h("ol", { class: "life" }, life.events.map((event) => h("li", {}, h("b", {}, event.what), " ", event.words,
      event.ordinal === undefined ? "" : [" ", h("a", { href: address({ page: "group", run: run.run, group: event.ordinal }) }, `group ${event.ordinal}`)],
      event.step === undefined ? "" : [" ", h("a", { href: address({ page: "step", run: run.run, step: event.step }) }, "show the step")]))),
    h("details", {}, h("summary", {}, "All that the ledger says"), facts([
      ["state", life.state], ["example", `${life.example.index} of ${life.example.environment}`], ["key of the example", life.example.key],
      ["seed", life.seed], ["attempts", life.attempt], ["newest attempt", life.outcome], ["failed attempts", life.failures],
      ["deaths of holders", life.deaths], ["holder", life.holder], ["oldest version allowed", life.min_version], ["policy", life.policy],
      ["version of the oldest token", life.oldest], ["lag", life.lag], ["filtered before in this place", life.resamples || null],
      ["digest of the payload", life.digest], ["chain of witnesses", life.chain]])));
}
