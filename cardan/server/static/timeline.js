// A request's life as a drawing: one lane for each sample, time to the right.

import { svg } from "./dom.js";
import { duration } from "./format.js";

const LANE = 30;
const AXIS = 20;
const MAX_LANES = 8;
const EDGE = 8; // room for half a label at both ends

/** The drawing, `width` pixels wide. */
export function timeline(trace, width) {
  const lanes = trace.samples.slice(0, MAX_LANES);
  const height = lanes.length * LANE + AXIS;
  const inner = Math.max(1, width - 2 * EDGE);
  const scale = (seconds) => EDGE + (seconds / Math.max(trace.seconds, 1e-6)) * inner;
  return svg(
    "svg",
    {
      class: "timeline",
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": `Timeline of ${duration(trace.seconds)}; the table below says the same`,
    },
    ...lanes.flatMap((sample, place) => lane(trace, sample, place * LANE, scale)),
    ...axis(trace.seconds, lanes.length * LANE, scale, width),
  );
}

function lane(trace, sample, top, scale) {
  const marks = [];
  const span = (kind, from, to, title) => {
    const x = scale(from);
    const box = { class: kind, x, y: top + 5, width: Math.max(1.5, scale(to) - x), height: LANE - 8 };
    marks.push(svg("rect", box, svg("title", {}, title)));
  };
  let from = begin(trace, sample);
  span("queue", 0, from, `queue: ${duration(from)}`);
  const preempted = [...sample.preempted_at];
  for (const chunk of sample.chunks) {
    while (preempted.length && preempted[0] < chunk.at) {
      from = preempted.shift();
      span("queue again", from, chunk.at, `preempted at ${duration(from)}`);
      from = chunk.at;
    }
    span("chunk", Math.min(from, chunk.at), chunk.at, `prompt: ${chunk.num_tokens} tokens`);
    from = chunk.at;
  }
  for (const at of preempted) span("queue again", at, trace.seconds, `preempted at ${duration(at)}`);
  marks.push(ticks(sample.token_times, top, scale));
  for (const at of sample.preempted_at) marks.push(flag(scale(at), top));
  if (trace.state === "finished") {
    const x = scale(trace.seconds);
    const end = { class: `end ${trace.finish_reason}`, x1: x, x2: x, y1: top + 2, y2: top + LANE };
    marks.push(svg("line", end, svg("title", {}, sample.why)));
  }
  return marks;
}

/** When a sample's first step began: the later ones wait until the first has the prompt. */
function begin(trace, sample) {
  const queued = trace.queue_seconds ?? trace.seconds;
  if (sample.index === 0) return queued;
  const own = sample.chunks[0]?.at ?? trace.seconds;
  return Math.max(queued, ...trace.samples[0].chunks.map(({ at }) => at).filter((at) => at < own));
}

/** One line a token; those that would fall on the same half pixel are one. */
function ticks(times, top, scale) {
  const places = new Set(times.map((at) => Math.round(scale(at) * 2) / 2));
  const path = [...places].map((x) => `M${x} ${top + 8}v${LANE - 14}`).join("");
  return svg("path", { class: "token", d: path });
}

function flag(x, top) {
  const path = `M${x - 4} ${top}h8l-4 6z`;
  return svg("path", { class: "preemption", d: path }, svg("title", {}, "preempted"));
}

function axis(seconds, top, scale, width) {
  const step = niceStep(seconds, Math.max(2, Math.floor(width / 110)));
  const marks = [];
  for (let at = 0; at <= seconds * 1.0001; at += step) {
    const x = scale(at);
    marks.push(svg("line", { class: "grid", x1: x, x2: x, y1: 2, y2: top + 4 }));
    const anchor = at === 0 ? "start" : x > width - 30 ? "end" : "middle";
    const start = at === 0 ? 0 : x > width - 30 ? width : x;
    const text = { class: "label", x: start, y: top + 16, "text-anchor": anchor };
    marks.push(svg("text", text, at === 0 ? "0" : short(at, step)));
  }
  return marks;
}

/** 1, 2 or 5 times a power of ten, so that about `count` steps fit. */
function niceStep(seconds, count) {
  const rough = Math.max(seconds, 1e-6) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((base) => base * power).find((step) => step >= rough);
}

function short(seconds, step) {
  if (step < 0.1) return `${+(seconds * 1000).toFixed(2)} ms`;
  return `${+seconds.toFixed(1)} s`;
}
