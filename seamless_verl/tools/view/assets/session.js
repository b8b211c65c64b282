// One session, or two side by side: its tree, the text of each turn token by token, and what is known of a token.

import { ask } from "./api.js";
import { arrange, clock, element, figure, keepFocus, link, NONE, table } from "./dom.js";
import { reward } from "./lists.js";
import { COLOURINGS, TokenRun } from "./tokens.js";

/** One or two sessions; keys go to the one that has the focus, else to the first. */
export class Comparison {
  constructor(main, ids) {
    const box = element("div", { className: ids.length > 1 ? "side-by-side" : "" });
    main.append(box);
    this.panes = ids.map((id) => new SessionPane(box, id, ids.filter((other) => other !== id)));
  }

  async update() {
    for (const pane of this.panes) await pane.update();
  }

  key(event) {
    const pane = this.panes.find((one) => one.element.contains(document.activeElement)) ?? this.panes[0];
    return pane.key(event);
  }

  close() {
    for (const pane of this.panes) pane.close();
  }
}

class SessionPane {
  constructor(box, id, others) {
    this.id = id;
    this.others = others;
    this.path = `sessions/${encodeURIComponent(id)}`;
    this.colouring = "version";
    this.runs = new Map();
    this.head = element("div", {});
    this.tree = element("nav", { className: "tree", aria: { label: "Tree of the session" } });
    this.text = element("div", { className: "trajectory" });
    this.inspector = element("div", { className: "inspector", role: "status", aria: { label: "Token" } }, HINT);
    this.details = element("div", {});
    this.element = element(
      "section",
      { className: "session", aria: { label: `Session ${id}` } },
      element("h2", {}, `Session ${id}`),
      this.head,
      this.controls(),
      element("div", { className: "columns" }, this.tree, element("div", { className: "reading" }, this.text, this.inspector)),
      this.details,
    );
    box.append(this.element);
    this.seen = new IntersectionObserver((entries) => this.load(entries), { rootMargin: "600px" });
  }

