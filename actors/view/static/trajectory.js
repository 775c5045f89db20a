// A trajectory: its messages, and token by token what ledger and trainer have of each token.

import { ask } from "./api.js";
import { address, badge, counted, facts, h, part, plain, shown, table, visible } from "./dom.js";
import { conversation, imagesOf } from "./messages.js";

const COLOURS = {
  logprob: "the engine's logprob", advantage: "advantage", version: "version", loss: "in the loss or not",
  origin: "origin", turn: "turn", temperature: "temperature",
  trainer_logprob: "the trainer's logprob", ratio: "ratio of trainer to engine", rule: "clipped or masked by a rule",
  entropy: "entropy", value: "loss",
};
// colours that need the trainer's record, with the column
const RECORDED = { trainer_logprob: "trainer_logprob", ratio: "ratio", rule: "rules", entropy: "entropy", value: "value" };
const DIGITS = 8;
const HUES = [210, 30, 140, 280, 350, 60, 180, 320];

export const title = "Trajectory";

export async function render(params, app) {
  const run = app.run(params), ordinal = Number(params.get("group")), completion = Number(params.get("completion") ?? 0);
  const one = await ask(`runs/${run.run}/groups/${ordinal}/trajectories/${completion}`);
  const to = (number) => address({ page: "trajectory", run: run.run, group: ordinal, completion: number, colour: params.get("colour") });
  const tokens = one.samples.length ? await tokenView(one, run, params, app)
    : h("section", {}, h("h2", {}, "Tokens"), h("p", { class: "words" }, one.tokens_words));
  const page = h("div", {},
    h("h1", {}, `Completion ${completion} of group ${ordinal}`),
    h("p", { class: "crumbs" }, h("a", { href: address({ page: "group", run: run.run, group: ordinal }) }, `group ${ordinal}`),
      ` · ${one.environment}`, one.step === null ? "" : one.purpose === "eval" ? ` · version ${one.step}`
        : [" · ", h("a", { href: address({ page: "step", run: run.run, step: one.step }) }, `step ${one.step}`)],
      h("span", { class: "pager" },
        completion > 0 ? h("a", { href: to(completion - 1), rel: "prev", id: "before" }, "← previous") : "",
        completion + 1 < one.completions ? h("a", { href: to(completion + 1), rel: "next", id: "after" }, "next →") : "")),
    h("div", { class: "two" }, h("section", {}, h("h2", {}, "Messages"), conversation(one.prompt, imagesOf(run, one)),
      conversation(one.completion.messages, imagesOf(run, one), one.completion.turn_rewards)), about(one)),
    tokens);
  return { page, keys: { "[": () => page.querySelector("#before")?.click(), "]": () => page.querySelector("#after")?.click() } };
}

function about(one) {
  const c = one.completion;
  const logged = Object.entries(c.logged ?? {}), info = Object.entries(c.info ?? {});
  return h("aside", {}, h("h2", {}, "Result"), facts([
    ["reward", shown(c.reward)], ["advantage", shown(c.advantage)], ["end", badge(c.stop, c.stop === "failed" ? "bad" : "")],
    ["sampled tokens", c.tokens === null ? null : shown(c.tokens)], ["turns", c.turns],
    ["tool calls", c.tool_calls ? `${c.tool_calls}${c.tool_failures ? `, ${c.tool_failures} failed` : ""}` : null],
    ["versions", one.versions.join(", ")], ["lag", one.step === null || one.purpose === "eval" ? null : shown(one.step - 1 - Math.min(...one.versions))]]),
  table(["reward function", "value"], Object.entries(c.rewards).map(([name, value]) => [name, shown(value)]), { label: "rewards by function" }),
  c.failure ? h("p", { class: "bad" }, c.failure) : "",
  logged.length ? [h("h3", {}, "Logged by reward functions"), facts(logged.map(([name, value]) => [name, shown(value)]))] : "",
  info.length ? [h("h3", {}, "Told by the environment"), facts(info.map(([name, value]) => [name, shown(value)]))] : "");
}

