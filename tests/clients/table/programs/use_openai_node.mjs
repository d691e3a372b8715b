// The openai package for Node: chat completions and responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, PERSON, WEATHER, fails, step } from "./steps.mjs";

const client = new OpenAI({ baseURL: OPENAI_URL, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const person = {
  type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false,
};
const user = (content) => ({ role: "user", content });

await step("quick start", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: [user(ASK_HELLO)] });
  assert.equal(answer.choices[0].message.content, HELLO);
  assert.equal((await client.responses.create({ model: MODEL, input: ASK_HELLO })).output_text, HELLO);
});

await step("streaming", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model: MODEL, messages: [user(ASK_HELLO)], stream: true }))
    text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, HELLO);
  text = "";
  for await (const event of client.responses.stream({ model: MODEL, input: ASK_HELLO }))
    if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, HELLO);
});

await step("tools", async () => {
  const weather = { type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: () => "18 degrees" } };
  const runner = client.chat.completions.runTools({ model: MODEL, messages: [user(ASK_WEATHER)], tools: [weather] });
  assert.equal(await runner.finalContent(), WEATHER);
  const tool = { type: "function", name: "get_weather", parameters, strict: true };
  const first = await client.responses.create({ model: MODEL, input: ASK_WEATHER, tools: [tool] });
  const made = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(made.arguments), { city: "Bern" });
  const input = [user(ASK_WEATHER), ...first.output, { type: "function_call_output", call_id: made.call_id, output: "18 degrees" }];
  assert.equal((await client.responses.create({ model: MODEL, input, tools: [tool] })).output_text, WEATHER);
});

await step("structured output", async () => {
  const format = { type: "json_schema", json_schema: { name: "person", schema: person, strict: true } };
  const answer = await client.chat.completions.parse({ model: MODEL, messages: [user(ASK_PERSON)], response_format: format });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), PERSON);
  const text = { format: { type: "json_schema", name: "person", schema: person, strict: true } };
  assert.deepEqual(JSON.parse((await client.responses.create({ model: MODEL, input: ASK_PERSON, text })).output_text), PERSON);
});

await step("error", async () => {
  await fails(() => client.chat.completions.create({ model: "no", messages: [user("x")] }), "404");
  await fails(() => client.responses.create({ model: "no", input: "x" }), "404");
});

await step("second turn", async () => {
  const first = await client.chat.completions.create({ model: MODEL, messages: [user(ASK_HELLO)] });
  const messages = [user(ASK_HELLO), first.choices[0].message, user(ASK_AGAIN)];
  assert.equal((await client.chat.completions.create({ model: MODEL, messages })).choices[0].message.content, AGAIN);
});
