// What the programs of Node clients share: see steps.py.
import { renameSync, writeFileSync } from "node:fs";

export const URL = process.env.TRIPOOL_URL, MODEL = process.env.TRIPOOL_MODEL, OPENAI_URL = `${URL}/v1`;
const SCRIPT = process.env.TRIPOOL_SCRIPT;

export const HELLO = "Hello from Tripool!", AGAIN = "Hello again!";
export const ASK_HELLO = "Say hello.", ASK_AGAIN = "Say it once more.";
export const ASK_WEATHER = "What is the weather in Bern?", WEATHER = "It is 18 degrees in Bern.";
export const ASK_PERSON = "Describe Ada as JSON.", PERSON = { name: "Ada", age: 36 };

export const call = (name, args) => `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;

export function script(rules) {
  const list = Object.entries(rules).map(([when, answer]) => ({ when, answer }));
  writeFileSync(`${SCRIPT}.new`, JSON.stringify(list));
  renameSync(`${SCRIPT}.new`, SCRIPT);
}

export const answers = (more = {}) => script({
  [ASK_HELLO]: HELLO, [ASK_AGAIN]: AGAIN, [ASK_WEATHER]: call("get_weather", { city: "Bern" }),
  "18 degrees": WEATHER, [ASK_PERSON]: JSON.stringify(PERSON), ...more,
});

export async function step(name, run) {
  answers();
  let failure = null;
  try {
    await run();
  } catch (error) {
    console.error(error);
    failure = String(error).slice(0, 500);
  }
  console.log("STEP " + JSON.stringify({ step: name, failure }));
}

export async function fails(run, ...words) {
  let message;
  try {
    await run();
  } catch (error) {
    message = String(error) + JSON.stringify(error?.responseBody ?? "");
  }
  if (message === undefined) throw new Error("no error");
  const missing = words.filter((word) => !message.includes(word));
  if (missing.length) throw new Error(`${missing} not in ${message}`);
}