async function tokenView(one, run, params, app) {
  const chosen = one.samples.find((s) => String(s.sample) === params.get("sample")) ?? one.samples[0];
  const start = Math.max(0, Number(params.get("token") ?? 0) || 0);
  const rows = await ask(`runs/${run.run}/groups/${one.ordinal}/samples/${chosen.sample}`, { start });
  const can = (colour) => !(colour in RECORDED) || RECORDED[colour] in rows;
  const by = params.get("colour") in COLOURS && can(params.get("colour")) ? params.get("colour") : "logprob";
  const detail = part((value) => (value === null ? h("p", { class: "quiet" }, "Point at a token, or move with the arrow keys.") : facts(value)),
    { class: "token-detail", role: "status" });
  detail.show(null);
  const paint = painter(rows, by);
  const spans = rows.text.map((text, index) => h("span", {
    class: `token${rows.in_loss[index] ? "" : " out"}${rows.origin[index] ? " given" : ""}`, "data-index": index,
    tabindex: index === 0 ? 0 : -1, style: paint(index) }, written(text)));
  const say = (target) => {
    const index = target?.dataset?.index;
    if (index !== undefined) detail.show(values(rows, Number(index), one));
  };
  const text = h("div", { class: "tokens", role: "group", "aria-label": "tokens", dir: "ltr",
    onpointerover: (event) => say(event.target), onfocusin: (event) => say(event.target),
    onkeydown: (event) => step(event, spans) },
  rows.prompt ? h("span", { class: "prompt", title: "prompt" }, visible(rows.prompt)) : "", spans);
  const next = rows.start + rows.text.length;
  const at = (token) => address({ ...Object.fromEntries(params), token: token || "" });
  return h("section", {},
    h("h2", {}, "Tokens ", h("span", { class: "quiet" }, `${rows.start + 1}–${next} of ${rows.total} behind a prompt of ${counted(rows.prompt_tokens, "token")}`)),
    h("div", { class: "tools" },
      h("label", {}, "Colour ", h("select", { id: "colour", onchange: (event) => app.change({ colour: event.target.value }, true) },
        Object.entries(COLOURS).map(([value, words]) => h("option", { value, selected: value === by, disabled: !can(value) }, words)))),
      one.samples.length > 1 ? h("label", {}, "Branch ", h("select", { onchange: (event) => app.change({ sample: event.target.value, token: "" }) },
        one.samples.map((s, number) => h("option", { value: s.sample, selected: s === chosen }, `${number}: ${counted(s.tokens, "token")}`)))) : "",
      legend(rows, by)),
    rows.words ? h("p", { class: "words" }, rows.words) : "", rows.tokenizer ? h("p", { class: "words" }, rows.tokenizer) : "",
    rows.trainer.words ? h("p", { class: "words", id: "not-recorded" }, rows.trainer.words) : "",
    h("div", { class: "token-layout" }, text, detail.element),
    h("nav", { class: "pager", "aria-label": "tokens" },
      rows.start ? h("a", { class: "button", href: at(0) }, "First tokens") : "",
      next < rows.total ? h("a", { class: "button", href: at(next) }, "Further tokens") : ""),
    rows.trainer.words ? "" : lossOf(rows.trainer));
}

// what turns the values of a token into its loss
function lossOf(trainer) {
  return h("details", { id: "loss", open: true }, h("summary", {}, "The loss of a token"),
    facts([["loss", trainer.loss], ["before the average", trainer.formula], ["in the step", trainer.average],
      ["loss tokens of the step", JSON.parse(trainer.loss_tokens || "[]").join(", ")],
      ...Object.entries(trainer.keys).map(([name, value]) => [`trainer.loss.${name}`, shown(value, DIGITS)]),
      ["also acting on the loss", trainer.modifiers.join(", ")], ["file", trainer.file]]),
    trainer.symbols ? h("p", { class: "quiet" }, trainer.symbols) : "");
}

// white space made visible as well; a line break also breaks the line
function written(text) {
  return text === "" ? "·" : visible(text.replaceAll("\n", "↵\n").replaceAll("\t", "→"));
}

function values(rows, index, one) {
  const sampled = rows.origin[index] === 0;
  const lag = one.step === null || one.purpose === "eval" || !sampled ? null : one.step - 1 - rows.version[index];
  return [
    ["token", `${rows.start + index}, id ${rows.id[index]}`], ["text", plain(JSON.stringify(rows.text[index]))],
    ["origin", rows.origins[rows.origin[index]]], ["turn", rows.turn[index]],
    ["version", sampled ? `${rows.lineage[index]}.${rows.version[index]}` : "none"], ["lag", lag === null ? null : String(lag)],
    ["engine's logprob", sampled ? `${shown(rows.logprob[index], DIGITS)} (probability ${shown(Math.exp(rows.logprob[index]), 3)})` : "none"],
    ["temperature", sampled ? shown(rows.temperature[index]) : null], ["advantage", shown(rows.advantage[index])],
    ["in the loss", rows.in_loss[index] ? "yes" : rows.mask[index] ? "no: its advantage is 0" : "no: masked"],
    ...trained(rows, index)];
}

