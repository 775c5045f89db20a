// Addresses, the head of the page, keys, and the refresh of a living run.

import { ask, leave } from "./api.js";
import { address, fill, h } from "./dom.js";
import * as group from "./group.js";
import * as groups from "./groups.js";
import * as overview from "./overview.js";
import * as step from "./step.js";
import * as trajectory from "./trajectory.js";

const PAGES = { overview, groups, group, trajectory, step };
const REFRESH = 3000;
const THEMES = ["", "dark", "light"];
const KEYS = [
  ["o", "overview"], ["g", "groups"], ["s", "newest step"], ["/", "search"], ["j, k", "next and previous group of a list"],
  ["Enter", "open what has the focus"], ["n, p", "older and newer page of a list; n on a group: its first completion"],
  ["[, ]", "previous and next completion or step"], ["← →", "another step of a chart, another token"], ["t", "dark, light, as the system"],
  ["?", "this list"]];
const main = document.getElementById("main"), top_ = document.getElementById("top"), help = document.getElementById("help");
let runs = [], current = {}, turn = 0;

const app = {
  /** The runs that the address chooses; all of them by default. */
  chosen(params) {
    const numbers = (params.get("runs") ?? "").split(",").filter(Boolean).map(Number);
    const found = runs.filter((one) => numbers.includes(one.run));
    return found.length ? found : runs;
  },
  /** The run of a page about a single one. */
  run(params) {
    return runs.find((one) => String(one.run) === (params.get("run") ?? "0")) ?? runs[0];
  },
  go(href) {
    history.pushState(null, "", href);
    return show();
  },
  /** Change some values of the address. With `keep` the focus stays where it is. */
  change(values, keep = false) {
    const merged = { ...Object.fromEntries(new URLSearchParams(location.search)), ...values };
    history.pushState(null, "", address(merged));
    return show(keep);
  },
};

function colour(index) {
  return `var(--run-${index % 8})`;
}

async function show(keep = false) {
  const mine = ++turn;
  leave();
  const params = new URLSearchParams(location.search);
  const name = params.get("page") in PAGES ? params.get("page") : "overview";
  const focused = keep ? document.activeElement : null;
  main.setAttribute("aria-busy", "true");
  try {
    runs = (await ask("runs")).runs.map((one, index) => ({ ...one, color: colour(index) }));
    if (mine !== turn) return;
    head(name, params);
    const made = await PAGES[name].render(params, app);
    if (mine !== turn) return;
    const again = focused?.name ?? focused?.id, at = focused?.selectionStart;
    current = made;
    fill(main, made.page);
    document.title = `${PAGES[name].title} · ${name === "overview" ? "actors view" : app.run(params).name}`;
    if (again) {
      const same = main.querySelector(`[name="${CSS.escape(again)}"], #${CSS.escape(again)}`);
      same?.focus();
      if (typeof at === "number" && same?.type === "search") same.setSelectionRange(at, at);
    } else if (!keep) {
      window.scrollTo(0, 0);
    }
  } catch (error) {
    if (error.name === "AbortError" || mine !== turn) return;
    current = {};
    fill(main, h("h1", {}, "This page can't be shown"), h("p", { class: "bad", role: "alert" }, error.message));
  } finally {
    if (mine === turn) main.setAttribute("aria-busy", "false");
  }
}

function head(name, params) {
  const run = app.run(params) ?? { run: 0 };
  const link = (page, words, values) => h("a", { href: address({ page, ...values }), "aria-current": page === name ? "page" : null }, words);
  const chosen = app.chosen(params).map((one) => one.run);
  const choice = name === "overview"
    ? h("div", { class: "runs", role: "group", "aria-label": "runs" }, runs.length < 2 ? [] : runs.map((one) => h("label", {},
      h("input", { type: "checkbox", checked: chosen.includes(one.run), onchange: (event) => {
        const left = runs.map((other) => other.run).filter((number) => (number === one.run ? event.target.checked : chosen.includes(number)));
        app.change({ runs: left.length === runs.length ? "" : left.join(",") });
      } }), h("i", { class: "swatch", style: { background: one.color } }), one.name)))
    : h("select", { "aria-label": "run", onchange: (event) => app.go(address({ page: name === "step" ? "step" : "groups", run: event.target.value })) },
      runs.map((one) => h("option", { value: one.run, selected: one.run === run.run }, one.name)));
  fill(top_, h("a", { class: "brand", href: address({}) }, "actors view"),
    h("nav", { "aria-label": "pages" }, link("overview", "Overview", { page: "" }), link("groups", "Groups", { run: run.run }), link("step", "Steps", { run: run.run })),
    choice,
    h("span", { class: "tools" }, h("button", { type: "button", onclick: theme, title: "dark, light, or as the system (t)" }, "Theme"),
      h("button", { type: "button", onclick: keys, title: "keys (?)" }, "Keys")));
}

function theme() {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("theme", next); } catch { /* a browser that keeps nothing */ }
}

function keys() {
  fill(help, h("h2", { id: "help-title" }, "Keys"), h("dl", { class: "facts" }, KEYS.map(([key, words]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)))),
    h("button", { type: "button", onclick: () => help.close() }, "Close"));
  if (!help.open) help.showModal();
}

function typing(target) {
  return target.matches?.("input, select, textarea") ?? false;
}

const GLOBAL = {
  o: () => app.go(address({})), g: () => app.go(address({ page: "groups", run: app.run(new URLSearchParams(location.search)).run })),
  s: () => app.go(address({ page: "step", run: app.run(new URLSearchParams(location.search)).run })), t: theme, "?": keys,
  "/": () => app.go(address({ page: "groups", run: app.run(new URLSearchParams(location.search)).run })).then(() => document.getElementById("search")?.focus()),
};

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && typing(event.target)) { event.target.blur(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || help.open) return;
  const act = current.keys?.[event.key] ?? GLOBAL[event.key];
  if (act) { event.preventDefault(); act(); }
});
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='?']");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  app.go(link.getAttribute("href"));
});
window.addEventListener("popstate", () => show());
setInterval(async () => {
  if (document.hidden || !current.update) return;
  const mine = turn;
  try { await current.update(); } catch (error) {
    if (error.name !== "AbortError" && mine === turn) main.dataset.problem = error.message;
  }
}, REFRESH);

try { document.documentElement.dataset.theme = localStorage.getItem("theme") ?? ""; } catch { /* as above */ }
show();
