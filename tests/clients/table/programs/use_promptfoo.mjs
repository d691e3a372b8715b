// promptfoo evaluates two prompts, one with a tool, one with a JSON answer.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { folder, run } from "./run.mjs";
import { ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, step } from "./steps.mjs";

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const env = { OPENAI_API_KEY: "none", PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_DISABLE_REMOTE_GENERATION: "1" };

async function evaluate(prompt, assertion, more = {}, model = MODEL) {
  const cwd = folder(), config = { apiBaseUrl: OPENAI_URL, ...more };
  const settings = { prompts: [prompt], providers: [{ id: `openai:chat:${model}`, config }], tests: [{ assert: [assertion] }] };
  writeFileSync(join(cwd, "promptfooconfig.json"), JSON.stringify(settings));
  const said = await run("promptfoo", ["eval", "--no-cache", "--no-progress-bar", "-o", "out.json"], { cwd, env });
  let results;
  try {
    results = JSON.parse(readFileSync(join(cwd, "out.json"), "utf8")).results;
  } catch {
    throw new Error(said.all.slice(-2000));
  }
  return results;
}

await step("quick start", async () => {
  const found = await evaluate(ASK_HELLO, { type: "equals", value: HELLO });
  assert.equal(found.stats.successes, 1, JSON.stringify(found.results));
});

await step("tools", async () => {
  const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
  const found = await evaluate(ASK_WEATHER, { type: "is-valid-openai-tools-call" }, { tools });
  assert.equal(found.stats.successes, 1, JSON.stringify(found.results));
});

await step("structured output", async () => {
  const found = await evaluate(ASK_PERSON, { type: "is-json" }, { response_format: { type: "json_object" } });
  assert.equal(found.stats.successes, 1, JSON.stringify(found.results));
});

await step("error", async () => {
  const found = await evaluate("x", { type: "equals", value: "y" }, {}, "no");
  assert.equal(found.stats.successes, 0);
  assert.match(JSON.stringify(found.results), /404|no model/);
});