function trained(rows, index) {
  if (rows.trainer.words) return [["trainer's logprob, ratio, entropy, loss", "not recorded"]];
  const named = { trainer_logprob: "trainer's logprob", old_logprob: "trainer's logprob before the step", reference_logprob: "reference's logprob",
    teacher_logprob: "teacher's logprob", ratio: "ratio", trainer_advantage: "advantage in the loss", entropy: "entropy",
    value: "loss before the average", loss: "part of the step's loss" };
  const ruled = (rows.rules ?? [])[index] ?? [];
  return [...Object.entries(named).map(([name, words]) => [words, name in rows ? shown(rows[name][index], DIGITS) : null]),
    ["rule", ruled.length ? ruled.map((name) => `${name} (${rows.trainer.rules[name] || "of the loss"})`).join("; ") : "none: neither clipped nor masked"]];
}

function painter(rows, by) {
  const alpha = (hue, share) => ({ background: `hsl(${hue} 80% 50% / ${(0.08 + 0.6 * Math.max(0, Math.min(1, share))).toFixed(3)})` });
  const largest = Math.max(1e-9, ...rows.advantage.map((value) => Math.abs(value ?? 0)));
  const versions = [...new Set(rows.version)].sort((a, b) => a - b);
  const hot = [...new Set(rows.temperature)], ruled = ruleNames(rows);
  const most = ["value", "entropy"].includes(by) ? largestOf(rows[by]) : 1;
  return (index) => {
    if (by === "origin") return rows.origin[index] ? alpha(HUES[rows.origin[index]], 0.5) : {};
    if (by === "loss") return rows.in_loss[index] ? alpha(140, 0.5) : {};
    if (rows.origin[index]) return {};
    // 5 nats: a token of a probability below 1 % is as red as can be
    if (by === "logprob") return alpha(0, -(rows.logprob[index] ?? 0) / 5);
    if (by === "advantage") return rows.advantage[index] ? alpha(rows.advantage[index] > 0 ? 140 : 0, Math.abs(rows.advantage[index]) / largest) : {};
    if (by === "version") return alpha(HUES[versions.indexOf(rows.version[index]) % HUES.length], 0.45);
    if (by === "turn") return alpha(HUES[rows.turn[index] % HUES.length], 0.45);
    if (by === "rule") return rows.rules[index].length ? alpha(HUES[ruled.indexOf(rows.rules[index][0]) % HUES.length], 0.7) : {};
    if (by === "temperature") return alpha(HUES[hot.indexOf(rows.temperature[index]) % HUES.length], 0.45);
    const value = rows[by][index];
    if (value === null) return {};
    if (by === "trainer_logprob") return alpha(0, -value / 5);
    // 2: twice as probable for the trainer as for the engine, or half as probable
    if (by === "ratio") return value === 1 ? {} : alpha(value > 1 ? 140 : 0, Math.abs(Math.log(Math.max(value, 1e-9))) / Math.log(2));
    if (by === "value") return value ? alpha(value > 0 ? 0 : 140, Math.abs(value) / most) : {};
    return alpha(280, value / most);
  };
}

function largestOf(values) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-9);
}

function ruleNames(rows) {
  return [...new Set((rows.rules ?? []).flat())].sort();
}

function legend(rows, by) {
  const swatch = (index, words) => h("li", {}, h("i", { class: "swatch", style: painter(rows, by)(index) }), words);
  const first = (test) => rows.text.findIndex((_, index) => test(index));
  const words = {
    logprob: "the redder, the less probable", advantage: "green: above 0, red: below 0", loss: "green: in the loss",
    trainer_logprob: "the redder, the less probable", ratio: "green: above 1, red: below 1", entropy: "the stronger, the higher",
    value: "red: above 0, green: below 0", rule: ruleNames(rows).length ? "" : "no rule clips or masks any of these tokens",
    origin: "", version: "", turn: "", temperature: "",
  }[by];
  const kinds = { version: rows.version, turn: rows.turn, temperature: rows.temperature, origin: rows.origin.map((one) => rows.origins[one]),
    rule: (rows.rules ?? []).map((names) => names[0] ?? -1) }[by];
  const names = kinds ? [...new Set(kinds)].slice(0, 8) : [];
  return h("ul", { class: "legend" }, words ? h("li", { class: "quiet" }, words) : "",
    names.filter((name) => by === "origin" || name !== -1).map((name) => swatch(first((index) => kinds[index] === name && (by === "origin" || !rows.origin[index])), `${by === "origin" ? "" : `${by} `}${shown(name)}${by === "rule" && rows.trainer.rules[name] ? `: ${rows.trainer.rules[name]}` : ""}`)),
    h("li", { class: "quiet" }, "dotted: not in the loss"));
}

function step(event, spans) {
  const by = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[event.key];
  const at = spans.indexOf(document.activeElement);
  if (!by || at < 0) return;
  spans[Math.max(0, Math.min(spans.length - 1, at + by))].focus();
  event.preventDefault();
}
