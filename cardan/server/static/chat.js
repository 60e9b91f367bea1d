// The conversation, its composer, and the stream of the answer that is coming.

import { ApiError, request } from "./api.js";
import { byId, el } from "./dom.js";
import { duration, plural, rate } from "./format.js";
import { Message } from "./message.js";
import { readEvents } from "./sse.js";

export class Chat {
  /** `showTrace(id)` is called when the user asks for an answer's trace. */
  constructor(settings, showTrace) {
    this.settings = settings;
    this.showTrace = showTrace;
    this.history = [];
    this.running = null;
    this.log = byId("log");
    this.hint = this.log.firstElementChild;
    this.field = byId("message");
    this.listen();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.history = [];
    this.log.replaceChildren(this.hint);
    this.field.focus();
  }

  async send() {
    const text = this.field.value;
    if (text.trim() === "" || this.running) return;
    const fields = this.settings.read();
    if (fields === null) return;
    this.field.value = "";
    this.hint.remove();
    const question = new Message("user", "You");
    question.show(text);
    const answer = new Message("assistant", "Model");
    this.log.append(question.element, answer.element);
    this.log.scrollTop = this.log.scrollHeight;
    this.history.push({ role: "user", content: text });
    await this.answer(answer, fields, this.history);
  }

  /** Stream the answer to `history`, which it becomes a part of unless a new chat was begun. */
  async answer(message, fields, history) {
    this.running = new AbortController();
    this.showRunning(message, true);
    const stream = new AnswerStream(message, () => this.follow());
    try {
      const system = this.settings.system;
      const messages = system ? [{ role: "system", content: system }, ...history] : history;
      const body = { ...fields, messages, stream: true, stream_options: { include_usage: true } };
      await stream.run(body, this.running.signal);
    } catch (error) {
      stream.fail(error);
    }
    if (message.text !== "") history.push({ role: "assistant", content: message.text });
    else history.pop(); // a question without an answer can be asked again
    this.running = null;
    this.showRunning(message, false);
    if (!message.element.classList.contains("failed")) stream.showFoot(this.showTrace);
    this.follow();
  }

  showRunning(message, isRunning) {
    message.element.classList.toggle("growing", isRunning);
    // Read out once it is whole, not word by word.
    this.log.setAttribute("aria-busy", String(isRunning));
    const hadFocus = document.activeElement === byId("stop");
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    if (hadFocus) this.field.focus();
  }

  /** Keep the end in view for those who look at it. */
  follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 120) this.log.scrollTop = scrollHeight;
  }
}

/** One streamed answer on its way into a message. */
class AnswerStream {
  constructor(message, onChange) {
    this.message = message;
    this.onChange = onChange;
    this.text = "";
    this.id = null;
    this.usage = null;
    this.reason = null;
    this.firstAt = null;
    this.lastAt = null;
    this.isScheduled = false;
  }

  async run(body, signal) {
    const response = await request("v1/chat/completions", { body, signal });
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") break;
      this.take(JSON.parse(data));
    }
    this.show();
  }

  take(chunk) {
    if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
    this.id ??= chunk.id;
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    if (choice === undefined) return;
    this.reason = choice.finish_reason ?? this.reason;
    this.lastAt = performance.now();
    if (!choice.delta.content) return;
    this.firstAt ??= this.lastAt;
    this.text += choice.delta.content;
    this.showSoon();
  }

  /** At most once a frame, however fast the tokens come. */
  showSoon() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => this.show());
  }

  show() {
    this.isScheduled = false;
    this.message.show(this.text);
    this.onChange();
  }

  fail(error) {
    this.show();
    if (error.name === "AbortError") this.reason = "stopped";
    else if (error instanceof ApiError) this.message.fail(`Error: ${error.message}`);
    else this.message.fail("Error: the connection to the server was lost");
  }

  showFoot(showTrace) {
    const facts = [];
    if (this.usage) {
      const { completion_tokens: tokens, prompt_tokens_details: details } = this.usage;
      facts.push(plural(tokens, "token"));
      const seconds = (this.lastAt - this.firstAt) / 1000;
      if (tokens > 1 && seconds > 0) facts.push(`${rate((tokens - 1) / seconds)} a second`);
      if (seconds > 0) facts.push(duration(seconds));
      if (details?.cached_tokens) facts.push(`${details.cached_tokens} cached`);
    }
    if (this.reason === "length") facts.push("cut at the limit");
    if (this.reason === "stopped") facts.push("stopped");
    const button = el("button", { type: "button", class: "link" }, "Show trace");
    button.addEventListener("click", () => showTrace(this.id));
    const text = facts.length ? `${facts.join(" · ")} · ` : "";
    this.message.showFoot(text, this.id === null ? "" : button);
  }
}
