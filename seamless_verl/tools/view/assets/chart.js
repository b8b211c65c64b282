// A chart of metrics over steps, drawn by uPlot.

import { element, figure } from "./dom.js";

const COLOURS = ["--line-0", "--line-1", "--line-2", "--line-3", "--line-4"];
const HEIGHT = 180;
const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  constructor(chart, series) {
    this.chart = chart;
    this.signature = Chart.signature(chart);
    this.plot = null;
    this.box = element("div", { className: "plot" });
    const unit = chart.unit ? ` (${chart.unit})` : "";
    this.element = element(
      "figure",
      { data: { chart: chart.key } },
      element("figcaption", {}, element("strong", {}, chart.title + unit), " ", element("span", {}, chart.about)),
      this.box,
    );
    this.series = series;
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.box);
    this.recolour = () => {
      this.plot?.destroy();
      this.plot = null;
      this.draw();
    };
    dark.addEventListener("change", this.recolour);
  }

  /** What must be the same for a chart to be brought up to date in place. */
  static signature(chart) {
    return JSON.stringify([chart.key, chart.lines]);
  }

  update(series) {
    this.series = series;
    this.draw();
  }

  lines() {
    return this.chart.lines.filter(([metric]) => metric in this.series.values);
  }

  draw() {
    const width = this.box.clientWidth;
    if (width === 0) return;
    const lines = this.lines();
    const values = lines.map(([metric]) => this.series.values[metric]);
    if (this.plot === null || this.count !== lines.length) {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(width, lines), [this.series.steps, ...values], this.box);
      this.count = lines.length;
      this.plot.root.querySelector(".u-wrap").setAttribute("role", "img");
      this.plot.root.querySelector(".u-legend").setAttribute("aria-label", `Values of ${this.chart.title} at the pointer`);
    } else {
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData([this.series.steps, ...values]);
    }
    this.plot.root.querySelector(".u-wrap").setAttribute("aria-label", this.label(lines));
    requestAnimationFrame(() => this.readLast()); // when uPlot has drawn
  }

  /** Shows the values of the last step, unless the pointer shows another's. */
  readLast() {
    if (this.plot && this.plot.cursor.left < 0) this.plot.setLegend({ idx: this.series.steps.length - 1 });
  }

  /** The chart in words: the last value of each line. */
  label(lines) {
    const last = lines.map(([metric, label]) => {
      const value = this.series.values[metric].findLast((one) => one !== null);
      return `${label} ${figure(value)}`;
    });
    return `${this.chart.title}, at the last step: ${last.join(", ")}`;
  }

  options(width, lines) {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false } };
    return {
      width,
      height: HEIGHT,
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
        { ...axis, size: 56, values: (plot, ticks) => ticks.map((tick) => figure(tick)) },
      ],
      series: [
        { label: "step" },
        ...lines.map(([, label], number) => ({
          label,
          stroke: colour(this.chart.of_use ? `--use-${label}` : COLOURS[number % COLOURS.length]),
          width: 1.75,
          spanGaps: true,
          value: (plot, value) => figure(value),
        })),
      ],
    };
  }

  close() {
    this.resized.disconnect();
    dark.removeEventListener("change", this.recolour);
    this.plot?.destroy();
  }
}
