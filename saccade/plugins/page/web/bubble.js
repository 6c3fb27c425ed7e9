// One turn of a conversation.

import { button, copyButton, element } from "./dom.js";
import { shown } from "./files.js";
import { rendered } from "./markdown.js";
import { showTrace } from "./trace.js";

const PAUSE = 60; // ms between two renderings of an answer that grows, at least
const QUIET = 400; // ms after which a bubble says what it waits for

/** A question. edit: the callback of its button. */
export function questionBubble({ text, images }, edit) {
  return element(
    "article",
    { class: "turn user", "aria-label": "Question" },
    ...(images.length ? [element("div", { class: "images" }, ...images.map(shown))] : []),
    ...(text ? [element("div", { class: "text" }, text)] : []),
    element("footer", {}, element("span", { class: "tools" }, button("Edit", edit))),
  );
}

/** An answer, rendered again at each `update`. again: regenerates it. */
export class AnswerBubble {
  constructor(turn, images, again) {
    this.turn = turn;
    this.images = images; // of the trace's
    this.again = again;
    this.text = element("div", { class: "text markdown" });
    this.waiting = element("p", { class: "waits small", role: "status" });
    this.whole = element(
      "article",
      { class: "turn assistant", "aria-label": "Answer" },
      this.waiting,
      this.text,
    );
    this.timer = null;
    this.thoughts = null;
  }

  /** Show a status text until the answer starts. */
  begin(words) {
    this.whole.classList.add("running");
    this.whole.setAttribute("aria-busy", "true");
    const began = performance.now();
    this.clock = setInterval(() => {
      const spent = performance.now() - began;
      if (spent < QUIET) return;
      const shown = this.turn.reasoning ? "Reasoning …" : words;
      const now = spent < 2000 ? shown : `${shown} ${Math.floor(spent / 1000)} s`;
      if (this.waiting.textContent !== now) this.waiting.textContent = now;
    }, 200);
  }

  /** Schedule a render of the answer so far. */
  update() {
    if (this.turn.text) this.#stopWaiting();
    this.timer ??= setTimeout(() => this.#render(), PAUSE);
  }

  /** The answer is complete. budget: may be shared by several answers. */
  finish(budget) {
    this.#stopWaiting();
    clearTimeout(this.timer);
    this.whole.classList.remove("running");
    this.whole.removeAttribute("aria-busy");
    this.#render(budget);
    const { note, trace } = this.turn;
    if (note) this.whole.append(this.#note(note));
    this.whole.append(
      element(
        "footer",
        {},
        ...(trace ? [showTrace(this.turn, this.images)] : []),
        element(
          "span",
          { class: "tools" },
          copyButton(() => this.turn.text),
          button("Regenerate", this.again),
        ),
      ),
    );
    this.whole.dataset.done = "";
  }

  #note({ kind, words }) {
    const made = element("p", { class: kind }, words);
    if (kind === "error") made.append(" ", button("Try again", this.again));
    return made;
  }

  #stopWaiting() {
    clearInterval(this.clock);
    this.waiting.remove();
  }

  #render(budget) {
    const { text, reasoning } = this.turn;
    if (reasoning) {
      this.thoughts ??= this.#thoughtsBox();
      this.thoughts.lastChild.textContent = reasoning;
    }
    const began = performance.now();
    this.text.replaceChildren(rendered(text, budget));
    const spent = performance.now() - began;
    // Long answers render slowly: spend at most a quarter of the time on it.
    this.timer = null;
    if (spent > PAUSE / 3 && this.whole.classList.contains("running"))
      this.timer = setTimeout(() => (this.timer = null), 3 * spent);
  }

  #thoughtsBox() {
    const made = element(
      "details",
      { class: "thoughts" },
      element("summary", {}, "Reasoning"),
      element("div"),
    );
    this.whole.prepend(made);
    return made;
  }
}

/** Status text before the first token. Only the server knows which images are new. */
export const waitingFor = (turns) =>
  turns.some(({ images }) => images.length)
    ? "Waiting for the first token; new images are encoded first …"
    : "Waiting for the first token …";
