// Messages as people read them. All texts are text nodes: nothing in them is ever taken as markup.

import { h, shown, written } from "./dom.js";

function words(part) {
  if (!part || typeof part !== "object") return `${part}`;
  return part.text ?? `[${part.type ?? "part"}${part.digest ? ` ${part.digest}` : ""}]`;
}

function picture(digest, images) {
  const [height, width] = images.sizes[digest];
  // a damaged file has a size and no pixels
  const replace = (event) => event.target.replaceWith(written(`[image ${digest}]`));
  return h("img", { src: images.at + digest, alt: `image ${width}x${height} ${digest.slice(0, 6)}`, title: digest, width, height, loading: "lazy", onerror: replace });
}

// texts and pictures in the order of the parts; neighbouring texts are one
function parts(content, images) {
  if (content === null || content === undefined || content === "") return [];
  if (!Array.isArray(content)) return [written(String(content))];
  const found = [];
  let texts = [];
  const end = () => { if (texts.length) found.push(written(texts.join(" "))); texts = []; };
  for (const part of content) {
    if (part?.type === "image" && Object.hasOwn(images.sizes, part.digest)) { end(); found.push(picture(part.digest, images)); }
    else texts.push(words(part));
  }
  end();
  return found;
}

/** The pictures that a group's messages may show. */
export function imagesOf(run, group) {
  return { at: `/api/runs/${run.run}/groups/${group.ordinal}/images/`, sizes: group.images ?? {} };
}

function call(one) {
  const named = one.function ?? one;
  const given = typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments ?? "");
  return written(`${named.name ?? "?"}(${given})`, "call");
}

/** Messages below each other. `rewards`: pairs of turn and reward. */
export function conversation(messages, images, rewards = []) {
  let turn = -1;
  return h("div", { class: "conversation" }, messages.map((message) => {
    if (message.role === "assistant") turn += 1;
    const reward = message.role === "assistant" ? rewards.find(([of]) => of === turn) : undefined;
    const content = parts(message.content, images), calls = message.tool_calls ?? [];
    return h("div", { class: `message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "plain"}` },
      message.role ? h("div", { class: "role" }, message.role, message.name ? ` ${message.name}` : "") : "",
      message.reasoning_content ? h("details", { open: true }, h("summary", {}, "thoughts"), written(String(message.reasoning_content))) : "",
      content.length || calls.length ? content : written(""), calls.map(call),
      reward ? h("div", { class: "quiet" }, `reward of the turn ${shown(reward[1])}`) : "");
  }));
}
