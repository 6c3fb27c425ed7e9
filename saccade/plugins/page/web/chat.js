// The conversation and the answer in progress. The server stores neither: every request sends all
// messages, and repeated images cost it a hash.

import { chat, Refused, Unreachable } from "./api.js";
import { AnswerBubble, questionBubble, waitingFor } from "./bubble.js";
import { button, element, number } from "./dom.js";
import { Budget } from "./markdown.js";
import { imagesAt, messagesOf, partOf, placesOf } from "./messages.js";

const MAX_SHOWN = 60; // turns, until earlier ones are asked for
const TEXTS = 5; // how many of the largest texts may be rendered at once

export class Conversation {
  /** log: the element to show it in; settings: the request's other fields;
   * on: {change(turns), edit(index), again(index)}, what is to be heard of. */
  constructor(log, settings, on) {
    this.log = log;
    this.settings = settings;
    this.on = on;
    // {role, text, images (videos and PDFs, too)}; an answer has
    // {reasoning, model, trace, usage, seen, note} too
    this.turns = [];
    this.running = null;
  }

  /** Show these turns instead of the current ones. */
  show(turns) {
    this.turns = turns;
    this.log.replaceChildren(...this.#bubbles(turns.length));
    if (turns.at(-1)?.role === "user") this.log.append(this.#unanswered(turns.length));
  }

  stop() {
    this.running?.abort();
  }

  /** Replace the turns from `from` on with a question, and stream the answer.
   * Without any answer all is as it was; throws then. A new question that was stopped stays. */
  async ask(text, images, from = this.turns.length) {
    await this.#answer([...this.turns.slice(0, from), { role: "user", text, images }]);
  }

  /** Regenerate the answer at `index`. */
  async again(index) {
    await this.#answer(this.turns.slice(0, index));
  }

  async #answer(turns) {
    const before = this.turns;
    const turn = { role: "assistant", text: "", reasoning: "", images: [], seen: [], note: null };
    const shown = this.#answerBubble(turn, turns.length);
    this.show(turns);
    this.log.querySelector(".unanswered")?.remove();
    this.log.append(shown.whole);
    shown.begin(waitingFor(turns));
    this.log.parentElement.scrollTop = this.log.parentElement.scrollHeight;
    this.on.change(turns);
    const running = (this.running = new AbortController());
    const { system } = this.settings;
    const places = placesOf(turns, system);
    let failure = null;
    try {
      await this.#listen(await messagesOf(turns, system), running.signal, turn, shown);
    } catch (error) {
      failure = explained(error, places, turns);
    } finally {
      if (this.running === running) this.running = null;
    }
    if (failure && !turn.text) {
      shown.finish();
      const stays = failure.name === "AbortError" && turns.length > before.length;
      this.show(stays ? turns : before);
      this.on.change(this.turns);
      if (stays) return;
      throw failure;
    }
    if (failure) turn.note = noteOf(failure);
    turn.seen = turn.trace?.images.map(({ place }) => places.get(partOf(place)) ?? null) ?? [];
    shown.images = imagesAt(turns, turn.seen);
    this.turns = [...turns, turn];
    following(this.log, () => shown.finish());
    this.on.change(this.turns);
  }

  async #listen(messages, signal, turn, shown) {
    const body = {
      ...this.settings.body(),
      messages,
      stream: true,
      stream_options: { include_usage: true },
      saccade: { trace: true },
    };
    let cut = false;
    for await (const chunk of chat(body, signal)) {
      for (const { delta, finish_reason: finish } of chunk.choices) {
        turn.text += delta.content ?? "";
        turn.reasoning += delta.reasoning_content ?? "";
        if (delta.content || delta.reasoning_content) following(this.log, () => shown.update());
        cut ||= finish === "length";
      }
      turn.model = chunk.model ?? turn.model;
      turn.trace = chunk.saccade ?? turn.trace;
      turn.usage = chunk.usage ?? turn.usage;
    }
    if (cut) turn.note = cutAfter(turn.usage?.completion_tokens);
  }

  /** The last turns before `end`, after a button that shows those before them. */
  #bubbles(end) {
    const first = Math.max(0, end - MAX_SHOWN);
    const budget = new Budget(TEXTS);
    const made = [];
    for (let i = end - 1; i >= first; i--) made.unshift(this.#bubble(this.turns[i], i, budget));
    return first ? [this.#earlier(first), ...made] : made;
  }

  #earlier(end) {
    const view = this.log.parentElement;
    return button(
      `Show earlier messages (${number(end)})`,
      (pressed) => {
        const below = view.scrollHeight - view.scrollTop; // what is read stays where it is
        pressed.replaceWith(...this.#bubbles(end));
        view.scrollTop = view.scrollHeight - below;
      },
      { class: "earlier" },
    );
  }

  #bubble(turn, i, budget) {
    if (turn.role === "user") return questionBubble(turn, () => this.on.edit(i));
    const made = this.#answerBubble(turn, i);
    made.images = imagesAt(this.turns, turn.seen);
    made.finish(budget);
    return made.whole;
  }

  #answerBubble(turn, i) {
    return new AnswerBubble(turn, [], () => this.on.again(i));
  }

  #unanswered(index) {
    const retry = button("Ask again", () => this.on.again(index));
    return element("p", { class: "unanswered small" }, "This question has no answer yet. ", retry);
  }
}

/** The error, with the file's name instead of the field's path. */
function explained(error, places, turns) {
  if (!(error instanceof Refused) || !error.param) return error;
  const at = places.get(partOf(error.param));
  const name = at ? turns[at[0]].images[at[1]].name : error.param === "messages" ? "" : error.param;
  return new Refused(error.status, name ? `${name}: ${error.message}` : error.message, error.param);
}

function noteOf(error) {
  if (error.name === "AbortError") return { kind: "small", words: "Stopped." };
  if (error instanceof Unreachable)
    return { kind: "error", words: "Connection lost. The answer is incomplete." };
  return { kind: "error", words: error.message };
}

const cutAfter = (tokens) => ({
  kind: "small",
  words: tokens
    ? `Stopped at the limit of ${number(tokens)} tokens. You can change it in Options.`
    : "Stopped at the token limit.",
});

/** Append to the log, and keep its end visible if it was. */
function following(log, act) {
  const view = log.parentElement;
  const atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 80;
  act();
  if (atEnd) view.scrollTop = view.scrollHeight;
}
