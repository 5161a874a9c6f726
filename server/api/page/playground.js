// The playground: streams an answer, with drafts and without them side by side if asked.

import { Answer } from "./answer.js";
import { access, call } from "./access.js";
import { byId, element } from "./dom.js";
import { EventReader, seconds } from "./figures.js";
import { asCurl, asPython, orderOf } from "./order.js";

const EXAMPLES = {
  completion: `Turn each line into JSON.

Line: Ada Lovelace was born in London in 1815.
JSON: {"name": "Ada Lovelace", "place": "London", "year": 1815}
Line: Alan Turing was born in Maida Vale in 1912.
JSON: {"name": "Alan Turing", "place": "Maida Vale", "year": 1912}
Line: Grace Hopper was born in New York City in 1906.
JSON:`,
  chat: "What is the capital of Japan?",
};

const run = byId("run");
const compare = byId("compare");
const status = byId("play-state");
const answer = byId("answer");
const plain = byId("answer-plain");
const turns = []; // of the chat so far: {role, content}
let controller = null;

function say(text, bad = false) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

async function offerModels() {
  try {
    const response = await call("v1/models");
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const { data } = await response.json();
    byId("model").replaceChildren(
      ...data.map((model) => element("option", { value: model.id }, model.id)),
    );
  } catch (error) {
    say(`The models cannot be listed: ${error.message}`, true);
  }
}

/** What the form asks for, as orderOf has it. Throws for a schema that is no JSON. */
function order() {
  return orderOf({
    kind: byId("kind").value,
    model: byId("model").value,
    prompt: byId("prompt").value,
    turns,
    schema: byId("schema").value,
    maxTokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    drafting: byId("drafting").value,
  });
}

/** Streams one answer into `arrived`; throws what goes wrong, an abort too. */
async function stream({ path, body }, arrived) {
  const response = await call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      include_speculation: true,
      include_token_sources: true,
      include_rejected_drafts: true,
    }),
    signal: controller.signal,
  });
  if (!response.ok) {
    const problem = await response.json().catch(() => null);
    throw new Error(problem?.error?.message ?? `The server answered ${response.status}.`);
  }
  const reader = new EventReader();
  const decoder = new TextDecoder();
  for await (const bytes of chunksOf(response.body)) {
    for (const data of reader.push(decoder.decode(bytes, { stream: true }))) {
      if (data !== "[DONE]") arrived.take(JSON.parse(data));
    }
  }
}

async function* chunksOf(body) {
  const reader = body.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

const withoutDrafts = ({ path, body }) => ({
  path,
  body: { ...body, speculation: { drafter: "off" } },
});

/** How the two answers compare, in a sentence. */
function verdict(drafted, undrafted) {
  const same = drafted.text === undrafted.text;
  const text = same ? "The same text" : "Not the same text (set temperature to 0, or give a seed)";
  if (drafted.gap === null || undrafted.gap === null) return `${text}.`;
  const times = (undrafted.gap / drafted.gap).toFixed(1);
  return (
    `${text}, ${times} times as fast with drafts: ${seconds(drafted.gap)} per token ` +
    `instead of ${seconds(undrafted.gap)}.`
  );
}

/** Runs the form's request; both: without drafts, too, after it, and before both to its first
 * token, so that neither has to read the prompt for the other. */
async function answerForm(both) {
  controller = new AbortController();
  run.textContent = "Stop";
  compare.disabled = true;
  byId("answers").classList.toggle("both", both);
  byId("plain-box").hidden = !both;
  byId("drafted-title").hidden = !both;
  say("Running");
  const drafted = new Answer(answer, byId("legend"), byId("steps"));
  const undrafted = both ? new Answer(plain, null, null) : null;
  let stopped = false;
  let asked = null;
  try {
    asked = order();
    if (both) {
      const first = withoutDrafts(asked);
      await stream({ ...first, body: { ...first.body, max_tokens: 1 } }, { take: () => {} });
      drafted.began = performance.now();
    }
    await stream(asked, drafted);
    if (undrafted !== null) {
      say("Running without drafts");
      undrafted.began = performance.now();
      await stream(withoutDrafts(asked), undrafted);
    }
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) {
      say(error.message, true);
      return;
    }
  } finally {
    controller = null;
    run.textContent = "Run";
    compare.disabled = false;
  }
  const summary = drafted.summary(stopped);
  say(undrafted === null || stopped ? summary : `${verdict(drafted, undrafted)} ${summary}`);
  drafted.explain();
  if (asked.body.messages && !stopped) {
    turns.push(asked.body.messages.at(-1), { role: "assistant", content: drafted.text });
    showTurns();
    byId("prompt").select(); // the next message takes its place
  }
}

function showTurns() {
  byId("turns-box").hidden = !turns.length;
  byId("turns").replaceChildren(
    ...turns.map(({ role, content }) => element("li", {}, `${role}: ${content}`)),
  );
}

function endChat() {
  turns.length = 0;
  showTurns();
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`Copied as ${what}.`);
  } catch {
    // Without a secure origin there is no clipboard: show it, to be copied by hand.
    answer.replaceChildren(element("span", {}, text));
    say(`The browser gives no clipboard here; this is the request as ${what}.`);
  }
}

function copyAs(format, what) {
  try {
    const base = new URL("./", document.baseURI).href;
    copy(format(order(), base, access.needsKey), what);
  } catch (error) {
    say(error.message, true);
  }
}

byId("play").addEventListener("submit", (event) => {
  event.preventDefault();
  if (controller) controller.abort();
  else answerForm(false);
});
compare.addEventListener("click", () => {
  if (byId("play").reportValidity()) answerForm(true);
});
byId("copy-curl").addEventListener("click", () => copyAs(asCurl, "curl"));
byId("copy-python").addEventListener("click", () => copyAs(asPython, "Python"));
byId("end-chat").addEventListener("click", endChat);
byId("model").addEventListener("change", endChat);
byId("kind").addEventListener("change", (event) => {
  // The other kind's example, where nobody has typed anything.
  const prompt = byId("prompt");
  if (Object.values(EXAMPLES).includes(prompt.value)) prompt.value = EXAMPLES[event.target.value];
  endChat();
});
byId("try").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && controller) controller.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !controller) {
    event.preventDefault();
    byId("play").requestSubmit();
  }
});
byId("show-rejected").addEventListener("change", (event) => {
  byId("answers").classList.toggle("with-rejected", event.target.checked);
});
byId("answers").classList.add("with-rejected");
byId("prompt").value = EXAMPLES.completion;
offerModels();
