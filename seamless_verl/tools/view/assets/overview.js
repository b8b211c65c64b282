// The overview: the last step in numbers, what each device does, and metrics over steps.

import { ask } from "./api.js";
import { Chart } from "./chart.js";
import { element, figure, percent, select } from "./dom.js";
import { Lanes } from "./lanes.js";

const TILES = [
  ["Reward", "critic/score/mean", figure],
  ["Tokens/s a device", "perf/throughput", figure],
  ["Idle", "seamless/device/idle_share", percent],
  ["Staleness, mean", "training/off_policy/trajectory_staleness/mean", figure],
  ["Logprob difference", "seamless/agreement/plain/mean", figure],
  ["Time of a step (s)", "timing_s/step", figure],
];

export class Overview {
  constructor(main) {
    this.tiles = element("dl", { className: "tiles" });
    this.notes = element("div", { className: "notes" });
    this.lanes = new Lanes();
    this.charts = element("div", { className: "charts" });
    this.drawn = new Map();
    this.chosen = "";
    this.any = element("div", {});
    this.heading = element("h2", {}, "Over steps");
    main.append(
      element("h2", {}, "Last step"),
      this.tiles,
      this.notes,
      this.lanes.element,
      element("section", { aria: { label: "Metrics" } }, this.heading, this.charts, this.any),
    );
  }

  async update(run) {
    this.showTiles(run);
    this.notes.replaceChildren(...run.remarks.map((note) => element("p", {}, note)));
    this.lanes.ended = run.running === false && run.description !== null;
    await this.lanes.update();
    await this.updateCharts();
  }

  showTiles(run) {
    const tiles = TILES.filter(([, metric]) => metric in run.metrics);
    const texts = tiles.map(([title, metric, format]) => [title, format(run.metrics[metric])]);
    texts.push(["Sessions on record", figure(run.sessions)]);
    this.tiles.replaceChildren(
      ...texts.map(([title, text]) => element("div", {}, element("dt", {}, title), element("dd", {}, text))),
    );
  }

  async updateCharts() {
    const series = await ask("metrics", { name: this.chosen ? [this.chosen] : [] });
    const charts = [...series.charts];
    this.heading.textContent = series.every > 1 ? `Over steps, one in ${series.every} drawn` : "Over steps";
    if (this.chosen) charts.push({ key: "any", title: this.chosen, unit: "", lines: [[this.chosen, this.chosen]], about: "" });
    for (const chart of charts) {
      const known = this.drawn.get(chart.key);
      if (known?.signature === Chart.signature(chart)) known.update(series);
      else {
        const made = new Chart(chart, series);
        if (known) known.element.replaceWith(made.element);
        else this.charts.append(made.element);
        known?.close();
        this.drawn.set(chart.key, made);
      }
    }
    this.offer(series.names);
  }

  /** Offers all metrics of the run, when there are others than before. */
  offer(names) {
    if (this.offered === names.length || names.length === 0) return;
    this.offered = names.length;
    const options = [["", "none"], ...names.map((name) => [name, name])];
    const change = (value) => {
      this.chosen = value;
      if (value === "") {
        this.drawn.get("any")?.close();
        this.drawn.get("any")?.element.remove();
        this.drawn.delete("any");
      }
      this.updateCharts();
    };
    this.any.replaceChildren(select("Also draw", this.chosen, options, change));
  }

  close() {
    this.lanes.close();
    for (const chart of this.drawn.values()) chart.close();
  }
}
