// Curves as SVG. Charts of a page share the step under the pointer, so values of one step are read side by side.

import { fill, h, s, shown } from "./dom.js";

const HEIGHT = 170, RIGHT = 10, TOP = 10, BOTTOM = 22;
const pointed = new EventTarget();

/** Round values between two bounds, at most `count` of them. */
export function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

function bounds(series) {
  let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
  for (const one of series) {
    one.steps.forEach((step, index) => {
      const value = one.mean[index];
      if (value === null) return;
      low = Math.min(low, one.low?.[index] ?? value);
      high = Math.max(high, one.high?.[index] ?? value);
      first = Math.min(first, step);
      last = Math.max(last, step);
    });
  }
  if (low === Infinity) return null;
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  // a curve of shares or counts that touches 0 keeps 0 as its floor
  return { low: low >= 0 && low - room < 0 ? 0 : low - room, high: high + room, first, last };
}

function path(one, x, y) {
  let text = "", open = false;
  one.steps.forEach((step, index) => {
    const value = one.mean[index];
    if (value === null) { open = false; return; }
    text += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return text;
}

function band(one, x, y) {
  if (!one.low) return "";
  const kept = one.steps.map((step, index) => [step, one.low[index], one.high[index]]).filter(([, low]) => low !== null);
  if (kept.length < 2) return "";
  const upper = kept.map(([step, , high]) => `${x(step).toFixed(1)} ${y(high).toFixed(1)}`);
  const lower = kept.reverse().map(([step, low]) => `${x(step).toFixed(1)} ${y(low).toFixed(1)}`);
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

function nearest(steps, wanted) {
  let best = -1;
  steps.forEach((step, index) => {
    if (best < 0 || Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = index;
  });
  return best;
}

/**
 * A chart with a title.
 *
 * @param {string} title
 * @param {{name: string, color: string, dash?: string, steps: number[], mean: (number|null)[], low?, high?}[]} series
 * @param {{axis?: string, onstep?: (step: number) => void}} options
 */
export function chart(title, series, options = {}) {
  const range = bounds(series);
  const newest = series.map((one) => `${one.name} ${shown(one.mean.findLast((value) => value !== null) ?? null)}`);
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, title));
  if (!range) {
    figure.append(h("p", { class: "quiet" }, "no values yet"));
    return figure;
  }
  const words = h("div", { class: "chart-values", "aria-live": "off" });
  const label = `${title}, by ${options.axis ?? "step"}: newest values ${newest.join(", ")}`;
  const picture = h("div", { class: "chart-picture", tabindex: 0, role: "img", "aria-label": label });
  figure.append(picture, words);
  const up = ticks(range.low, range.high, 4).map((value) => [value, shown(value, 3)]);
  // room for the longest number at the left
  const LEFT = 14 + 6.6 * Math.max(...up.map(([, words]) => words.length));
  let step = null;

  function say() {
    const at = series.map((one) => [one, step === null ? one.mean.findLastIndex((v) => v !== null) : nearest(one.steps, step)]);
    fill(words, step === null ? [] : h("span", { class: "quiet" }, `${options.axis ?? "step"} ${shown(step)} `),
      at.map(([one, index]) => h("span", { class: "value" },
        h("i", { class: "swatch", style: { background: one.color } }), series.length > 1 ? `${one.name} ` : "",
        h("b", {}, shown(index < 0 ? null : one.mean[index])))));
  }

  function draw() {
    const width = Math.max(160, picture.clientWidth);
    const span = range.last - range.first || 1;
    const x = (value) => LEFT + ((value - range.first) / span) * (width - LEFT - RIGHT);
    const y = (value) => TOP + ((range.high - value) / (range.high - range.low)) * (HEIGHT - TOP - BOTTOM);
    const across = ticks(range.first, range.last, Math.min(8, Math.floor(width / 80))).filter(Number.isInteger);
    const svg = s("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" },
      up.map(([value, words]) => s("g", { class: "tick" },
        s("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, words))),
      across.map((value) => s("text", { class: "axis", x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, shown(value))),
      series.map((one) => s("path", { d: band(one, x, y), fill: one.color, opacity: 0.18 })),
      series.map((one) => s("path", { d: path(one, x, y), fill: "none", stroke: one.color, "stroke-width": 1.7,
        "stroke-dasharray": one.dash, "stroke-linejoin": "round" })),
      series.map((one) => one.steps.length > 40 ? [] : one.steps.map((at, index) => one.mean[index] === null ? [] :
        s("circle", { cx: x(at), cy: y(one.mean[index]), r: one.steps.length === 1 ? 3.5 : 2, fill: one.color }))),
      step === null ? [] : s("line", { class: "pointer", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM }));
    fill(picture, svg);
  }

  function point(value) {
    const found = value === null ? null : Math.min(range.last, Math.max(range.first, Math.round(value)));
    pointed.dispatchEvent(new CustomEvent("step", { detail: { step: found, axis: options.axis ?? "step" } }));
  }

  function place(event) {
    const box = picture.getBoundingClientRect();
    return range.first + ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (range.last - range.first);
  }

  picture.addEventListener("pointermove", (event) => point(place(event)));
  picture.addEventListener("pointerleave", () => point(null));
  picture.addEventListener("blur", () => point(null));
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      const stride = Math.max(1, Math.round((range.last - range.first) / 200));
      point((step ?? range.last) + by * stride);
      event.preventDefault();
    } else if (event.key === "Enter" && step !== null && options.onstep) options.onstep(step);
  });
  if (options.onstep) picture.addEventListener("click", (event) => options.onstep(Math.round(place(event))));
  const follow = (event) => {
    if (!figure.isConnected) { pointed.removeEventListener("step", follow); return; }
    if (event.detail.axis !== (options.axis ?? "step") || event.detail.step === step) return;
    step = event.detail.step;
    say();
    draw();
  };
  // once it is in the page: a chart that is not there yet would end its listening
  new ResizeObserver((_, observer) => {
    if (!figure.isConnected) { observer.disconnect(); return; }
    pointed.addEventListener("step", follow);
    draw();
  }).observe(picture);
  say();
  return figure;
}

/** Shares of a whole as a bar, with a legend in words. */
export function shares(parts) {
  const total = parts.reduce((sum, one) => sum + one.value, 0);
  if (!total) return h("p", { class: "quiet" }, "none yet");
  return h("div", {},
    h("div", { class: "shares", "aria-hidden": "true" }, parts.filter((one) => one.value).map((one) =>
      h("i", { style: { width: `${(100 * one.value) / total}%`, background: one.color } }))),
    h("ul", { class: "legend" }, parts.filter((one) => one.value).map((one) => h("li", {},
      h("i", { class: "swatch", style: { background: one.color } }), `${one.name} `, h("b", {}, shown(one.value))))));
}

/** Rewards of a group as small bars; the text beside them says the same. */
export function strip(values, title) {
  const known = values.filter((value) => value !== null);
  const low = Math.min(0, ...known), high = Math.max(...known, low + 1e-9);
  const width = Math.min(7, 112 / Math.max(1, values.length));
  return s("svg", { class: "strip", width: Math.ceil(width * values.length), height: 22, role: "img", "aria-label": title },
    values.map((value, index) => value === null
      ? s("rect", { class: "unscored", x: index * width, y: 20, width: width - 1, height: 2 })
      : s("rect", { x: index * width, y: 21 - Math.max(1.5, (20 * (value - low)) / (high - low)), width: width - 1,
        height: Math.max(1.5, (20 * (value - low)) / (high - low)) })));
}
