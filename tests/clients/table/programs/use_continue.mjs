// Continue's command line without a person.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { folder, run } from "./run.mjs";
import { ASK_HELLO, HELLO, MODEL, OPENAI_URL, call, script, step } from "./steps.mjs";

function home(model = MODEL) {
  const cwd = folder();
  const entry = `models:\n  - name: tripool\n    provider: openai\n    model: ${model}\n    apiBase: ${OPENAI_URL}\n    apiKey: none\n    roles: [chat]\n    capabilities: [tool_use]\n`;
  writeFileSync(join(cwd, "config.yaml"), `name: local\nversion: 1.0.0\nschema: v1\n${entry}`);
  mkdirSync(join(cwd, ".continue"), { recursive: true });
  return cwd;
}
const ask = (cwd, ...words) =>
  run("cn", ["-p", "--config", join(cwd, "config.yaml"), ...words], { cwd, env: { CONTINUE_TELEMETRY_ENABLED: "0", CONTINUE_CLI_ENABLE_TELEMETRY: "0" } });

await step("quick start", async () => {
  const said = await ask(home(), ASK_HELLO);
  assert.ok(said.out.includes(HELLO), said.all);
});

await step("tools", async () => {
  const cwd = home(), file = join(cwd, "made.txt");
  script({ "Make a file": call("Write", { filepath: file, content: "made\n" }), "uccessfully": "Done." });
  const said = await ask(cwd, "--auto", "Make a file");
  assert.equal(readFileSync(file, "utf8"), "made\n", said.all);
});

await step("error", async () => {
  const said = await ask(home("no"), "x");
  assert.match(said.all, /no model|404/);
});
