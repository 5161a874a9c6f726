// Charts of the last minutes: lines with axes, and the value under the pointer.

import { element, replaceIfNew } from "./dom.js";
import { NONE, seconds } from "./figures.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 100;

/** The next number of 1, 2, 5, 10, 20, ... that is not below `value`. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const digit = [1, 2, 5, 10].find((d) => d * power >= value * (1 - 1e-9));
  return digit * power;
}

/** How long ago, as an axis says it. */
function ago(length) {
  return length >= 90 ? `${Math.round(length / 60)} min ago` : `${Math.round(length)} s ago`;
}

/**
 * One chart. title, help: what it shows. second: name of the dashed line, if there is one.
 * `draw` takes points {age_s, value, other}, the newest last; a null value leaves a gap.
 */
export class Chart {
  #points = [];
  #show = String;
  #length = 1;
  #most = 1;

  constructor({ title, help, second }) {
    this.title = title;
    this.now = element("span", {});
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", "chart");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    for (const name of ["second", "first"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      this.svg.append(path);
    }
    this.top = element("span", { class: "top", "aria-hidden": "true" });
    this.left = element("span", {});
    this.mark = element("i", { class: "mark", hidden: "" });
    this.tip = element("output", { class: "tip", hidden: "" });
    this.plot = element(
      "div",
      { class: "plot" },
      this.svg,
      this.top,
      element("span", { class: "bottom", "aria-hidden": "true" }, "0"),
      this.mark,
      this.tip,
    );
    const axis = element("p", { class: "axis", "aria-hidden": "true" }, this.left, element("span", {}, "now"));
    this.figure = element(
      "figure",
      {},
      element("figcaption", {}, title, this.now),
      this.plot,
      axis,
      element("p", { class: "note" }, help),
    );
    if (second) {
      this.figure.append(element("p", { class: "note" }, element("i", { class: "dash" }), ` ${second}`));
    }
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#leave());
  }

  /** points: see the class. length: seconds the axis covers. show: a value as text. */
  draw(points, length, show) {
    this.#points = points;
    this.#show = show;
    this.#length = length;
    const values = points.map((p) => p.value).filter((v) => v !== null);
    const others = points.map((p) => p.other ?? null).filter((v) => v !== null);
    this.#most = ceiling(Math.max(0, ...values, ...others));
    const now = values.length ? show(values.at(-1)) : NONE;
    replaceIfNew(this.now, now, () => [now]);
    this.top.textContent = show(this.#most);
    this.left.textContent = ago(length);
    this.svg.setAttribute("aria-label", `${this.title}: now ${now}`);
    this.svg.querySelector(".first").setAttribute("d", this.#line((p) => p.value));
    this.svg.querySelector(".second").setAttribute("d", this.#line((p) => p.other ?? null));
  }

  #x(point) {
    return WIDTH * (1 - Math.min(1, point.age_s / this.#length));
  }

  #line(of) {
    let path = "";
    let pen = false;
    for (const point of this.#points) {
      const value = of(point);
      if (value === null) {
        pen = false;
        continue;
      }
      const y = HEIGHT - 2 - ((HEIGHT - 6) * value) / this.#most;
      const at = `${this.#x(point).toFixed(1)} ${y.toFixed(1)}`;
      path += pen ? `L${at}` : `M${at}l0.6 0`;
      pen = true;
    }
    return path;
  }

  #point(event) {
    const box = this.plot.getBoundingClientRect();
    const age = (1 - (event.clientX - box.left) / box.width) * this.#length;
    const away = (point) => Math.abs(point.age_s - age);
    const [nearest] = this.#points.filter((p) => p.value !== null).sort((a, b) => away(a) - away(b));
    if (!nearest) {
      this.#leave();
      return;
    }
    const share = this.#x(nearest) / WIDTH;
    this.mark.hidden = false;
    this.mark.style.left = `${share * 100}%`;
    const when = nearest.age_s < 3 ? "now" : `${seconds(nearest.age_s)} ago`;
    this.tip.textContent = `${this.#show(nearest.value)}, ${when}`;
    this.tip.hidden = false;
    this.tip.classList.toggle("to-left", share > 0.5);
    this.tip.style.left = `${share * 100}%`;
  }

  #leave() {
    this.mark.hidden = true;
    this.tip.hidden = true;
  }
}
