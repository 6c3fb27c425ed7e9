// Formulas: TeX between dollars or brackets becomes MathML, which browsers draw themselves. The
// library is fetched once a formula is to be shown. What it cannot read stays as it was written.

import { element } from "./dom.js";

const LONGEST = 4000; // characters of a formula
const MOST = 300; // formulas of a text

const LIMITS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [40, 40] };
const ALLOWED = {
  USE_PROFILES: { mathMl: true },
  ADD_ATTR: ["style"], // set by the library, property by property; the page's policy drops others
  IN_PLACE: true,
};

// As pandoc has it: "$5 and $10" is money.
const INLINE = [
  /^\$\$((?:\\[\s\S]|[^\\$])+)\$\$/,
  /^\$(?![\s$])((?:\\.|[^\\$\n`])+?)(?<!\s)\$(?!\d)/,
  /^\\\(([\s\S]+?)\\\)/,
  /^\\\[([\s\S]+?)\\\]/,
];
const BLOCK = [/^ {0,3}\$\$([\s\S]+?)\$\$[ \t]*(?:\n|$)/, /^ {0,3}\\\[([\s\S]+?)\\\][ \t]*(?:\n|$)/];

function token(type, patterns, source) {
  const match = patterns.map((pattern) => pattern.exec(source)).find(Boolean);
  if (!match || match[1].length > LONGEST) return undefined;
  return { type, raw: match[0], tex: match[0].trim() };
}

const text = (words) =>
  words.replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);

/** What marked needs to find formulas: each becomes a <var> that holds it as it was written. */
export const extensions = [
  {
    name: "formula",
    level: "inline",
    start: (source) => source.search(/\$|\\[([]/),
    tokenizer: (source) => token("formula", INLINE, source),
    renderer: ({ tex }) => `<var>${text(tex)}</var>`,
  },
  {
    name: "formulaBlock",
    level: "block",
    start: (source) => source.search(/^ {0,3}(?:\$\$|\\\[)/m),
    tokenizer: (source) => token("formulaBlock", BLOCK, source),
    renderer: ({ tex }) => `<p><var>${text(tex)}</var></p>\n`,
  },
];

/** A line of "=" in a formula makes no heading of what stands above. */
export function lheading(source) {
  const above = source.slice(0, source.search(/\n {0,3}(?:=+|-+)[ \t]*(?:\n|$)/) + 1);
  return /^ {0,3}(?:\$\$|\\\[)/m.test(above) ? undefined : false;
}

let library = null; // once it is there
let fetching = null;

/** Show the formulas below an element: at once if the library is there, else as soon as it is. */
export function showFormulas(root) {
  const found = [...root.querySelectorAll("var")].slice(0, MOST);
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
  } catch {
    return; // no TeX, or none that the library knows
  }
  const math = globalThis.DOMPurify.sanitize(made.firstChild, ALLOWED);
  place.replaceChildren(math);
  place.className = displayMode ? "formula display" : "formula";
}