  controls() {
    const name = `colour-${this.id}`;
    const choices = Object.entries(COLOURINGS).map(([value, { title }]) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name, value, checked: value === this.colouring, on: { change: () => this.colour(value) } }),
        ` ${title}`,
      ),
    );
    this.legend = element("span", { className: "legend" });
    return element(
      "div",
      { className: "controls" },
      element("fieldset", {}, element("legend", {}, "Colour tokens by"), ...choices),
      element("button", { type: "button", className: "next", on: { click: () => this.jump(1) } }, "Next weight change (n)"),
      element("button", { type: "button", on: { click: () => this.jump(-1) } }, "Previous (p)"),
      this.legend,
    );
  }

  async update() {
    const answer = await ask(this.path);
    const signature = JSON.stringify(answer);
    if (signature === this.signature) return;
    this.signature = signature;
    this.answer = answer;
    const { session } = answer;
    if (this.revision !== session.revision) {
      this.revision = session.revision;
      keepFocus(this.tree, () => this.showTree(session));
      if (session.nodes.length) this.showPath(this.chosen ?? 0);
    }
    keepFocus(this.head, () => this.showHead(answer));
    keepFocus(this.details, () => this.showDetails(session));
  }

  showHead({ session, group, remarks }) {
    const dropped = Object.entries(session.dropped).map(([reason, count]) => `${figure(count)} ${reason}`);
    const facts = [
      ["Reward", figure(reward(session.rewards, this.id))],
      ["Advantage", advantage(session.advantage)],
      ["Group's mean", figure(mean(Object.entries(group).map(([id, rewards]) => reward(rewards, id))))],
      ["Outcome", session.outcome],
      ["Ended as", session.reason ?? session.stage],
      ["Tokens", `${figure(session.generated)} generated, ${figure(session.trained)} trained${dropped.length ? `; ${dropped.join(", ")}` : ""}`],
      ["Policy", `${session.policy} at version ${session.version}`],
      ["Opened", clock(session.opened_at)],
    ];
    const others = Object.entries(group).filter(([id]) => id !== this.id && !this.others.includes(id));
    const beside = others.flatMap(([id, rewards]) => [
      link(`${id.slice(0, 8)} (${figure(reward(rewards, id))})`, `#/session/${encodeURIComponent(this.id)}?with=${encodeURIComponent(id)}`),
      " ",
    ]);
    this.head.replaceChildren(
      element("dl", { className: "tiles small" }, ...facts.map(([title, text]) => element("div", {}, element("dt", {}, title), element("dd", {}, text)))),
      ...remarks.map((note) => element("p", { className: "notes" }, note)),
      ...session.drifts.map((drift) => this.drift(drift)),
      beside.length ? element("p", { className: "beside" }, "Beside another of its group, with its reward: ", ...beside) : "",
      this.others.length ? element("p", {}, link("Only this session", `#/session/${encodeURIComponent(this.id)}`)) : "",
    );
  }

  drift(drift) {
    return element(
      "div",
      { className: "drift" },
      element("p", {}, element("strong", {}, "Drift. "), `${short(drift.turn_id)} left the record of ${short(drift.recorded_turn_id)} at token ${figure(drift.at_token)} (${drift.cause}): ${drift.text}. ${figure(drift.lost_tokens)} generated tokens are no longer its context; they stay in the sequence in which they were recorded.`),
      element("dl", {}, element("dt", {}, "recorded"), element("dd", {}, element("code", {}, drift.recorded)), element("dt", {}, "replayed"), element("dd", {}, element("code", {}, drift.replayed))),
    );
  }

  /** The tree as nested lists: an only child follows its parent, the children of a fork are branches. */
  showTree({ nodes }) {
    const children = new Map();
    for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
    this.children = children;
    this.scale = versionScale(nodes);
    const listed = (parent) => {
      const list = element("ul", {});
      let below = children.get(parent) ?? [];
      while (below.length === 1) {
        list.append(element("li", {}, this.treeButton(below[0])));
        below = children.get(below[0].number) ?? [];
      }
      for (const child of below) {
        const branch = listed(child.number);
        list.append(element("li", { className: "branch" }, this.treeButton(child), branch));
      }
      return list;
    };
    this.tree.replaceChildren(element("h3", {}, "Tree"), listed(null));
  }

  treeButton(node) {
    const words = node.version === null ? `context ${figure(node.tokens)}` : `${figure(node.tokens)} tokens, version ${node.version}, ${node.replica}`;
    const part = element("button", { type: "button", data: { node: String(node.number) }, on: { click: () => this.choose(node.number) } });
    if (node.version !== null) part.append(element("span", { className: `swatch v${this.scale.get(node.version)}` }));
    part.append(words);
    return part;
  }

  async choose(number) {
    if (!this.onPath.includes(number)) this.showPath(number);
    const run = this.runs.get(number);
    run.element.scrollIntoView({ block: "center" });
    await run.focusAt(0);
  }

  /** Shows the path through this node: from the root to it, and on by first children. What has not changed stays. */
  showPath(number) {
    this.chosen = number;
    const { nodes } = this.answer.session;
    const path = [];
    for (let at = number; at !== null && at !== undefined; at = nodes[at].parent) path.unshift(at);
    for (let below = this.children.get(number); below?.length; below = this.children.get(below[0].number)) path.push(below[0].number);
    this.onPath = path;
    this.seen.disconnect();
    const focused = this.text.contains(document.activeElement) ? document.activeElement : null;
    const [node, token] = [focused?.closest("article").dataset.node, focused?.dataset.at];
    const known = this.runs;
    this.runs = new Map(path.map((at) => [at, this.runOf(nodes[at], known.get(at))]));
    arrange(this.text, path.map((at) => this.runs.get(at).element));
    if (focused && !focused.isConnected) this.runs.get(Number(node))?.focusAt(Number(token ?? 0), true);
    for (const run of this.runs.values()) this.seen.observe(run.element);
    for (const part of this.tree.querySelectorAll("button")) {
      if (path.includes(Number(part.dataset.node))) part.setAttribute("aria-current", "true");
      else part.removeAttribute("aria-current");
    }
    this.colour(this.colouring);
  }

  /** The run of tokens of a node: the known one, if the node is as it was. */
  runOf(node, known) {
    if (known?.isOf(node)) {
      known.scale = this.scale;
      return known;
    }
    const fetch = (number, start, count) => this.fetch(number, start, count);
    return new TokenRun(node, fetch, (token) => this.inspect(token), (run, step) => this.neighbour(run, step), this.scale);
  }

  async fetch(node, start, count) {
    const tokens = await ask(`${this.path}/nodes/${node}`, { start, count, revision: this.revision });
    if (tokens === null) await this.update(); // the session went on meanwhile
    return tokens;
  }

  load(entries) {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      this.runs.get(Number(entry.target.dataset.node))?.load();
      this.seen.unobserve(entry.target);
    }
  }

  neighbour(run, step) {
    const at = this.onPath[this.onPath.indexOf(run.node.number) + step];
    return this.runs.get(at);
  }

  colour(value) {
    this.colouring = value;
    for (const run of this.runs.values()) run.colour(value);
    this.legend.replaceChildren(...COLOURINGS[value].legend(this.scale));
  }

  /** Goes to the next or previous token on the path before which weights or replica changed. */
  async jump(step) {
    const changes = weightChanges(this.onPath.map((at) => this.answer.session.nodes[at]));
    const order = this.onPath;
    const here = order.indexOf(this.at ?? order[0]);
    const later = changes.filter((at) => (step > 0 ? order.indexOf(at) > here : order.indexOf(at) < here));
    const next = step > 0 ? later[0] : later.at(-1);
    if (next === undefined) {
      this.inspector.replaceChildren(changes.length ? "No further weight change on this path." : "One weight version generated all of this path.");
      return;
    }
    this.at = next;
    const run = this.runs.get(next);
    run.element.scrollIntoView({ block: "center" });
    await run.focusAt(0);
  }

  inspect({ node, index, id, text, logprob, trained, grammar }) {
    this.at = node.number;
    const generated = node.version !== null;
    const facts = [
      ["token", JSON.stringify(text)],
      ["id", String(id)],
      ["place", figure(node.start + index)],
      ...(generated
        ? [
            ["version", String(node.version)],
            ["replica", node.replica],
            ["logprob", `${figure(logprob)} (${figure(100 * Math.exp(logprob), 2)}%)`],
            ["trained", trained ? "yes" : `no${Object.keys(node.dropped).length ? `: ${Object.keys(node.dropped).join(", ")}` : ""}`],
            ["turn", short(node.turn_id)],
            ...(grammar ? [["grammar", grammar === 2 ? "allowed no other token" : "chosen among the allowed"]] : []),
          ]
        : [["", "context, which the agent or the template wrote"]]),
    ];
    this.inspector.replaceChildren(element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", { data: { fact: name } }, value)))));
  }

  showDetails(session) {
    const columns = [
      ["Turn", (one) => short(one.turn_id)],
      ["Ended", (one) => one.finish],
      ["Read", (one) => figure(one.prompt), true],
      ["New", (one) => figure(one.new), true],
      ["Wrote", (one) => figure(one.generated), true],
      ["", (one) => element("button", { type: "button", on: { click: () => this.showTurn(one.turn_id) } }, "Request and reply")],
    ];
    this.request ??= element("pre", { tabIndex: 0, hidden: true, aria: { label: "Request and reply" } });
    const rewards = Object.entries(session.rewards).map(([name, value]) => `${name} ${figure(value)}`);
    this.details.replaceChildren(
      table(`${session.turns.length} turns`, columns, session.turns),
      this.request,
      element("p", {}, `Rewards: ${rewards.join(", ") || NONE}. Prompt ${session.uid}.`),
      ...session.refused.map((one) => element("p", { className: "notes" }, `A request was refused: ${one}`)),
    );
  }

  async showTurn(turn) {
    const texts = await ask(`${this.path}/turns/${encodeURIComponent(turn)}`);
    this.request.textContent = JSON.stringify(texts, null, 2);
    this.request.hidden = false;
    this.request.focus();
  }

  key(event) {
    if (event.key === "n" || event.key === "p") this.jump(event.key === "n" ? 1 : -1);
    else return false;
    return true;
  }

  close() {
    this.seen.disconnect();
  }
}

const HINT = "Point at a token, or go to one: n and p for weight changes, then the arrow keys.";

function short(turn) {
  const dot = turn.lastIndexOf(".");
  return dot > 0 ? `turn ${turn.slice(dot + 1)}` : turn;
}

/** Its mean over trained tokens, and its range if they differ. */
function advantage(found) {
  if (found === null) return NONE;
  const [middle, least, greatest] = found;
  return greatest > least ? `${figure(middle)} (${figure(least)} to ${figure(greatest)})` : figure(middle);
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function generatedVersions(nodes) {
  return [...new Set(nodes.filter((node) => node.version !== null).map((node) => node.version))].sort((a, b) => a - b);
}

/** The colour's number of each version of the tree, in the order of versions. */
function versionScale(nodes) {
  return new Map(generatedVersions(nodes).map((version, place) => [version, place % 8]));
}
/** The nodes of a path that were generated by other weights, or another replica, than the generated one before. */
function weightChanges(path) {
  const generated = path.filter((node) => node.version !== null);
  return generated.filter((node, at) => at > 0 && (node.version !== generated[at - 1].version || node.replica !== generated[at - 1].replica)).map((node) => node.number);
}
