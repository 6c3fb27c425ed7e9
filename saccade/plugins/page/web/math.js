// Render TeX between dollars or brackets as MathML. The library is loaded with the first formula.
// Formulas that it cannot parse stay as text.

import { element } from "./dom.js";

const MAX_CHARS = 4000; // of a formula

const LIMITS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [40, 40] };
const ALLOWED = {
  USE_PROFILES: { mathMl: true },
  ADD_ATTR: ["style"], // set by the library, property by property; the page's policy drops others
  IN_PLACE: true,
};

// As pandoc has it: "$5 and $10" is money. Each stops at the first end, and reads nothing twice.
const INLINE = [
  /^\$\$((?:\\[\s\S]|[^\\$])+)\$\$/,
  /^\$(?![\s$])((?:\\.|[^\\$\n`])+?)(?<!\s)\$(?!\d)/,
  /^\\\(((?:(?!\\\))[\s\S])+)\\\)/,
  /^\\\[((?:(?!\\\])[\s\S])+)\\\]/,
];
const BLOCK = [
  /^ {0,3}\$\$((?:\\[\s\S]|\$(?!\$)|[^\\$])+)\$\$[ \t]*(?:\n|$)/,
  /^ {0,3}\\\[((?:(?!\\\])[\s\S])+)\\\][ \t]*(?:\n|$)/,
];
const ENDS = { "(": "\\)", "[": "\\]", $: "$" }; // by the last character that opens a formula
const OPENING = /^ {0,3}(?:\$\$?|\\[([])/;
const DOLLARS = /^\${3,}/; // which open no formula

function token(type, patterns, source) {
  const [opening] = OPENING.exec(source) ?? [];
  const near = source.slice(0, MAX_CHARS + 1);
  if (!opening || !near.includes(ENDS[opening.at(-1)], opening.length)) return undefined;
  const raw = patterns.map((pattern) => pattern.exec(near)?.[0]).find(Boolean);
  return raw && raw.length <= MAX_CHARS ? { type, raw, tex: raw.trim() } : undefined;
}

function inlineToken(source) {
  const [raw] = DOLLARS.exec(source) ?? [];
  return raw ? { type: "text", raw, text: raw } : token("formula", INLINE, source);
}

/** Where a later line of this paragraph starts a formula. */
function blockStart(source) {
  for (const { index, 1: opening } of source.matchAll(/\n(?:[ \t]*\n| {0,3}(\$\$|\\\[))/g)) {
    if (!opening) break; // a blank line
    if (token("formulaBlock", BLOCK, source.slice(index + 1))) return index + 1;
  }
  return -1;
}

const text = (words) =>
  words.replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);

/** The extension of marked that turns each formula into a <var> with its source. */
export const extensions = [
  {
    name: "formula",
    level: "inline",
    start: (source) => source.search(/\$|\\[([]/),
    tokenizer: inlineToken,
    renderer: ({ tex }) => `<var>${text(tex)}</var>`,
  },
  {
    name: "formulaBlock",
    level: "block",
    start: blockStart,
    tokenizer: (source) => token("formulaBlock", BLOCK, source),
    renderer: ({ tex }) => `<p><var>${text(tex)}</var></p>\n`,
  },
];

let library = null; // once it is there
let fetching = null;

/** Show the formulas below an element: at once if the library is there, else as soon as it is.
 * Those beyond the budget stay as they were written. */
export function showFormulas(root, budget) {
  const found = [...root.querySelectorAll("var")].filter(
    ({ textContent: { length } }) => budget.tex >= length && ((budget.tex -= length), true),
  );
  if (!found.length) return;
  if (library) return found.forEach(typeset);
  fetching ??= import("./vendor/temml.mjs").then(
    (module) => (library = module.default),
    () => (fetching = null),
  );
  fetching.then(() => library && found.forEach(typeset));
}

const DELIMITERS = /^(\$\$|\$|\\\[|\\\()([\s\S]*?)(?:\$\$|\$|\\\]|\\\))$/;

function typeset(place) {
  const written = place.textContent;
  const [, opening, tex] = DELIMITERS.exec(written);
  const displayMode = ["$$", "\\["].includes(opening);
  const made = element("span");
  try {
    library.render(tex, made, { ...LIMITS, displayMode });
    place.replaceChildren(globalThis.DOMPurify.sanitize(made.firstChild, ALLOWED));
  } catch {
    return; // no TeX, or none that the library knows
  }
  place.className = displayMode ? "formula display" : "formula";
}
