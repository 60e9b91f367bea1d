// Sampling settings of the chat. An empty field leaves the choice to the model's authors.

import { byId, tabStorage } from "./dom.js";

const KEY = "cardan-settings";
const NUMBERS = ["temperature", "top_p", "max_tokens"];

export class Settings {
  constructor() {
    this.form = byId("settings");
    const button = byId("show-settings");
    button.addEventListener("click", () => {
      this.form.hidden = !this.form.hidden;
      button.setAttribute("aria-expanded", String(!this.form.hidden));
      if (!this.form.hidden) this.form.elements.temperature.focus();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("change", () => this.save());
    this.restore();
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** Fields of the request; null, and the wrong field has the focus, when one is out of range. */
  read() {
    if (!this.form.checkValidity()) {
      if (this.form.hidden) byId("show-settings").click();
      this.form.reportValidity();
      return null;
    }
    const fields = {};
    for (const name of NUMBERS) {
      const value = this.form.elements[name].value;
      if (value !== "") fields[name] = Number(value);
    }
    return fields;
  }

  /** Name the model's own values where nothing was chosen. */
  showDefaults(defaults) {
    for (const name of NUMBERS) {
      if (defaults[name] !== undefined) {
        this.form.elements[name].placeholder = `model's own: ${defaults[name]}`;
      }
    }
  }

  save() {
    tabStorage.set(KEY, JSON.stringify(Object.fromEntries(new FormData(this.form))));
  }

  restore() {
    const saved = tabStorage.get(KEY);
    if (saved === null) return;
    for (const [name, value] of Object.entries(JSON.parse(saved))) {
      if (this.form.elements[name]) this.form.elements[name].value = value;
    }
  }
}
