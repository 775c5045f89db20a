// Messages as people read them. All texts are text nodes: nothing in them is ever taken as markup.

import { h, shown, written } from "./dom.js";

function text(content) {
  if (content === null || content === undefined) return "";
  if (!Array.isArray(content)) return String(content);
  return content.map((one) => (one && typeof one === "object" ? one.text ?? `[${one.type ?? "part"}]` : `${one}`)).join(" ");
}

function call(one) {
  const named = one.function ?? one;
  const given = typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments ?? "");
  return written(`${named.name ?? "?"}(${given})`, "call");
}

/** Messages below each other. `rewards`: pairs of turn and reward. */
export function conversation(messages, rewards = []) {
  let turn = -1;
  return h("div", { class: "conversation" }, messages.map((message) => {
    if (message.role === "assistant") turn += 1;
    const reward = message.role === "assistant" ? rewards.find(([of]) => of === turn) : undefined;
    const content = text(message.content), calls = message.tool_calls ?? [];
    return h("div", { class: `message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "plain"}` },
      message.role ? h("div", { class: "role" }, message.role, message.name ? ` ${message.name}` : "") : "",
      message.reasoning_content ? h("details", { open: true }, h("summary", {}, "thoughts"), written(String(message.reasoning_content))) : "",
      content || !calls.length ? written(content) : "", calls.map(call),
      reward ? h("div", { class: "quiet" }, `reward of the turn ${shown(reward[1])}`) : "");
  }));
}
