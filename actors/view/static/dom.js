// Elements out of values. Every text becomes a text node, so that no text of a run can become markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** An HTML element with attributes, listeners (`onclick`), styles (an object) and children. */
export function h(tag, properties, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** An SVG element. */
export function s(tag, properties, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  return filled(element, {}, children);
}

/** A part of a page that is built again only if its value has changed, so that focus and hover stay. */
export function part(build, properties) {
  const element = h("div", properties);
  let before;
  return {
    element,
    show(value) {
      const now = JSON.stringify(value);
      if (now === before) return;
      before = now;
      fill(element, build(value));
    },
  };
}

const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function escaped(one) {
  return `\\u{${one.charCodeAt(0).toString(16)}}`;
}

/** A text in which characters that nobody sees, or that turn the direction of a line, are written out. */
export function plain(text) {
  return text.replace(STEERING, escaped);
}

/** The same as nodes: what is written out can be told from a text that says the same. */
export function visible(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(STEERING)) {
    found.push(text.slice(from, match.index), h("i", { class: "control" }, escaped(match[0])));
    from = match.index + match[0].length;
  }
  return [...found, text.slice(from)];
}

/** A text as it is written, letter by letter. A long one scrolls, so it can have the focus. */
export function written(text, kind) {
  const scrolls = text.length > 1000 || text.split("\n").length > 30;
  return h("pre", { class: kind ? `text ${kind}` : "text", dir: "auto", tabindex: scrolls ? 0 : null }, visible(text));
}

/** The address of a page of this application; empty values are left out. */
export function address(values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  return `?${query}`;
}

/** A number for people: at most `digits` digits that count; a dash where there is none. */
export function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(Math.max(2, digits - 2));
  return String(Number(value.toPrecision(digits)));
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** A table with a head; cells are texts or elements. */
export function table(head, rows, properties) {
  return h("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": properties?.label ?? "table" },
    h("table", { class: properties?.class },
      h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}

/** Names and values, one below the other. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function badge(word, kind) {
  return h("span", { class: `badge ${kind ?? ""}` }, word);
}
