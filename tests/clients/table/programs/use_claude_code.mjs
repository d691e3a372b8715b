// Claude Code in its print mode: answers, edits a file with its own tools, goes on with a conversation.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { folder, run } from "./run.mjs";
import { AGAIN, ASK_AGAIN, ASK_HELLO, HELLO, MODEL, URL, call, script, step } from "./steps.mjs";

const env = {
  ANTHROPIC_BASE_URL: URL, ANTHROPIC_AUTH_TOKEN: "none", ANTHROPIC_API_KEY: "", ANTHROPIC_MODEL: MODEL, ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  ANTHROPIC_DEFAULT_HAIKU_MODEL: MODEL, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_AUTOUPDATER: "1", IS_SANDBOX: "1",
};
const ask = (cwd, ...words) => run("claude", ["-p", ...words], { cwd, env });

await step("quick start", async () => {
  const said = await ask(folder(), ASK_HELLO);
  assert.equal(said.out.trim(), HELLO, said.all);
});

await step("streaming", async () => {
  const said = await ask(folder(), "--output-format", "stream-json", "--include-partial-messages", "--verbose", ASK_HELLO);
  const events = said.out.trim().split("\n").map((line) => JSON.parse(line));
  const text = events.filter((one) => one.event?.delta?.type === "text_delta").map((one) => one.event.delta.text).join("");
  assert.equal(text, HELLO, said.all);
});

await step("tools", async () => {
  const cwd = folder(), file = join(cwd, "greet.txt");
  writeFileSync(file, "bye\n");
  script({
    "Greet in greet.txt": call("Read", { file_path: file }),
    "1\tbye": call("Edit", { file_path: file, old_string: "bye", new_string: "hello" }),
    "has been updated": "Done.",
  });
  const said = await ask(cwd, "--permission-mode", "acceptEdits", "Greet in greet.txt");
  assert.equal(readFileSync(file, "utf8"), "hello\n", said.all);
  assert.equal(said.out.trim(), "Done.", said.all);
});

await step("error", async () => {
  const said = await run("claude", ["-p", "--model", "no", "x"], { cwd: folder(), env: { ...env, ANTHROPIC_MODEL: "no" } });
  assert.match(said.all, /no/);
  assert.notEqual(said.code, 0, said.all);
});

await step("second turn", async () => {
  const cwd = folder();
  assert.equal((await ask(cwd, ASK_HELLO)).out.trim(), HELLO);
  const said = await ask(cwd, "--continue", ASK_AGAIN);
  assert.equal(said.out.trim(), AGAIN, said.all);
});
