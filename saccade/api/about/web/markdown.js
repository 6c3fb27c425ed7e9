// Markdown becomes elements. The text is hostile: HTML in it stays text, and what is left is
// sanitised once more, with a list of what may stand there. Only the sanitiser makes HTML.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { copyButton, element } from "./dom.js";
import { extensions, lheading, showFormulas } from "./math.js";

const LONGEST = 200_000; // characters; more is shown as it is

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

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  extensions: [lineBreak, ...extensions],
  tokenizer: { html: () => undefined, tag: () => undefined, lheading }, // HTML is text, but for <br>
  renderer: {
    image({ href, text, tokens }) {
      return this.link({ href, tokens: tokens ?? [{ type: "text", raw: text, text }] });
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** The elements that a text in Markdown comes to. */
export function rendered(text) {
  if (text.length > LONGEST) return element("div", { class: "plain" }, text);
  const made = sanitised(marked.parse(text));
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
  showFormulas(made);
  return made;
}

/** HTML without whatever is not allowed, as a fragment. */
export const sanitised = (html) => globalThis.DOMPurify.sanitize(html, ALLOWED);
