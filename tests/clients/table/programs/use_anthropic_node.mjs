// The @anthropic-ai/sdk package.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, PERSON, URL, WEATHER, fails, step } from "./steps.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const tools = [{ name: "get_weather", input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];
const user = (content) => ({ role: "user", content });
const ask = (messages, more = {}) => client.messages.create({ model: MODEL, max_tokens: 500, messages, ...more });

await step("quick start", async () => {
  assert.equal((await ask([user(ASK_HELLO)])).content[0].text, HELLO);
  assert.ok((await client.messages.countTokens({ model: MODEL, messages: [user(ASK_HELLO)] })).input_tokens > 0);
});

await step("streaming", async () => {
  const stream = client.messages.stream({ model: MODEL, max_tokens: 500, messages: [user(ASK_HELLO)] });
  assert.equal(await stream.finalText(), HELLO);
});

await step("tools", async () => {
  const first = await ask([user(ASK_WEATHER)], { tools });
  const made = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual(made.input, { city: "Bern" });
  const result = [{ type: "tool_result", tool_use_id: made.id, content: "18 degrees" }];
  const talk = [user(ASK_WEATHER), { role: "assistant", content: first.content }, user(result)];
  assert.equal((await ask(talk, { tools })).content[0].text, WEATHER);
});

await step("structured output", async () => {
  const schema = {
    type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false,
  };
  const answer = await ask([user(ASK_PERSON)], { output_config: { format: { type: "json_schema", schema } } });
  assert.deepEqual(JSON.parse(answer.content[0].text), PERSON);
});

await step("error", async () => {
  await fails(() => client.messages.create({ model: "no", max_tokens: 5, messages: [user("x")] }), "404");
});

await step("second turn", async () => {
  const first = await ask([user(ASK_HELLO)]);
  const talk = [user(ASK_HELLO), { role: "assistant", content: first.content }, user(ASK_AGAIN)];
  assert.equal((await ask(talk)).content[0].text, AGAIN);
});
