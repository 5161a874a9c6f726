// Two turns of the Vercel AI SDK by /v1/responses, its default, and what it sends.
//   npm install ai@6.0.326 @ai-sdk/openai@3 zod@4.6.7 && node vercel_ai.mjs URL/v1 MODEL > vercel_ai.json
// tests/conformance/test_vercel_ai.py sends it again, without the SDK.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
let turns = [];

/** The ids that the SDK may send back. */
function idsOf(answer) {
  const last = answer.split("\n").filter((line) => line.startsWith("data: {")).at(-1);
  const told = JSON.parse(last ? last.slice(6) : answer);
  return (told.response ?? told).output.flatMap((item) => [item.id, item.call_id].filter(Boolean));
}

const model = createOpenAI({
  baseURL,
  apiKey: "none",
  fetch: async (url, init) => {
    const answer = await fetch(url, init);
    const text = await answer.clone().text();
    if (!answer.ok) throw new Error(text);
    turns.push({ sent: JSON.parse(init.body), ids: idsOf(text) });
    return answer;
  },
})(name);
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ city, degrees: 21 }),
  }),
};
const asked = { model, tools, stopWhen: stepCountIs(3), prompt: "How warm is Rome?" };

const CONVERSATIONS = {
  "a call and its result": async () => (await generateText(asked)).text,
  "a call and its result, streamed": async () => await streamText(asked).text,
  "two turns": async () => {
    const messages = [{ role: "user", content: "Hello." }];
    const first = await generateText({ model, messages });
    messages.push(...first.response.messages, { role: "user", content: "And again?" });
    return (await generateText({ model, messages })).text;
  },
  "two turns, streamed": async () => {
    const messages = [{ role: "user", content: "Hello." }];
    const first = streamText({ model, messages });
    await first.text;
    messages.push(...(await first.response).messages, { role: "user", content: "And again?" });
    return await streamText({ model, messages }).text;
  },
  "two turns, nothing kept": async () => {
    const providerOptions = { openai: { store: false } };
    const messages = [{ role: "user", content: "Hello." }];
    const first = await generateText({ model, messages, providerOptions });
    messages.push(...first.response.messages, { role: "user", content: "And again?" });
    return (await generateText({ model, messages, providerOptions })).text;
  },
  "an object": async () => {
    const output = Output.object({ schema: z.object({ city: z.string() }) });
    return JSON.stringify((await generateText({ model, prompt: "A city.", output })).output);
  },
};

const told = [];
for (const [title, talk] of Object.entries(CONVERSATIONS)) {
  turns = [];
  const text = await talk();
  told.push(JSON.stringify({ title, text, turns }));
}
process.stdout.write(`[\n${told.join(",\n")}\n]\n`);
