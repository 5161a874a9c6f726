// The API key. The browser has asked for it before it showed the page, and sends it with each call.
// Where it does not, the page asks, keeps the key for this tab only and sends it.

import { byId } from "./dom.js";

const STORE = "tailor-api-key";
const form = byId("key-form");
const waiting = [];

/** The server tells with its figures whether it has keys. */
export const access = { needsKey: false };

/** fetch with the key. On a 401 it asks for a key and tries again once there is one. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORE);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(STORE) === key) {
      sessionStorage.removeItem(STORE);
      await ask(key ? "That key is not valid." : "This server wants a key. It stays in this tab.");
    }
  }
}

function ask(note) {
  if (!waiting.length) byId("key-note").textContent = note; // the first to know says why
  byId("state").textContent = "Waiting for an API key";
  form.hidden = false;
  return new Promise((resolve) => waiting.push(resolve));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORE, byId("key").value.trim());
  byId("key").value = "";
  form.hidden = true;
  for (const resolve of waiting.splice(0)) resolve();
});
