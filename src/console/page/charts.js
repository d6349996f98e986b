// Charts as SVG. Numbers come in, elements go out; text is put in as text only.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

/** An element of SVG with these attributes. */
function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** An element of HTML with a class and children; strings among them are text. */
function element(name, kind, ...children) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

/** A bar of parts that lie side by side, `whole` wide together with what is left. */
function bar(parts, whole, label) {
  const svg = shape("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label });
  svg.append(shape("rect", { class: "rail", x: 0, y: 0, width: 100, height: 10, fill: "var(--line)" }));
  let x = 0;
  for (const [kind, value] of parts) {
    const width = whole > 0 ? Math.min(100 - x, (100 * value) / whole) : 0;
    if (width > 0) svg.append(shape("rect", { class: kind, x, y: 0, width, height: 10 }));
    x += width;
  }
  return svg;
}

/**
 * Values over time, stacked.
 *
 * `columns`: oldest first, each `{ago, span, values}` in seconds; `kinds`: class and name of each value;
 * `share`: whether each column is shown as shares of its sum; `say`: a column in words.
 */
class Stacked {
  constructor(into, kinds, { share, say, scale, nothing }) {
    Object.assign(this, { into, kinds, share, say, scale, nothing, at: null, columns: [] });
    this.plot = element("div", "plot");
    this.axis = element("p", "axis");
    this.axis.setAttribute("aria-hidden", "true");
    this.words = element("p", "quiet");
    this.words.setAttribute("role", "status");
    this.svg = shape("svg", { preserveAspectRatio: "none", role: "img", tabindex: 0 });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    into.replaceChildren(this.plot, this.axis, this.words);
  }

  /** The most recent column with anything in it is what is said when nothing is pointed at. */
  draw(columns, label) {
    this.columns = columns;
    const sum = (column) => column.values.reduce((all, value) => all + value, 0);
    if (!columns.some((column) => sum(column) > 0)) {
      this.plot.replaceChildren(element("p", "nothing", this.nothing));
      this.axis.replaceChildren();
      this.words.replaceChildren();
      return;
    }
    // At least five minutes wide, so that the first minute does not look like an hour.
    this.span = Math.max(300, ...columns.map((column) => column.ago + column.span));
    const rate = (column) => (column.span > 0 ? 1 / column.span : 0);
    this.top = this.share ? 1 : Math.max(...columns.map((column) => sum(column) * (column.span >= 2 ? rate(column) : 0)), 1);
    this.svg.setAttribute("viewBox", `0 0 ${this.span} 100`);
    this.svg.setAttribute("aria-label", label);
    const areas = this.kinds.map(([kind]) => shape("path", { class: kind, d: "" }));
    const paths = this.kinds.map(() => "");
    for (const column of columns) {
      const all = sum(column);
      const scale = this.share ? (all > 0 ? 1 / all : 0) : rate(column) / this.top;
      const left = this.span - column.ago - column.span;
      let y = 100;
      column.values.forEach((value, index) => {
        const height = Math.min(100, 100 * value * scale);
        if (height > 0) paths[index] += `M${left} ${y}h${column.span}v${-height}h${-column.span}z`;
        y -= height;
      });
    }
    areas.forEach((area, index) => area.setAttribute("d", paths[index]));
    const line = (y) => shape("line", { class: "grid", x1: 0, x2: this.span, y1: y, y2: y });
    this.cursor = shape("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
    this.svg.replaceChildren(line(0.5), line(50), line(99.5), ...areas, this.cursor);
    const scales = [["upper", 1], ["middle", 0.5]].map(([where, part]) => element("span", `scale ${where}`, this.scale(part * this.top)));
    if (!this.svg.isConnected) this.plot.replaceChildren(this.svg, ...scales);
    else this.plot.querySelectorAll(".scale").forEach((old, index) => old.replaceWith(scales[index]));
    const minutes = Math.round(this.span / 60);
    this.axis.replaceChildren(element("span", "", `${minutes} min ago`), element("span", "", "now"));
    this.move(this.at);
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.move(this.span - ((event.clientX - box.left) / box.width) * this.span);
  }

  key(event) {
    const step = { ArrowLeft: 10, ArrowRight: -10, Home: this.span, End: -this.span }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.move(Math.min(this.span, Math.max(0, (this.at ?? 0) + step)));
  }

  /** Says what was so many seconds ago. */
  move(ago) {
    this.at = ago;
    const column = ago === null ? null : this.columns.find((one) => ago >= one.ago && ago <= one.ago + one.span);
    if (this.cursor) {
      const x = this.span - (ago ?? 0);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
      this.cursor.setAttribute("visibility", ago === null ? "hidden" : "visible");
    }
    const text = column ? this.say(column) : ago === null ? "" : "nothing was asked then";
    if (this.words.textContent !== text) this.words.textContent = text;
  }
}
