// Create elements and format numbers. Input from users and servers becomes text, never HTML.

/** A new element. `options`: class, title, and attributes by name; children: elements or text. */
export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A dictionary without Object's own properties, for untrusted names. */
export const named = (words) => Object.assign(Object.create(null), words);

export const byId = (id) => document.getElementById(id);

/** A button with a click handler. */
export function button(words, act, options = {}) {
  const made = element("button", { type: "button", ...options }, words);
  made.addEventListener("click", () => act(made));
  return made;
}

/** A button that copies the result of `text` and reports it. */
export function copyButton(text) {
  return button("Copy", async (made) => {
    made.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // The clipboard API needs HTTPS or localhost; elsewhere use execCommand.
    const field = element("textarea", { class: "unseen" });
    field.value = text;
    document.body.append(field);
    const before = document.activeElement;
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}

export function milliseconds(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 100 ? number(ms) : ms >= 1 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function duration(seconds) {
  for (const [name, length] of [["days", 86400], ["hours", 3600], ["minutes", 60]])
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${name}`;
  return `${Math.floor(seconds)} s`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) [count, unit] = [count / 1024, unit + 1];
  return `${count >= 100 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

export const number = (value) => Math.round(value).toLocaleString("en");

export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");

/** A stacked bar. parts: [class, fraction, title]. */
export function bar(parts) {
  const made = element("div", { class: "bar" });
  for (const [name, share, words] of parts) {
    const part = element("span", { class: name, title: words });
    part.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
    made.append(part);
  }
  return made;
}
