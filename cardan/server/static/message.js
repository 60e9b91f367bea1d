// One message of the conversation: text and code blocks, never markup.

import { el } from "./dom.js";

const FENCE = /^ {0,3}```/;

/** Text in parts: `{isCode, text}`. A fence that is not closed yet runs to the end. */
export function split(text) {
  const parts = [];
  let isCode = false;
  let lines = [];
  const flush = () => {
    const part = lines.join("\n").replace(/^\n+|\n+$/g, "");
    if (part.trim() !== "") parts.push({ isCode, text: part });
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (FENCE.test(line)) {
      flush();
      isCode = !isCode;
    } else {
      lines.push(line);
    }
  }
  flush();
  return parts;
}

/** The message's element and what changes it. */
export class Message {
  constructor(role, name) {
    this.role = role;
    this.text = "";
    this.body = el("div", { class: "body" });
    this.foot = el("p", { class: "foot" });
    this.element = el("article", { class: `message ${role}` }, el("h3", {}, name), this.body);
    this.parts = [];
  }

  /** Show `text`; while it grows, only its last part changes. */
  show(text) {
    this.text = text;
    const parts = split(text);
    parts.forEach((part, place) => {
      const shown = this.parts[place];
      if (shown?.isCode === part.isCode) {
        if (shown.text !== part.text) shown.node.textContent = part.text;
        shown.text = part.text;
        return;
      }
      const node = el(part.isCode ? "pre" : "p");
      if (part.isCode) node.tabIndex = 0; // it may have to be scrolled
      node.textContent = part.text;
      if (shown) shown.node.replaceWith(node);
      else this.body.append(node);
      this.parts[place] = { ...part, node };
    });
    for (const extra of this.parts.splice(parts.length)) extra.node.remove();
  }

  /** Replace the line below the text. */
  showFoot(...children) {
    this.foot.replaceChildren(...children);
    this.element.append(this.foot);
  }

  fail(text) {
    this.element.classList.add("failed");
    this.showFoot(text);
  }
}
