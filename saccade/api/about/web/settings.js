// What the user sets beside the question: the model, the system prompt, temperature and length.
// Checked here, field by field, before anything is sent; kept in this browser.

import { byId, element, number } from "./dom.js";

const STORE = "saccade-settings";
const FIELDS = ["system", "temperature", "max-tokens"];
const NUMBERS = { temperature: "A number", "max-tokens": "A whole number" };

export class Settings {
  constructor() {
    const kept = readStored();
    for (const name of FIELDS) {
      if (typeof kept[name] === "string") byId(name).value = kept[name];
      byId(name).addEventListener("input", () => {
        if (name in NUMBERS) check(name);
        localStorage.setItem(STORE, JSON.stringify(values()));
      });
    }
    byId("more").addEventListener("click", () => this.open(byId("options").hidden));
  }

  open(yes) {
    byId("options").hidden = !yes;
    byId("more").setAttribute("aria-expanded", yes);
  }

  /** The most tokens that an answer may have here. */
  limit(contextLength) {
    if (contextLength) byId("max-tokens").max = contextLength;
  }

  /** The models that there are: a choice where there are several. */
  offer(names) {
    const [choice, label] = [byId("models"), byId("model")];
    choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    choice.hidden = names.length < 2;
    label.hidden = !choice.hidden;
  }

  /** Whether all can be sent; a field that cannot is shown, and why. */
  check() {
    const wrong = Object.keys(NUMBERS).filter((name) => !check(name));
    if (!wrong.length) return true;
    this.open(true);
    byId(wrong[0]).focus();
    return false;
  }

  /** As the server's fields; without what is left to the server. */
  body() {
    const { system: _, temperature, "max-tokens": length } = values();
    const body = {};
    if (!byId("models").hidden) body.model = byId("models").value;
    if (temperature) body.temperature = Number(temperature);
    if (length) body.max_tokens = Number(length);
    return body;
  }

  get system() {
    return byId("system").value.trim();
  }
}

const values = () => Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));

function check(name) {
  const field = byId(name);
  const right = field.validity.valid;
  field.setAttribute("aria-invalid", !right);
  byId(`${name}-wrong`).textContent = right ? "" : range(field, NUMBERS[name]);
  return right;
}

function range({ min, max }, kind) {
  return max ? `${kind} from ${min} to ${number(max)}` : `${kind} of at least ${min}`;
}

function readStored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}
