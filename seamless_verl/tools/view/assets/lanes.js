// What each device did over time: a lane for each, filled from below by what it was spent on.

import { ask } from "./api.js";
import { element, percent, seconds, select } from "./dom.js";

const HEIGHT = 26;
const WINDOWS = [["0", "the whole run"], ["3600", "the last hour"], ["600", "the last 10 minutes"], ["60", "the last minute"]];
const PIXELS = 2; // of the page, for a column
const AXIS_TICKS = 6;

export class Lanes {
  constructor() {
    this.last = "0";
    this.rows = element("div", { className: "lanes" });
    this.legend = element("ul", { className: "legend" });
    this.readout = element("p", { className: "readout", role: "status" });
    const choose = select("Show", this.last, WINDOWS, (value) => {
      this.last = value;
      this.update();
    });
    this.element = element(
      "section",
      { aria: { label: "Devices" } },
      element("h2", {}, "Devices"),
      element("div", { className: "controls" }, choose, this.legend),
      this.rows,
      this.readout,
    );
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.rows);
    this.recolour = () => this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.recolour);
  }

  async update() {
    const room = Math.max(300, this.rows.clientWidth - 200);
    const { last } = this;
    const lanes = await ask("devices", { columns: Math.min(2000, Math.floor(room / PIXELS)), last });
    if (last !== this.last) return; // another window was chosen meanwhile
    this.lanes = lanes;
    if (this.lanes === null) {
      const missing = this.ended ? "The run has ended, and what devices did is not on record." : "What devices did is on record when the first step has ended.";
      this.rows.replaceChildren(element("p", {}, missing));
      return;
    }
    this.fill();
    this.draw();
  }

  fill() {
    const { names, kinds, totals } = this.lanes;
    this.legend.replaceChildren(
      ...kinds.map((kind) => element("li", {}, element("span", { className: `swatch use-${kind}` }), kind)),
    );
    const idle = kinds.indexOf("idle");
    const rows = names.map((name, lane) => {
      const words = kinds.map((kind, at) => `${kind} ${percent(totals[lane][at])}`).join(", ");
      const canvas = element("canvas", { role: "img", data: { lane: String(lane) }, aria: { label: `${name}: ${words}` } });
      canvas.addEventListener("pointermove", (event) => this.point(event, lane));
      return [element("span", { className: "lane-name", title: name }, name), canvas, element("span", { className: "number" }, `${percent(totals[lane][idle])} idle`)];
    });
    const axis = element("canvas", { className: "axis", aria: { hidden: "true" } });
    this.rows.replaceChildren(...rows.flat(), element("span"), axis, element("span"));
    const measure = `until ${seconds(this.lanes.until)} after the start, ${this.lanes.steps.length} steps`;
    if (!this.pointed) this.readout.textContent = measure;
  }

  draw() {
    if (!this.lanes) return;
    const style = getComputedStyle(document.documentElement);
    const colours = this.lanes.kinds.map((kind) => style.getPropertyValue(`--use-${kind}`).trim());
    for (const canvas of this.rows.querySelectorAll("canvas[data-lane]")) this.drawLane(canvas, colours);
    const axis = this.rows.querySelector("canvas.axis");
    if (axis) this.drawAxis(axis, style.getPropertyValue("--soft").trim());
  }

  drawLane(canvas, colours) {
    const { shares, columns, kinds } = this.lanes;
    const [pen, width] = prepared(canvas, HEIGHT);
    const lane = shares[Number(canvas.dataset.lane)];
    for (let column = 0; column < columns; column += 1) {
      const left = Math.floor((column * width) / columns);
      const right = Math.ceil(((column + 1) * width) / columns);
      let below = 0;
      for (let kind = 0; kind < kinds.length; kind += 1) {
        const share = (lane[column * kinds.length + kind] / 1000) * HEIGHT;
        if (share <= 0) continue;
        pen.fillStyle = colours[kind];
        pen.fillRect(left, HEIGHT - below - share, right - left, share);
        below += share;
      }
    }
  }

  /** Times below the lanes, and a tick at the end of each step. */
  drawAxis(canvas, ink) {
    const { start, until, steps } = this.lanes;
    const [pen, width] = prepared(canvas, HEIGHT);
    const place = (time) => ((time - start) / (until - start)) * width;
    pen.fillStyle = ink;
    for (const [, end] of steps.length < width / 4 ? steps : []) pen.fillRect(Math.min(width - 1, place(end)), 0, 1, 6);
    pen.font = "11px system-ui, sans-serif";
    for (let tick = 0; tick <= AXIS_TICKS; tick += 1) {
      const time = start + ((until - start) * tick) / AXIS_TICKS;
      pen.textAlign = tick === 0 ? "left" : tick === AXIS_TICKS ? "right" : "center";
      pen.fillText(seconds(time), place(time), 20);
    }
  }

  /** Says what a lane did at the pointer's time. */
  point(event, lane) {
    this.pointed = true;
    const { names, kinds, shares, columns, start, until, steps } = this.lanes;
    const box = event.target.getBoundingClientRect();
    const share = Math.min(0.999999, Math.max(0, (event.clientX - box.left) / box.width));
    const column = Math.floor(share * columns);
    const time = start + share * (until - start);
    const parts = kinds
      .map((kind, at) => [kind, shares[lane][column * kinds.length + at] / 1000])
      .filter(([, part]) => part > 0.005)
      .map(([kind, part]) => (part > 0.995 ? kind : `${kind} ${percent(part)}`));
    const step = steps.find(([, end]) => end >= time);
    this.readout.textContent = `${names[lane]}, ${seconds(time)}${step ? ` (${step[0]})` : ""}: ${parts.join(", ")}`;
  }

  close() {
    this.resized.disconnect();
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.recolour);
  }
}

/** The canvas at the screen's own resolution: its pen in units of the page, and its width in them. */
function prepared(canvas, height) {
  const width = Math.max(1, canvas.clientWidth);
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}
