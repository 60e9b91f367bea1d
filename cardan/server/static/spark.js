// Small line charts.

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 40;

/** A chart of several series of numbers; the newest value is at the right. */
export class Sparkline {
  constructor(classes) {
    this.areas = [svg("path", { class: `area ${classes[0]}` })];
    this.lines = classes.map((name) => svg("path", { class: `line ${name}` }));
    this.element = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...this.areas,
      ...this.lines,
    );
  }

  /**
   * `length`: how many values fill the width. `top`: least value at the upper edge. The series
   * share a scale unless `isApart`.
   */
  draw(series, { length, top, label, isApart = false }) {
    const highest = (values) => values.reduce((most, value) => Math.max(most, value), top);
    const common = highest(series.flat());
    series.forEach((values, place) => {
      const most = isApart ? highest(values) : common;
      const points = values.map((value, index) => {
        const x = WIDTH - ((values.length - 1 - index) * WIDTH) / Math.max(1, length - 1);
        const y = HEIGHT - 1 - (value / most) * (HEIGHT - 3);
        return `${x.toFixed(1)} ${y.toFixed(1)}`;
      });
      const path = points.length ? `M${points.join("L")}` : "";
      this.lines[place].setAttribute("d", path);
      if (place === 0 && points.length) {
        const first = points[0].split(" ")[0];
        this.areas[0].setAttribute("d", `${path}L${WIDTH} ${HEIGHT}L${first} ${HEIGHT}Z`);
      }
    });
    this.element.setAttribute("aria-label", label);
  }
}
