// Puts the page together.

import { ready } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { LiveFeed, LiveView } from "./live.js";
import { Requests } from "./requests.js";
import { Settings } from "./settings.js";

const STATES = {
  starting: "The engine is starting",
  unhealthy: "A plugin says that the engine is unwell",
  stuck: "The engine makes no progress",
  dead: "The engine is dead, requests are refused",
  draining: "The server is shutting down and takes no new requests",
};

const settings = new Settings();
const live = new LiveView();
const requests = new Requests();
new Chat(settings, (id) => {
  showView("requests");
  requests.select(id);
});

function showView(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("[data-shows]")) {
    if (button.dataset.shows === name) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
}

for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => showView(button.dataset.shows));
}

function showState(state, text) {
  const pill = byId("state");
  const banner = byId("banner");
  if (pill.dataset.state !== state) {
    pill.dataset.state = state;
    pill.textContent = state;
  }
  // Changed only when it says something new: it is read out each time.
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = text === "";
}

function showSample(sample) {
  const reason = sample.reason ? `: ${sample.reason}` : "";
  showState(sample.state, sample.state === "ready" ? "" : `${STATES[sample.state]}${reason}.`);
  live.show(sample);
  requests.follow(sample);
}

function showInfo(info) {
  const [model] = info.models;
  document.title = `${model} – cardan`;
  byId("engine").textContent = `${model} · ${info.device} · ${info.dtype}`;
  live.showInfo(info);
  settings.showDefaults(info.sampling_defaults);
}

const feed = new LiveFeed({
  info: showInfo,
  sample: showSample,
  lost: () => showState("lost", "No connection to the server. Trying again."),
});

await ready();
feed.run();
if (matchMedia("(hover: hover)").matches) byId("message").focus();
