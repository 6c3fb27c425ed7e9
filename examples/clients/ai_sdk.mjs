// Vercel's AI SDK, unchanged: one feature per run, as try_clients.py asks for it.
//
//     node ai_sdk.mjs FEATURE BASE MODEL DATA_URL
//
// Prints what it saw, or fails. The packages are those of the working folder, or of $AI_SDK.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [feature, base, model, dataUrl] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${process.env.AI_SDK ?? process.cwd()}/package.json`));
const load = async (name) => {
  try {
    return await import(pathToFileURL(require.resolve(name)));
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
    console.error(`not installed: ${name}`);
    process.exit(3);
  }
};

const { generateObject, generateText, Output, streamObject, streamText, tool } = await load("ai");
const { z } = await load("zod");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const compatible = createOpenAICompatible({
  name: "server",
  baseURL: `${base}/v1`,
  supportsStructuredOutputs: true, // else the SDK asks for json_object and hopes
  includeUsage: true,
})(model);
const image = Buffer.from(dataUrl.split(",")[1], "base64");
const question = {
  role: "user",
  content: [{ type: "image", image }, { type: "text", text: "What colour is it?" }],
};
const shape = z.object({
  colour: z.enum(["red", "green", "blue"]),
  shape: z.enum(["square", "circle", "star"]),
  sure: z.boolean(),
});
const part = z.object({ part: z.enum(["left", "right", "middle"]) });
const tools = {
  look: tool({
    description: "Look closer.",
    inputSchema: part,
    execute: async ({ part }) => ({ seen: part }),
  }),
};
const short = { maxOutputTokens: 24, maxRetries: 0 };
const formed = { maxOutputTokens: 300, maxRetries: 0 };

const check = (fine, what) => {
  if (!fine) throw new Error(`not as expected: ${what}`);
};

/** Required and named calls, executed, their results sent back; streamed as well. */
async function calls(model) {
  for (const toolChoice of ["required", { type: "tool", toolName: "look" }]) {
    const asked = { model, messages: [question], tools, toolChoice, ...formed };
    const called = await generateText(asked);
    check(called.toolCalls[0]?.toolName === "look", "toolCalls");
    part.parse(called.toolCalls[0].input);
    check(called.toolResults.length > 0, "toolResults");
    const messages = [question, ...called.response.messages];
    await generateText({ model, messages, tools, toolChoice: "none", ...short });
    const streamed = streamText(asked);
    part.parse((await streamed.toolCalls)[0].input);
  }
}

async function objects(model) {
  const asked = { model, messages: [question], schema: shape, ...formed };
  shape.parse((await generateObject(asked)).object);
  const streamed = streamObject(asked);
  for await (const _ of streamed.partialObjectStream); // its object comes only to who reads on
  shape.parse(await streamed.object);
  const { schema: _, ...rest } = asked;
  shape.parse((await generateText({ ...rest, output: Output.object({ schema: shape }) })).output);
}

/** A turn with the picture, its answer sent back, a streamed turn. */
async function turns(model) {
  const first = await generateText({ model, messages: [question], ...short });
  const again = { role: "user", content: "Are you sure?" };
  const streamed = streamText({ model, messages: [question, ...first.response.messages, again], ...short });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  check(text === (await streamed.text), "streamed text");
  check((await streamed.usage).inputTokens > 0, "usage");
}

const features = {
  async chat() {
    const { usage } = await generateText({ model: compatible, messages: [question], ...short });
    check(usage.inputTokens > 0, "usage");
    const messages = [{ role: "user", content: [{ type: "image", image: dataUrl }] }];
    await generateText({ model: compatible, messages, ...short });
    return "generateText: a Buffer, a data URL";
  },
  async stream() {
    await turns(compatible);
    return "streamText, two turns, usage";
  },
  async structured() {
    await objects(compatible);
    return "generateObject, streamObject, Output.object";
  },
  async tools() {
    await calls(compatible);
    return "required, named, executed, streamed";
  },
  async responses() {
    const { createOpenAI } = await load("@ai-sdk/openai");
    const model_ = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" })(model);
    await turns(model_);
    await objects(model_);
    await calls(model_);
    return "@ai-sdk/openai: turns, objects, tools";
  },
  async messages() {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    const model_ = createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" })(model);
    await turns(model_);
    await objects(model_);
    await calls(model_);
    return "@ai-sdk/anthropic: turns, objects, tools";
  },
};

console.log(await features[feature]());
