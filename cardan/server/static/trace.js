// One request's trace: in words, as a drawing, and as a table.

import { el } from "./dom.js";
import { count, duration, plural, rate } from "./format.js";
import { Sparkline } from "./spark.js";
import { timeline } from "./timeline.js";

const MAX_TOKEN_ROWS = 40;

const LEGEND = [
  ["queue", "in the queue"],
  ["chunk", "prompt"],
  ["token", "a token"],
  ["preemption", "preempted"],
];

export class TraceView {
  constructor(element) {
    this.element = element;
    this.trace = null;
    this.isComplete = false;
    this.title = el("h3", { tabindex: "-1" });
    this.drawing = el("div");
    this.legend = el("ul", { class: "legend" });
    this.story = el("ul", { class: "story" });
    this.gaps = el("div", { class: "gaps" });
    this.rows = el("tbody");
    this.parts = [this.title, this.drawing, this.legend, this.story, this.gaps, this.table()];
    element.append(...this.parts);
    new ResizeObserver(() => this.draw()).observe(this.drawing);
  }

  show(trace) {
    this.trace = trace;
    this.isComplete = trace.state === "finished";
    this.element.hidden = false;
    this.element.replaceChildren(...this.parts);
    this.title.replaceChildren("Trace of ", el("code", {}, trace.id));
    this.legend.replaceChildren(...legend(trace));
    this.story.replaceChildren(...story(trace).map((text) => el("li", {}, text)));
    this.gaps.replaceChildren(...gaps(trace));
    this.rows.replaceChildren(...events(trace).map(eventRow));
    this.draw();
  }

  showError(text) {
    this.trace = null;
    this.element.hidden = false;
    this.element.replaceChildren(el("p", { class: "hint" }, `No trace: ${text}`));
  }

  focus() {
    this.title.focus({ preventScroll: true });
    this.element.scrollIntoView({ block: "nearest" });
  }

  /** Draw to the width that there is. */
  draw() {
    const width = this.drawing.clientWidth;
    if (this.trace !== null && width > 0) this.drawing.replaceChildren(timeline(this.trace, width));
  }

  table() {
    const head = ["Time", "What", "Tokens"].map((text, place) =>
      el("th", { scope: "col", class: place === 1 ? null : "number" }, text),
    );
    const table = el("table", { class: "events" }, el("thead", {}, el("tr", {}, ...head)), this.rows);
    return el("details", {}, el("summary", {}, "As a table"), table);
  }
}

function eventRow([at, what, tokens]) {
  return el(
    "tr",
    {},
    el("td", { class: "number" }, duration(at)),
    el("td", {}, what),
    el("td", { class: "number" }, tokens === null ? "" : count(tokens)),
  );
}

function legend(trace) {
  const shown = LEGEND.filter(([kind]) => kind !== "preemption" || trace.num_preemptions > 0);
  const items = shown.map(([kind, text]) => el("li", { class: kind }, text));
  const more = trace.samples.length - 8;
  if (more > 0) items.push(el("li", {}, `and ${plural(more, "sample")} more`));
  return items;
}

/** What happened, sentence by sentence. */
export function story(trace) {
  const lines = [];
  if (trace.queue_seconds === null) return [trace.samples[0].why];
  lines.push(`Waited ${duration(trace.queue_seconds)} in the queue.`);
  lines.push(promptLine(trace));
  const answer = answerLine(trace);
  if (answer !== null) lines.push(answer);
  if (trace.num_preemptions) {
    lines.push(`Preempted ${plural(trace.num_preemptions, "time")} to free cache blocks.`);
  }
  const ends = new Map();
  for (const sample of trace.samples) {
    ends.set(sample.why, [...(ends.get(sample.why) ?? []), sample.index]);
  }
  for (const [why, indexes] of ends) {
    lines.push(ends.size === 1 ? why : `Sample ${indexes.join(", ")}: ${why}`);
  }
  return lines;
}

function promptLine(trace) {
  const { chunks } = trace.samples[0];
  const cached = trace.num_cached_tokens;
  const found = cached ? `${count(cached)} of them from the cache` : "none of them in the cache";
  let text = `Prompt of ${plural(trace.num_prompt_tokens, "token")}, ${found}`;
  if (chunks.length && !trace.num_preemptions) {
    const computed = chunks.reduce((sum, chunk) => sum + chunk.num_tokens, 0);
    const seconds = chunks.at(-1).at - trace.queue_seconds;
    text += `; ${count(computed)} computed in ${plural(chunks.length, "step")}, ${duration(seconds)}`;
  }
  return `${text}.`;
}

function answerLine(trace) {
  const first = trace.first_token_seconds;
  if (first === null) return null;
  const last = Math.max(...trace.samples.map((sample) => sample.last_token_at ?? 0));
  const number = trace.num_output_tokens;
  let text = `${plural(number, "token")}`;
  if (trace.num_samples > 1) text += ` in ${trace.num_samples} samples`;
  text += `, the first after ${duration(first)}`;
  const later = number - trace.samples.filter((sample) => sample.num_tokens > 0).length;
  if (later > 0 && last > first) text += `, then ${rate(later / (last - first))} a second`;
  return `${text}.`;
}

/** Seconds a token, along the answer of the first sample. */
function gaps(trace) {
  const { token_times: times, token_stride: stride } = trace.samples[0];
  if (times.length < 3) return [];
  const values = times.slice(1).map((at, place) => (at - times[place]) / stride);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const chart = new Sparkline(["first"]);
  const label = `Time a token, from ${duration(least)} to ${duration(most)}`;
  chart.draw([values], { length: values.length, top: 1e-6, label });
  return [el("p", { class: "muted" }, `${label}, along the answer`), chart.element];
}

/** Everything in order of time: `[seconds, what, tokens]`. */
export function events(trace) {
  const rows = [[0, "arrived", trace.num_prompt_tokens]];
  if (trace.queue_seconds !== null) rows.push([trace.queue_seconds, "first step begins", null]);
  if (trace.num_cached_tokens) {
    rows.push([trace.queue_seconds, "prompt found in the cache", trace.num_cached_tokens]);
  }
  for (const sample of trace.samples) {
    const of = trace.num_samples > 1 ? ` (sample ${sample.index})` : "";
    for (const chunk of sample.chunks) rows.push([chunk.at, `computed${of}`, chunk.num_tokens]);
    for (const at of sample.preempted_at) rows.push([at, `preempted${of}`, null]);
    rows.push(...tokenRows(sample, of));
  }
  rows.sort((a, b) => a[0] - b[0]);
  if (trace.state === "finished") {
    rows.push([trace.seconds, `ended: ${trace.finish_reason}`, trace.num_output_tokens]);
  }
  return rows;
}

/** Tokens one by one while they are few, else in groups. */
function tokenRows(sample, of) {
  const { token_times: times, token_stride: stride } = sample;
  const group = Math.max(1, Math.ceil(times.length / MAX_TOKEN_ROWS));
  const rows = [];
  for (let place = 0; place < times.length; place += group) {
    const last = Math.min(place + group, times.length);
    const number = Math.min(last * stride, sample.num_tokens) - place * stride;
    if (number > 0) rows.push([times[last - 1], `generated${of}`, number]);
  }
  return rows;
}
