// opencode without a person, over its provider for OpenAI-like servers.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { folder, run } from "./run.mjs";
import { AGAIN, ASK_AGAIN, ASK_HELLO, HELLO, MODEL, OPENAI_URL, call, script, step } from "./steps.mjs";

function home() {
  const cwd = folder();
  const options = { baseURL: OPENAI_URL, apiKey: "none" };
  const provider = { tripool: { npm: "@ai-sdk/openai-compatible", options, models: { [MODEL]: { name: MODEL }, no: { name: "no" } } } };
  const config = { provider, model: `tripool/${MODEL}`, small_model: `tripool/${MODEL}`, share: "disabled", autoupdate: false, permission: "allow" };
  writeFileSync(join(cwd, "opencode.json"), JSON.stringify(config));
  return cwd;
}
const ask = (cwd, ...words) => run("opencode", ["run", ...words], { cwd, env: { OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_CONFIG: join(cwd, "opencode.json") } });

await step("quick start", async () => {
  const said = await ask(home(), ASK_HELLO);
  assert.ok(said.out.includes(HELLO), said.all);
});

await step("tools", async () => {
  const cwd = home(), file = join(cwd, "made.txt");
  // In the order of its schema, which a grammar keeps.
  script({ "Make a file": call("write", { content: "made\n", filePath: file }), "successfully": "Done." });
  const said = await ask(cwd, "Make a file");
  assert.equal(readFileSync(file, "utf8"), "made\n", said.all);
});

await step("error", async () => {
  const said = await ask(home(), "--model", "tripool/no", "x");
  assert.match(said.all, /no model|not found/i);
});

await step("second turn", async () => {
  const cwd = home();
  await ask(cwd, ASK_HELLO);
  const said = await ask(cwd, "--continue", ASK_AGAIN);
  assert.ok(said.out.includes(AGAIN), said.all);
});
