// The page: which view is shown, by the address behind #, and when it is brought up to date.

import { ask } from "./api.js";
import { clock } from "./dom.js";
import { Groups, Sessions } from "./lists.js";
import { Overview } from "./overview.js";
import { Comparison } from "./session.js";

const LIVE_MS = 4000; // between two looks at a run that goes on
const ENDED_MS = 30000;
const main = document.getElementById("main");
let view = null;
let shownAddress = null;
let timer = 0;
let turn = 0;

/** The page of an address such as #/session/ab12?with=cd34, with its parameters. */
function page() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  const parameters = Object.fromEntries(new URLSearchParams(query));
  const [, kind = "", id = ""] = path.split("/").map(decodeURIComponent);
  const kinds = {
    session: ["sessions", () => new Comparison(main, [id, parameters.with].filter(Boolean))],
    sessions: ["sessions", () => new Sessions(main, parameters)],
    groups: ["groups", () => new Groups(main, parameters)],
  };
  const [name, make] = kinds[kind] ?? ["overview", () => new Overview(main)];
  return { kind, name, make, parameters };
}

async function show() {
  if (location.hash !== shownAddress) {
    shownAddress = location.hash;
    const { kind, name, make, parameters } = page();
    for (const item of document.querySelectorAll("nav a")) {
      if (item.dataset.page === name) item.setAttribute("aria-current", "page");
      else item.removeAttribute("aria-current");
    }
    if (view?.path === kind) view.show(parameters); // the same list, which keeps the focus
    else {
      view?.close?.();
      main.replaceChildren();
      view = make();
      window.scrollTo(0, 0);
    }
  }
  await update();
}

/** Brings the view up to date, and again after a while; what a later call has overtaken ends without effect. */
async function update() {
  clearTimeout(timer);
  turn += 1;
  const mine = turn;
  let running = true;
  try {
    const run = await ask("run");
    if (mine !== turn) return;
    running = run.running !== false;
    showRun(run);
    await view.update(run);
    if (mine === turn) problem("");
  } catch (error) {
    if (mine === turn) problem(error.message);
  }
  if (mine === turn) timer = setTimeout(() => (document.hidden ? waitUntilVisible() : update()), running ? LIVE_MS : ENDED_MS);
}

function waitUntilVisible() {
  document.addEventListener("visibilitychange", update, { once: true });
}

function showRun(run) {
  const name = run.description?.name ?? run.folder.split("/").filter(Boolean).slice(-2).join("/");
  const state = { true: "running", false: "ended" }[run.running] ?? "";
  setText("name", name);
  const began = run.description ? `started ${clock(run.description.began)}` : "";
  const step = run.step === null ? "" : `step ${run.step}`;
  setText("state", [state, step, run.description?.layout, began].filter(Boolean).join(" · "));
  document.title = `${run.step === null ? "" : `${run.step} · `}${name}`;
}

/** Sets text only if it has changed, so that a screen reader does not read it again. */
function setText(id, text) {
  const where = document.getElementById(id);
  if (where.textContent !== text) where.textContent = text;
}

function problem(text) {
  setText("problem", text);
  document.getElementById("problem").hidden = text === "";
}

document.getElementById("skip").addEventListener("click", () => main.focus());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (!typing && view?.key?.(event)) event.preventDefault();
});
window.addEventListener("hashchange", show);
show();
