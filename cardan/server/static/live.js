// The live view: numbers of the engine, and how they went during the last minute.

import { keySettled, request } from "./api.js";
import { byId, el } from "./dom.js";
import { bytes, count, duration, percent, rate } from "./format.js";
import { Sparkline } from "./spark.js";
import { readEvents } from "./sse.js";

const LENGTH = 120; // samples, two a second
const RETRY_MS = [500, 1000, 2000, 5000];

/** Samples from the server while the page is seen; connects again when the stream breaks. */
export class LiveFeed {
  /** `on` has `info(info)`, `sample(sample)` and `lost()`. */
  constructor(on) {
    this.on = on;
    this.connection = null;
    this.numFailures = 0;
    document.addEventListener("visibilitychange", () => {
      // A browser has few connections for one server, and many tabs.
      if (document.hidden) this.connection?.abort();
      else this.run();
    });
  }

  async run() {
    if (this.connection !== null || document.hidden) return;
    this.connection = new AbortController();
    while (!document.hidden) {
      await keySettled();
      try {
        await this.read(this.connection.signal);
      } catch (error) {
        if (error.name === "AbortError") break;
      }
      this.on.lost();
      const pause = RETRY_MS[Math.min(this.numFailures, RETRY_MS.length - 1)];
      this.numFailures += 1;
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
    this.connection = null;
    if (!document.hidden) this.run(); // seen again meanwhile
  }

  async read(signal) {
    const response = await request("cardan/live", { signal });
    for await (const { event, data } of readEvents(response)) {
      this.numFailures = 0;
      if (event === "info") this.on.info(JSON.parse(data));
      else if (event === "sample") this.on.sample(JSON.parse(data));
    }
  }
}

const CARDS = [
  {
    title: "Requests",
    series: ["num_running", "num_waiting"],
    names: ["running", "waiting"],
    top: 1,
    format: count,
    note: (sample, info) => `of ${count(info.max_num_seqs)} at a time`,
  },
  {
    title: "KV cache",
    series: ["kv_usage"],
    names: ["in use"],
    top: 0.05,
    format: percent,
    note: (sample) =>
      sample.prefix_hit_rate === null
        ? "no prompt yet"
        : `${percent(sample.prefix_hit_rate)} prefix hits`,
  },
  {
    title: "Tokens a second",
    series: ["output_tokens_per_second", "prompt_tokens_per_second"],
    names: ["out", "in"],
    top: 1,
    format: rate,
    isApart: true,
    note: () => "each on its own scale",
  },
  {
    title: "Steps a second",
    series: ["steps_per_second"],
    names: [""],
    top: 1,
    format: rate,
    note: (sample) => `${rate(sample.tokens_per_step)} tokens in each`,
  },
];

export class LiveView {
  constructor() {
    this.info = null;
    this.samples = [];
    this.cards = CARDS.map((card) => new Card(card));
    byId("cards").append(...this.cards.map((card) => card.element));
  }

  showInfo(info) {
    this.info = info;
    const facts = [
      ["Model", info.models.join(", ")],
      ["Architecture", info.architecture],
      ["Platform", `${info.platform}, ${info.device}`],
      ["Numbers", info.dtype],
      ["Weights", bytes(info.weight_bytes)],
      ["KV cache", `${bytes(info.kv_cache_bytes)}, ${count(info.num_blocks)} blocks of ${info.block_size} tokens`],
      ["Context", `${count(info.max_model_len)} tokens`],
      ["Batch", `${count(info.max_num_seqs)} requests, ${count(info.max_num_batched_tokens)} tokens`],
      ["Started in", duration(info.startup_seconds.total ?? 0)],
      ["Version", info.version],
      ...info.warnings.map((text) => ["Warning", text]),
    ];
    byId("facts").replaceChildren(
      ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    );
  }

  show(sample) {
    this.samples.push(sample);
    if (this.samples.length > LENGTH) this.samples.shift();
    for (const card of this.cards) card.show(this.samples, this.info);
  }
}

class Card {
  constructor(card) {
    this.card = card;
    const classes = ["first", "second"].slice(0, card.series.length);
    this.chart = new Sparkline(classes);
    this.values = classes.map((name) => el("strong", { class: name }, "–"));
    const numbers = this.values.map((value, place) =>
      el("span", {}, value, ` ${card.names[place]}`),
    );
    this.note = el("p", { class: "muted" });
    this.element = el(
      "div",
      { class: "card", "data-card": card.series[0] },
      el("h3", {}, card.title),
      el("p", { class: "numbers" }, ...numbers),
      this.chart.element,
      this.note,
    );
  }

  show(samples, info) {
    const { card } = this;
    const newest = samples.at(-1);
    card.series.forEach((name, place) => {
      this.values[place].textContent = card.format(newest[name]);
    });
    this.note.textContent = card.note(newest, info);
    const series = card.series.map((name) => samples.map((sample) => sample[name]));
    const most = card.format(Math.max(...series[0]));
    const label = `${card.title}, ${card.names[0]}: at most ${most} in the last minute`;
    const { top, isApart } = card;
    this.chart.draw(series, { length: LENGTH, top, label, isApart });
  }
}
