// Lists of sessions and of groups. The filters are in the address, so that it can be kept and sent.

import { ask } from "./api.js";
import { clock, element, figure, link, NONE, select, table, versions } from "./dom.js";

const SESSION_SORTS = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["longest", "longest first"],
  ["most_calls", "most calls first"],
  ["lowest_logprob", "lowest mean logprob first"],
  ["lowest_reward", "lowest reward first"],
  ["highest_reward", "highest reward first"],
];
const GROUP_SORTS = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["longest", "longest session first"],
  ["failed", "most failures first"],
  ["lowest_reward", "lowest mean reward first"],
  ["largest_spread", "largest spread of rewards first"],
];
const KINDS = {
  several_versions: "of several weight versions",
  several_replicas: "of several replicas",
  failed: "failed",
  training: "of training",
  validation: "of a validation",
};

/** A page of rows with filters; what differs is in the subclasses. */
class List {
  constructor(main, path, title, parameters) {
    this.path = path;
    this.parameters = parameters;
    this.filters = element("form", { className: "controls", on: { submit: (event) => event.preventDefault() } });
    this.body = element("div", {});
    this.pager = element("nav", { className: "pager", aria: { label: "Pages of the list" } });
    main.append(element("h2", {}, title), this.filters, this.body, this.pager);
  }

  /** Shows the list of other parameters. */
  show(parameters) {
    this.parameters = parameters;
    this.signature = "";
  }

  async update() {
    const { parameters } = this;
    const page = await ask(this.path, parameters);
    if (parameters !== this.parameters) return; // another list was asked for meanwhile
    const signature = JSON.stringify(page);
    if (signature === this.signature) return;
    this.signature = signature;
    this.showFilters(page.counts);
    const caption = page.matching === page.total ? `${figure(page.total)} ${this.path}` : `${figure(page.matching)} of ${figure(page.total)} ${this.path}`;
    this.body.replaceChildren(table(caption, this.columns(), page.rows));
    this.showPager(page);
  }

  /** Goes to the same list with another filter, on its first page. */
  change(name, value) {
    const parameters = { ...this.parameters, page: "", [name]: value };
    location.hash = `#/${this.path}?${new URLSearchParams(Object.entries(parameters).filter(([, text]) => text))}`;
  }

  address(page) {
    return `#/${this.path}?${new URLSearchParams({ ...this.parameters, page })}`;
  }

  chooser(label, name, counts, texts = {}) {
    const options = Object.entries(counts).filter(([value, count]) => count || value === this.parameters[name]);
    const chosen = this.parameters[name] ?? "";
    if (chosen && !(chosen in counts)) options.push([chosen, 0]);
    const listed = options.map(([value, count]) => [value, `${texts[value] ?? value} (${figure(count)})`]);
    return select(label, chosen, [["", "all"], ...listed], (value) => this.change(name, value));
  }

  search(label) {
    const input = element("input", { type: "search", value: this.parameters.text ?? "", on: { change: (event) => this.change("text", event.target.value.trim()) } });
    return element("label", {}, `${label} `, input);
  }

  showFilters(counts) {
    const focused = [...this.filters.elements].indexOf(document.activeElement);
    this.filters.replaceChildren(...this.fields(counts));
    if (focused >= 0) this.filters.elements[focused].focus();
  }

  showPager(page) {
    const last = Math.max(0, Math.ceil(page.matching / page.size) - 1);
    const parts = [];
    if (page.page > 0) parts.push(link("Previous", this.address(page.page - 1)));
    parts.push(element("span", {}, `Page ${page.page + 1} of ${last + 1}`));
    if (page.page < last) parts.push(link("Next", this.address(page.page + 1)));
    this.pager.replaceChildren(...parts);
  }

  key(event) {
    if (event.key !== "/") return false;
    this.filters.querySelector("input")?.focus();
    return true;
  }
}

export class Sessions extends List {
  constructor(main, parameters) {
    super(main, "sessions", "Sessions", parameters);
  }

  fields(counts) {
    return [
      select("Order", this.parameters.sort ?? "newest", SESSION_SORTS, (value) => this.change("sort", value)),
      this.chooser("Kind", "kind", counts.kind, KINDS),
      this.chooser("Outcome", "outcome", counts.outcome),
      this.chooser("Not trained, because of", "dropped", counts.dropped),
      this.chooser("Ended as", "reason", counts.reason),
      this.chooser("Stage", "stage", counts.stage),
      this.search("Session or prompt begins with"),
    ];
  }

  columns() {
    return [
      ["Session", (one) => link(one.session_id.slice(0, 16), `#/session/${encodeURIComponent(one.session_id)}`)],
      ["Prompt", (one) => link(one.uid.slice(0, 8), `#/sessions?text=${encodeURIComponent(one.uid)}`)],
      ["Outcome", (one) => outcome(one)],
      ["Ended as", (one) => one.reason ?? one.stage],
      ["Reward", (one) => figure(reward(one.rewards, one.session_id)), true],
      ["Calls", (one) => figure(one.calls), true],
      ["Tokens", (one) => figure(one.tokens), true],
      ["Mean logprob", (one) => figure(one.mean_logprob), true],
      ["Versions", (one) => versions(one.versions), true],
      ["Replicas", (one) => one.replicas.join(", ") || NONE],
      ["Opened", (one) => clock(one.opened_at)],
    ];
  }
}

export class Groups extends List {
  constructor(main, parameters) {
    super(main, "groups", "Groups", parameters);
  }

  fields(counts) {
    return [
      select("Order", this.parameters.sort ?? "newest", GROUP_SORTS, (value) => this.change("sort", value)),
      this.chooser("Outcome", "outcome", counts.outcome),
      this.search("Prompt begins with"),
    ];
  }

  columns() {
    return [
      ["Prompt", (one) => link(one.uid.slice(0, 18), `#/sessions?text=${encodeURIComponent(one.uid)}`)],
      ["Outcome", (one) => one.outcome],
      ["Sessions", (one) => figure(one.sessions), true],
      ["Failed", (one) => figure(one.failed), true],
      ["Mean reward", (one) => figure(one.mean_reward), true],
      ["Rewards", (one) => one.rewards.map((value) => figure(value)).join("  ") || NONE],
      ["Tokens", (one) => figure(one.tokens), true],
      ["Longest", (one) => figure(one.longest), true],
      ["Versions", (one) => versions(one.versions), true],
      ["Opened", (one) => clock(one.opened_at)],
    ];
  }
}

/** The reward that is trained: the one of that name, else the only one that is not of a turn, `NAME@SESSION.N`. */
export function reward(rewards, session) {
  const values = Object.entries(rewards).flatMap(([name, value]) => (name.includes(`@${session}.`) ? [] : [value]));
  return rewards.reward ?? (values.length === 1 ? values[0] : null);
}

function outcome(one) {
  return one.dropped && one.dropped !== one.outcome ? `${one.outcome} (${one.dropped})` : one.outcome;
}
