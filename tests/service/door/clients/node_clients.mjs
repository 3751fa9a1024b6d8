// OpenAI's client for Node and the AI SDK: prints a row for each case, as rows.py does.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [base, model, prompt, answer] = process.argv.slice(2);
const baseURL = `${base}/v1`;
const apiKey = "any";
const weather = z.object({ city: z.string(), days: z.number().int() });
const given = { city: "Rome", days: 3 };
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: prompt }] };
const chat = createOpenAICompatible({ name: "door", baseURL, apiKey, supportsStructuredOutputs: true })(model);
const responses = createOpenAI({ baseURL, apiKey })(model);
const tools = { weather: tool({ inputSchema: weather, execute: () => "sun" }) };
const steps = { stopWhen: stepCountIs(3), maxRetries: 0, tools, prompt };

async function streamed(chunks) {
  let said = "";
  for await (const chunk of chunks) said += chunk;
  return said;
}

const cases = {
  async openai_stream() {
    const stream = client.chat.completions.stream(asked);
    assert.equal((await stream.finalChatCompletion()).choices[0].message.content, answer);
  },
  async openai_run_tools() {
    const calls = [];
    const called = { name: "weather", parse: JSON.parse, parameters: z.toJSONSchema(weather) };
    const run = (found) => (calls.push(found), "sun");
    const runner = client.chat.completions.runTools({
      ...asked, tools: [{ type: "function", function: { ...called, function: run } }],
    });
    assert.equal(await runner.finalContent(), answer);
    assert.deepEqual(calls, [given]);
  },
  async openai_parse() {
    const parsed = await client.chat.completions.parse({
      ...asked, response_format: zodResponseFormat(weather, "weather"),
    });
    assert.deepEqual(parsed.choices[0].message.parsed, given);
  },
  async openai_responses() {
    const stream = client.responses.stream({ model, input: prompt });
    assert.equal((await stream.finalResponse()).output_text, answer);
  },
  async ai_sdk_tools() {
    const made = await generateText({ model: chat, ...steps });
    assert.deepEqual(made.steps[0].toolCalls[0].input, given);
    assert.equal(made.text, answer);
  },
  async ai_sdk_streamed_tools() {
    assert.equal(await streamed(streamText({ model: chat, ...steps }).textStream), answer);
  },
  async ai_sdk_object() {
    const made = await generateText({ model: chat, prompt, output: Output.object({ schema: weather }), maxRetries: 0 });
    assert.deepEqual(made.output, given);
  },
  async ai_sdk_responses() {
    const made = await generateText({ model: responses, ...steps });
    assert.deepEqual(made.steps[0].toolCalls[0].input, given);
    assert.equal(made.text, answer);
  },
};

for (const [name, run] of Object.entries(cases)) {
  const outcome = await run().then(() => "works", (error) => `fails: ${error.stack}`);
  console.log("row: " + JSON.stringify([name, outcome]));
}
