// Codex without a person: answers, runs a command, goes on with a conversation.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { folder, run } from "./run.mjs";
import { AGAIN, ASK_AGAIN, ASK_HELLO, HELLO, MODEL, OPENAI_URL, call, script, step } from "./steps.mjs";

function home(model = MODEL) {
  const cwd = folder();
  mkdirSync(join(cwd, ".codex"));
  const provider = `[model_providers.tripool]\nname = "tripool"\nbase_url = "${OPENAI_URL}"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n`;
  writeFileSync(join(cwd, ".codex", "config.toml"), `model = "${model}"\nmodel_provider = "tripool"\n${provider}`);
  return cwd;
}
const ask = (cwd, ...words) =>
  run("codex", ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...words], { cwd, env: { CODEX_HOME: join(cwd, ".codex") } });

await step("quick start", async () => {
  const said = await ask(home(), ASK_HELLO);
  assert.ok(said.out.includes(HELLO), said.all);
});

await step("tools", async () => {
  const cwd = home(), file = join(cwd, "made.txt");
  script({ "Make a file": call("exec_command", { cmd: `echo made > ${file}` }), "exited with code 0": "Done." });
  const said = await ask(cwd, "Make a file");
  assert.equal(readFileSync(file, "utf8"), "made\n", said.all);
  assert.ok(said.out.includes("Done."), said.all);
});

await step("error", async () => {
  const said = await ask(home("no"), "x");
  assert.match(said.all, /no model|404/);
});

await step("second turn", async () => {
  const cwd = home();
  await ask(cwd, ASK_HELLO);
  const said = await ask(cwd, "resume", "--last", ASK_AGAIN);
  assert.ok(said.out.includes(AGAIN), said.all);
});
