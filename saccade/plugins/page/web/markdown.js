// Render untrusted Markdown: HTML in it stays text, and the output is sanitised with an allowlist.
// Text that exceeds its budget, or that the parser fails on, is shown as plain text.

import { Lexer, Marked, Parser } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { copyButton, element } from "./dom.js";
import { extensions, showFormulas } from "./math.js";

const MAX_CHARS = 200_000; // of a text
const MAX_DEPTH = 40; // of lists, quotes and emphasis within each other
const MAX_INLINE_CHARS = 20_000; // of a paragraph: the parser copies it at each bracket

const ALLOWED = {
  ALLOWED_TAGS: (
    "p br hr h1 h2 h3 h4 h5 h6 strong em del code pre blockquote ul ol li " +
    "table thead tbody tr th td a var"
  ).split(" "),
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ADD_URI_SAFE_ATTR: ["start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

const lineBreak = {
  name: "lineBreak",
  level: "inline",
  start: (source) => source.search(/<br/i),
  tokenizer(source) {
    const match = /^<br\s*\/?>/i.exec(source);
    return match ? { type: "lineBreak", raw: match[0] } : undefined;
  },
  renderer: () => "<br>",
};

/** The cost limit of one text, or of several that share it. Counts, so that a text is shown
 * alike on every machine. */
export class Budget {
  constructor(texts = 1) {
    this.tokens = texts * 20_000; // the elements that the browser lays out
    this.scanned = texts * 30_000_000; // characters of paragraphs that the parser reads, again and again
    this.tex = texts * 50_000; // characters of formulas
  }

  spend(scanned) {
    this.tokens -= 1;
    this.scanned -= scanned;
    if (this.tokens < 0 || this.scanned < 0) throw new RangeError("the budget is spent");
  }
}

class BoundedLexer extends Lexer {
  #depth = 0;

  constructor(options, budget) {
    super(options);
    this.budget = budget;
  }

  blockTokens(...from) {
    return this.#within(() => super.blockTokens(...from));
  }

  inlineTokens(source, tokens) {
    if (source.length > MAX_INLINE_CHARS) throw new RangeError("a paragraph is too long");
    this.budget.spend(source.length);
    return this.#within(() => super.inlineTokens(source, tokens));
  }

  #within(lex) {
    if (++this.#depth > MAX_DEPTH) throw new RangeError("nested too deeply");
    const tokens = lex();
    this.#depth -= 1;
    return tokens;
  }
}

/** Called for each token before the parser's own rules: counts it and creates none. */
const counting = (level, cost) => ({
  name: `counting-${level}`,
  level,
  tokenizer(source) {
    this.lexer.budget.spend(cost(source));
  },
});

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  extensions: [
    lineBreak,
    ...extensions,
    counting("block", () => 0), // its rules stop at a line or a blank line
    counting("inline", (source) => source.length),
  ],
  tokenizer: {
    html: () => undefined, // HTML is text, but for <br>
    tag: () => undefined,
    code: () => undefined, // models fence their code: four blanks are no more than blanks
    lheading: () => undefined, // "---" below a line is a rule, "=" a part of a formula
  },
  renderer: {
    image({ href, text, tokens }) {
      return this.link({ href, tokens: tokens ?? [{ type: "text", raw: text, text }] });
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** Render Markdown to elements. Never throws. */
export function rendered(text, budget = new Budget()) {
  try {
    return parsed(text, budget);
  } catch {
    return plain(text); // whatever the parser stumbled over
  }
}

const plain = (text) => element("div", { class: "plain" }, text);

function parsed(text, budget) {
  if (text.length > MAX_CHARS) return plain(text);
  const tokens = new BoundedLexer(marked.defaults, budget).lex(text);
  const made = sanitised(Parser.parse(tokens, marked.defaults));
  for (const link of made.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    if (link.href) link.title = link.href;
  }
  for (const block of made.querySelectorAll("pre")) {
    const box = element("div", { class: "code" });
    block.replaceWith(box);
    box.append(block, copyButton(() => block.textContent.replace(/\n$/, "")));
  }
  for (const table of made.querySelectorAll("table")) {
    const box = element("div", { class: "wide" });
    table.replaceWith(box);
    box.append(table);
  }
  showFormulas(made, budget);
  return made;
}

/** Sanitised HTML, as a fragment. */
export const sanitised = (html) => globalThis.DOMPurify.sanitize(html, ALLOWED);
