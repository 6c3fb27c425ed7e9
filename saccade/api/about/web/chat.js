// The conversation: what was said, what is being answered, and how both are shown. The server keeps
// none of it: every request carries all messages, whose images cost it a hash.

import { chat } from "./api.js";
import { element } from "./dom.js";
import { picture } from "./images.js";
import { showTrace } from "./trace.js";

export class Conversation {
  /** log: the element that it is shown in. */
  constructor(log) {
    this.log = log;
    this.turns = []; // {role, text, images}
    this.running = null;
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
  }

  stop() {
    this.running?.abort();
  }

  /** Ask, and show the answer as it comes. A question that got none is taken back; throws then. */
  async ask(text, images, maxTokens) {
    const question = { role: "user", text, images };
    const asked = bubble("user", text, images);
    const answer = bubble("assistant", "", []);
    this.log.append(asked, answer);
    answer.scrollIntoView({ block: "end" });
    const turns = [...this.turns, question];
    const running = (this.running = new AbortController());
    const told = { text: "", trace: null, usage: null };
    try {
      await listen(answer, turns, maxTokens, running.signal, told);
    } catch (error) {
      if (!told.text) {
        asked.remove();
        answer.remove();
        throw error;
      }
      const stopped = running.signal.aborted;
      note(answer, stopped ? "stopped" : error.message, stopped ? "small" : "error");
    } finally {
      if (this.running === running) this.running = null;
      answer.classList.remove("running");
    }
    if (!answer.isConnected) return; // cleared meanwhile
    this.turns = [...turns, { role: "assistant", text: told.text, images: [] }];
    if (told.trace) answer.append(showTrace(told.trace, told.usage, placed(turns)));
    answer.dataset.done = "";
    answer.scrollIntoView({ block: "end" });
  }
}

async function listen(answer, turns, maxTokens, signal, told) {
  answer.classList.add("running");
  const text = answer.querySelector(".text");
  const body = {
    messages: turns.map(message),
    max_tokens: maxTokens,
    stream: true,
    stream_options: { include_usage: true },
    saccade: { trace: true },
  };
  for await (const chunk of chat(body, signal)) {
    for (const { delta, finish_reason: finish } of chunk.choices) {
      if (delta.reasoning_content) think(answer, delta.reasoning_content);
      told.text += delta.content ?? "";
      if (delta.content) text.append(delta.content);
      if (finish === "length") note(answer, "cut at the number of tokens asked for");
    }
    told.trace = chunk.saccade ?? told.trace;
    told.usage = chunk.usage ?? told.usage;
  }
}

function message({ role, text, images }) {
  if (!images.length) return { role, content: text };
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

/** Every image of a conversation by the place that the server calls it. */
function placed(turns) {
  const places = new Map();
  turns.forEach((turn, i) =>
    turn.images.forEach((image, j) => places.set(`messages[${i}].content[${j}]`, image)),
  );
  return places;
}

function bubble(role, text, images) {
  return element(
    "article",
    { class: `turn ${role}` },
    ...(images.length ? [element("div", { class: "images" }, ...images.map(picture))] : []),
    element("div", { class: "text" }, text),
  );
}

function think(answer, text) {
  let box = answer.querySelector("details");
  if (!box) {
    box = element("details", {}, element("summary", {}, "reasoning"), element("div"));
    answer.prepend(box);
  }
  box.lastChild.append(text);
}

function note(answer, words, kind = "small") {
  answer.append(element("p", { class: kind }, words));
}
