// Makes elements, and formats numbers. Text is always set as text, never as HTML: it is what agents wrote.

/** An element with properties and children; `on` has listeners, `data` and `aria` are attributes of these prefixes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (name === "data" || name === "aria") {
      for (const [part, text] of Object.entries(value)) made.setAttribute(`${name}-${part}`, text);
    } else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A select with a label around it; `options` are [value, text]. */
export function select(label, value, options, change) {
  const chosen = element(
    "select",
    { on: { change: (event) => change(event.target.value) } },
    ...options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)),
  );
  return element("label", {}, `${label} `, chosen);
}

/** A table; `columns` are [title, cell of a row, whether it is a number]. */
export function table(caption, columns, rows) {
  const head = columns.map(([title, , numeric]) =>
    element("th", { scope: "col", className: numeric ? "number" : "" }, title),
  );
  const body = rows.map((row) =>
    element("tr", {}, ...columns.map(([, cell, numeric]) => element("td", { className: numeric ? "number" : "" }, cell(row)))),
  );
  return element(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", aria: { label: caption } },
    element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)),
  );
}

export function link(text, address) {
  return element("a", { href: address }, text);
}

export const NONE = "–";

/** A number with so many significant digits; a dash for none. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(1)}%`;
}

export function seconds(value) {
  if (value < 60) return `${Number(value.toFixed(value < 10 ? 1 : 0))} s`;
  const whole = Math.round(value);
  const two = (number) => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
}

export function versions(range) {
  if (!range) return NONE;
  return range[0] === range[1] ? String(range[0]) : `${range[0]} to ${range[1]}`;
}

/** Puts these elements into a box in this order; those that are in it stay where they are, and keep the focus. */
export function arrange(box, elements) {
  for (const child of [...box.children]) if (!elements.includes(child)) child.remove();
  elements.forEach((one, place) => {
    if (box.children[place] !== one) box.insertBefore(one, box.children[place] ?? null);
  });
}

/** Changes what is in a box; the focus goes to what then stands for the element that had it: of the same node, or place. */
export function keepFocus(box, change) {
  const parts = () => [...box.querySelectorAll("button, a[href], [tabindex]")];
  const place = parts().indexOf(document.activeElement);
  const node = document.activeElement?.dataset?.node;
  change();
  if (place < 0) return;
  const same = node === undefined ? undefined : parts().find((one) => one.dataset.node === node);
  (same ?? parts()[place])?.focus({ preventScroll: true });
}
