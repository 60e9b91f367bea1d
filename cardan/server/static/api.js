// Requests to this server, with the key that the user gave. Addresses are relative to the page, so
// that it works under any prefix.

import { byId, tabStorage } from "./dom.js";

const KEY = "cardan-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response that is a success; a refused key is asked for again. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = tabStorage.get(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (response.ok) return response;
  // A late answer to an older key says nothing about the one that was given since.
  if (response.status === 401 && key === tabStorage.get(KEY)) {
    askForKey("The server did not take that key.");
  }
  throw new ApiError(response.status, await messageOf(response));
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** Resolves once there is a key, at once when the server needs none. */
export async function ready() {
  const needed = document.documentElement.dataset.needsKey === "yes";
  if (needed && tabStorage.get(KEY) === null) await askForKey();
}

let asking = null;

/** Open the dialog; resolves when the user has given a key. */
export function askForKey(text) {
  if (asking !== null) return asking;
  const dialog = byId("key-dialog");
  if (text) byId("key-text").textContent = text;
  dialog.showModal();
  const cancel = (event) => event.preventDefault(); // nothing works without a key
  dialog.addEventListener("cancel", cancel);
  asking = new Promise((resolve) => {
    byId("key-form").addEventListener(
      "submit",
      () => {
        tabStorage.set(KEY, byId("key").value.trim());
        byId("key").value = "";
        dialog.removeEventListener("cancel", cancel);
        asking = null;
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}

/** Resolves when no key is being asked for. */
export const keySettled = () => asking ?? Promise.resolve();
