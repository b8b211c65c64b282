// The tokens of one node: loaded in parts, coloured, and pointed at or walked through by the arrow keys.

import { element, figure } from "./dom.js";

const PART = 2000; // tokens of one question
const CONTEXT = [400, 200]; // context of more tokens than the first shows so many at first
const LEAST = -4; // nats, of the strongest colour

export const COLOURINGS = {
  version: {
    title: "weight version",
    legend: (scale) => [...scale].map(([version, colour]) => swatch(`v${colour}`, `version ${version}`)),
  },
  logprob: {
    title: "logprob",
    legend: () => [0, 0.25, 0.5, 0.75, 1].map((share) => swatch(`p${Math.round(share * 10)}`, figure(share * LEAST))),
  },
  mask: {
    title: "loss mask",
    legend: () => [swatch("trained", "trained"), swatch("untrained", "generated, not trained")],
  },
};

function swatch(name, text) {
  return element("span", { className: "legend-item" }, element("span", { className: `swatch ${name}` }), text);
}

export class TokenRun {
  /** `fetch(number, start, count)` gets tokens, `inspect` is told of one, `neighbour(run, step)` is the run beside. */
  constructor(node, fetch, inspect, neighbour, scale) {
    this.node = node;
    this.fetch = fetch;
    this.inspect = inspect;
    this.neighbour = neighbour;
    this.scale = scale;
    this.tokens = [];
    this.colouring = "version";
    this.generated = node.version !== null;
    this.flow = element("p", { className: "tokens" });
    this.more = element("button", { type: "button", hidden: true, on: { click: () => this.loadMore() } });
    this.element = element(
      "article",
      { className: this.generated ? "generated" : "context", data: { node: String(node.number) } },
      element("h3", {}, this.title()),
      this.flow,
      this.more,
    );
    for (const event of ["pointerover", "focusin"]) this.flow.addEventListener(event, (happened) => this.point(happened.target));
    this.flow.addEventListener("keydown", (event) => this.walk(event));
  }

  /** Whether the node is as this one shows it. */
  isOf(node) {
    return JSON.stringify(node) === JSON.stringify(this.node);
  }

  title() {
    const { node } = this;
    const count = `${figure(node.tokens)} token${node.tokens === 1 ? "" : "s"}`;
    if (!this.generated) return `Context: ${count}`;
    const turn = node.turn_id.slice(node.turn_id.lastIndexOf(".") + 1);
    const trained = node.trained === node.tokens ? "all trained" : `${figure(node.trained)} trained`;
    const why = Object.keys(node.dropped).join(", ");
    const end = node.sequence ? " · a training sequence ends here" : "";
    return `Turn ${turn} · version ${node.version} · ${node.replica} · ${count}, ${trained}${why ? ` (${why})` : ""}${end}`;
  }

  /** Loads the first part, once. */
  load() {
    this.loading ??= this.loadPart(this.generated || this.node.tokens <= CONTEXT[0] ? PART : CONTEXT[1]);
    return this.loading;
  }

  async loadMore() {
    await this.loadPart(PART);
    this.spans().at(-1)?.focus();
  }

  async loadPart(count) {
    const part = await this.fetch(this.node.number, this.tokens.length, count);
    if (part === null) return;
    const made = part.ids.map((id, at) => this.make(part, id, at));
    this.flow.append(...made);
    const left = part.total - this.tokens.length;
    this.more.hidden = left === 0;
    this.more.textContent = `Show ${figure(Math.min(left, PART))} more of ${figure(left)} tokens`;
    this.colour(this.colouring);
  }

  make(part, id, at) {
    const text = part.texts[at];
    const token = {
      node: this.node,
      index: this.tokens.length,
      id,
      text,
      logprob: part.logprobs[at],
      trained: part.mask[at] === 1,
      grammar: part.grammar[at],
    };
    this.tokens.push(token);
    return element("span", { className: "token", tabIndex: -1, data: { at: String(token.index) } }, shown(text, id));
  }

  spans() {
    return [...this.flow.children];
  }

  colour(colouring) {
    this.colouring = colouring;
    if (!this.generated) return;
    this.spans().forEach((span, at) => {
      const { logprob, trained } = this.tokens[at];
      const name = {
        version: `v${this.scale.get(this.node.version)}`,
        logprob: `p${Math.round(10 * Math.min(1, logprob / LEAST))}`,
        mask: trained ? "trained" : "untrained",
      }[colouring];
      span.className = `token ${name}`;
    });
  }

  point(target) {
    const at = target.dataset?.at;
    if (at !== undefined) this.inspect(this.tokens[Number(at)]);
  }

  /** Focuses a token; with `ifNone` only if the reader has not gone elsewhere while it was loaded. */
  async focusAt(index, ifNone = false) {
    await this.load();
    if (ifNone && document.activeElement !== document.body) return;
    this.spans().at(index)?.focus({ preventScroll: false });
  }

  /** The arrow keys go to the neighbouring token, also of the neighbouring run; Home and End to the ends of this one. */
  walk(event) {
    const at = Number(event.target.dataset.at);
    const last = this.tokens.length - 1;
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (next < 0) this.neighbour(this, -1)?.focusAt(-1);
    else if (next > last) this.neighbour(this, 1)?.focusAt(0);
    else this.spans()[next].focus();
  }
}

/** What stands for a token: its text, with a sign before each line's end, or its id where it has none. */
function shown(text, id) {
  return text === "" ? `⟨${id}⟩` : text.replaceAll("\n", "↵\n");
}
