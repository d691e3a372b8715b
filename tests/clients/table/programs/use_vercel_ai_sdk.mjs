// Vercel's AI SDK: openai() (responses by default), its chat form, openai-compatible, anthropic.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { AGAIN, ASK_AGAIN, ASK_HELLO, ASK_PERSON, ASK_WEATHER, HELLO, MODEL, OPENAI_URL, PERSON, WEATHER, call, fails, script, step } from "./steps.mjs";

const openai = createOpenAI({ baseURL: OPENAI_URL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "tripool", baseURL: OPENAI_URL, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: OPENAI_URL, apiKey: "none" });
const models = [openai(MODEL), openai.chat(MODEL), compatible(MODEL), anthropic(MODEL)];
const person = z.object({ name: z.string(), age: z.number().int() });
const ask = (model, more) => ai.generateText({ model, maxRetries: 0, ...more });

await step("quick start", async () => {
  for (const model of models) assert.equal((await ask(model, { prompt: ASK_HELLO })).text, HELLO, model.provider);
});

await step("streaming", async () => {
  for (const model of models) {
    let text = "";
    for await (const part of ai.streamText({ model, prompt: ASK_HELLO, maxRetries: 0 }).textStream) text += part;
    assert.equal(text, HELLO, model.provider);
  }
});

await step("tools", async () => {
  const get_weather = ai.tool({
    description: "Of a city.", inputSchema: z.object({ city: z.string(), options: z.record(z.string(), z.string()).optional() }),
    execute: async () => "18 degrees",
  });
  for (const model of models) {
    const answer = await ask(model, { prompt: ASK_WEATHER, tools: { get_weather }, stopWhen: (ai.stepCountIs ?? ai.isStepCount)(3) });
    assert.equal(answer.text, WEATHER, model.provider);
  }
});

await step("structured output", async () => {
  for (const model of models) {
    if (model.provider.startsWith("anthropic")) script({ [ASK_PERSON]: call("json", PERSON) });
    const answer = await ask(model, { prompt: ASK_PERSON, output: ai.Output.object({ schema: person }) });
    assert.deepEqual(answer.output, PERSON, model.provider);
  }
});

await step("error", async () => {
  for (const model of [openai("no"), openai.chat("no"), compatible("no"), anthropic("no")])
    await fails(() => ask(model, { prompt: "x" }), "no");
});

await step("second turn", async () => {
  for (const model of models) {
    // openai() refers to its own items by id here; a stream's are known too.
    const first = await ask(model, { prompt: ASK_HELLO });
    const streamed = ai.streamText({ model, prompt: ASK_HELLO, maxRetries: 0 });
    for (const said of [first.response.messages, (await streamed.response).messages]) {
      const messages = [{ role: "user", content: ASK_HELLO }, ...said, { role: "user", content: ASK_AGAIN }];
      assert.equal((await ask(model, { messages })).text, AGAIN, model.provider);
    }
  }
});
