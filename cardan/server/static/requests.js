// The list of live and latest requests; selecting one shows its trace.

import { ApiError, request } from "./api.js";
import { byId, el } from "./dom.js";
import { count, duration } from "./format.js";
import { TraceView } from "./trace.js";

const REFRESH_MS = 1000;

export class Requests {
  constructor() {
    this.selected = null;
    this.rows = new Map();
    this.trace = new TraceView(byId("trace"));
    this.numEnded = -1;
    this.wasBusy = false;
    this.loadedAt = -Infinity;
    this.isLoading = false;
  }

  /** Load again when the sample says that there is something new. */
  async follow(sample) {
    const isBusy = sample.num_running + sample.num_waiting > 0;
    const isNew = isBusy || this.wasBusy || sample.num_ended !== this.numEnded;
    const isDue = performance.now() - this.loadedAt >= REFRESH_MS;
    if (!isNew || !isDue || this.isLoading) return;
    this.numEnded = sample.num_ended;
    this.wasBusy = isBusy;
    await this.load();
  }

  async load() {
    this.isLoading = true;
    try {
      this.show(await (await request("cardan/requests")).json());
      if (this.selected !== null && !this.trace.isComplete) await this.loadTrace();
    } catch {
      this.numEnded = -1; // the next sample tries again
    } finally {
      this.isLoading = false;
      this.loadedAt = performance.now();
    }
  }

  async select(id) {
    this.selected = id;
    this.trace.isComplete = false;
    this.mark();
    try {
      await this.loadTrace();
      this.trace.focus();
    } catch (error) {
      this.trace.showError(error instanceof ApiError ? error.message : "no connection");
    }
  }

  async loadTrace() {
    const id = this.selected;
    const response = await request(`cardan/requests/${encodeURIComponent(id)}`);
    const trace = await response.json();
    this.rows.get(id)?.show(trace); // newer than the list
    if (id === this.selected) this.trace.show(trace);
  }

  show(list) {
    const all = [...list.live.toReversed(), ...list.recent];
    byId("no-rows").hidden = all.length > 0;
    byId("count").textContent = all.length
      ? `${count(list.num_live)} live, ${count(list.recent.length)} ended`
      : "";
    const rows = new Map();
    for (const item of all) {
      const row = this.rows.get(item.id) ?? new Row(item.id, () => this.select(item.id));
      row.show(item);
      rows.set(item.id, row);
    }
    this.rows = rows;
    this.place([...rows.values()].map((row) => row.element));
    this.mark();
  }

  /** Put the rows in order, moving only those that are not: a moved row would lose its focus. */
  place(elements) {
    const body = byId("rows");
    const wanted = new Set(elements);
    for (const element of [...body.children]) if (!wanted.has(element)) element.remove();
    let next = body.firstElementChild;
    for (const element of elements) {
      if (element === next) next = next.nextElementSibling;
      else body.insertBefore(element, next);
    }
  }

  mark() {
    for (const [id, row] of this.rows) row.mark(id === this.selected);
  }
}

const ENDS = { stop: "stop", length: "limit", abort: "ended early", error: "error" };

class Row {
  constructor(id, onSelect) {
    const name = el("span", { class: "name" }, id.slice(0, -6));
    const tail = el("span", {}, id.slice(-6));
    this.button = el("button", { type: "button", class: "link id", title: id }, name, tail);
    this.button.addEventListener("click", onSelect);
    this.cells = Array.from({ length: 4 }, () => el("td", { class: "number" }));
    this.end = el("td");
    this.state = "live";
    this.element = el("tr", {}, el("td", {}, this.button), ...this.cells, this.end);
  }

  show(item) {
    const texts = [
      count(item.num_prompt_tokens),
      item.num_cached_tokens === null ? "" : count(item.num_cached_tokens),
      count(item.num_output_tokens),
      duration(item.seconds),
    ];
    this.cells.forEach((cell, place) => (cell.textContent = texts[place]));
    const isLive = item.state !== "finished";
    this.end.textContent = isLive ? item.state : ENDS[item.finish_reason];
    // Not all of it: whether the row is selected is not the item's to say.
    this.element.classList.remove(this.state);
    this.state = isLive ? "live" : item.finish_reason;
    this.element.classList.add(this.state);
  }

  mark(isSelected) {
    this.element.classList.toggle("selected", isSelected);
    if (isSelected) this.button.setAttribute("aria-current", "true");
    else this.button.removeAttribute("aria-current");
  }
}
