// OpenAI's client for Node: completions, chat, streams, tools, a zod schema, errors, leaving early.

import OpenAI, { BadRequestError, NotFoundError } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import assert from "node:assert/strict";

const model = process.env.MODEL;
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const says = [{ role: "user", content: "Say hello." }];
let failures = 0;

async function check(name, body) {
  try {
    await body();
    console.log(`ok      node ${name}`);
  } catch (error) {
    failures += 1;
    console.log(`FAILED  node ${name}: ${error.stack}`);
  }
}

await check("models", async () => {
  const ids = [];
  for await (const one of client.models.list()) ids.push(one.id);
  assert(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).object, "model");
});

await check("completion with logprobs, n and usage", async () => {
  const answer = await client.completions.create({
    model, prompt: "The capital of France is", max_tokens: 5, temperature: 0, n: 2, best_of: 2, logprobs: 2,
  });
  assert.equal(answer.choices.length, 2);
  assert.equal(answer.choices[0].text, answer.choices[1].text);
  assert.equal(answer.choices[0].logprobs.tokens.join(""), answer.choices[0].text);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

await check("completion stream equals the whole answer", async () => {
  const asked = { model, prompt: "One, two,", max_tokens: 12, temperature: 0 };
  const whole = (await client.completions.create(asked)).choices[0].text;
  let text = "", usage;
  const options = { ...asked, stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.completions.create(options)) {
    text += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole);
  assert(usage.completion_tokens <= 12);
});

await check("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages: says, max_completion_tokens: 8 });
  assert.equal(answer.choices[0].message.role, "assistant");
  assert(["stop", "length"].includes(answer.choices[0].finish_reason));
});

await check("chat stream helper", async () => {
  const deltas = [];
  const stream = client.chat.completions
    .stream({ model, messages: says, max_completion_tokens: 8, seed: 1, stream_options: { include_usage: true } })
    .on("content", (delta) => deltas.push(delta));
  const message = await stream.finalMessage();
  assert.equal(deltas.join(""), message.content);
  assert((await stream.totalUsage()).completion_tokens <= 8);
});

await check("chat tools, required", async () => {
  const parameters = {
    type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false,
  };
  const tool = { type: "function", function: { name: "weather", strict: true, parameters } };
  const asked = { model, messages: says, tools: [tool], tool_choice: "required", max_completion_tokens: 60 };
  const { finish_reason, message } = (await client.chat.completions.create({ ...asked, temperature: 0 })).choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.tool_calls[0].function.name, "weather");
  assert(["Rome", "Oslo"].includes(JSON.parse(message.tool_calls[0].function.arguments).city));
  const streamed = await client.chat.completions.stream({ ...asked, temperature: 0 }).finalMessage();
  assert.equal(streamed.tool_calls[0].function.arguments, message.tool_calls[0].function.arguments);
});

await check("three turns with a tool, its own messages sent back", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const messages = [{ role: "user", content: "What is the weather in Rome?" }];
  const asked = { model, tools, temperature: 0, max_completion_tokens: 40 };
  const first = await client.chat.completions.create({ ...asked, messages, tool_choice: "required" });
  const [call] = first.choices[0].message.tool_calls;
  messages.push(first.choices[0].message, { role: "tool", tool_call_id: call.id, content: "It rains." });
  const second = await client.chat.completions.create({ ...asked, messages });
  messages.push(second.choices[0].message, { role: "user", content: "Thank you." });
  assert((await client.chat.completions.create({ ...asked, messages })).choices.length);
});

await check("responses, two turns and a stream", async () => {
  const first = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 8 });
  assert(first.output_text.length);
  const input = [{ role: "user", content: "Say hello." }, ...first.output, { role: "user", content: "Again." }];
  const kinds = [];
  const stream = await client.responses.create({ model, input, max_output_tokens: 8, stream: true });
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
});

const City = z.object({ size: z.enum(["small", "large"]), coast: z.boolean() });

await check("chat parse with zod, its own message sent back", async () => {
  const asked = { model, response_format: zodResponseFormat(City, "city"), max_completion_tokens: 60, temperature: 0 };
  const { message } = (await client.chat.completions.parse({ ...asked, messages: says })).choices[0];
  assert(["small", "large"].includes(message.parsed.size));
  const again = await client.chat.completions.parse({ ...asked, messages: [...says, message, ...says] });
  assert(["small", "large"].includes(again.choices[0].message.parsed.size));
});

await check("responses stream helper with zod, its own items sent back", async () => {
  const asked = { model, text: { format: zodTextFormat(City, "city") }, max_output_tokens: 60, temperature: 0 };
  const first = await client.responses.stream({ ...asked, input: says }).finalResponse();
  assert(["small", "large"].includes(first.output_parsed.size));
  const again = await client.responses.parse({ ...asked, input: [...says, ...first.output, ...says] });
  assert(["small", "large"].includes(again.output_parsed.size));
});

await check("errors have their classes", async () => {
  await assert.rejects(client.completions.create({ model: "nobody", prompt: "x" }), NotFoundError);
  await assert.rejects(client.completions.create({ model, prompt: "x", max_tokens: -1 }), (error) => {
    assert(error instanceof BadRequestError);
    assert.equal(error.param, "max_tokens");
    return true;
  });
});

await check("a stream that is left", async () => {
  const stream = await client.completions.create({
    model, prompt: "One, two,", max_tokens: 200, stream: true, ignore_eos: true,
  });
  for await (const chunk of stream) {
    assert(chunk.choices);
    break; // the client closes the connection
  }
});

process.exitCode = failures ? 1 : 0;
