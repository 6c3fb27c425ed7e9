// The user's settings: the model, the system prompt, sampling, the response format. Each field is
// validated before it is sent, and saved in this browser.

import { byId, element, number } from "./dom.js";

const STORE = "saccade-settings";

/** By the field's id: the type of its value, and what it adds to a request. */
const FIELDS = {
  system: ["A text", () => ({})], // a message, and no field
  temperature: ["A number", (value) => ({ temperature: Number(value) })],
  "top-p": ["A number", (value) => ({ top_p: Number(value) })],
  "max-tokens": ["A whole number", (value) => ({ max_tokens: Number(value) })],
  seed: ["A whole number", (value) => ({ seed: Number(value) })],
  schema: ["A JSON schema", (value) => ({ response_format: answerFormat(JSON.parse(value)) })],
};
const NAMES = Object.keys(FIELDS);

const answerFormat = (schema) => ({ type: "json_schema", json_schema: { name: "answer", schema } });

export class Settings {
  constructor() {
    const kept = readStored();
    for (const name of NAMES) {
      if (typeof kept[name] === "string") byId(name).value = kept[name];
      byId(name).addEventListener("input", () => {
        check(name);
        this.#keep();
      });
    }
    this.wanted = kept.models; // the model that the user chose, also while it is not there
    this.offered = "";
    byId("models").addEventListener("change", ({ target }) => {
      this.wanted = target.value;
      this.#keep();
    });
    byId("more").addEventListener("click", () => this.open(byId("options").hidden));
  }

  open(yes) {
    byId("options").hidden = !yes;
    byId("more").setAttribute("aria-expanded", yes);
  }

  /** The maximum length of an answer. */
  limit(contextLength) {
    if (contextLength) byId("max-tokens").max = contextLength;
  }

  /** Show the models and adapters, {id, parent}, as a list if there are several. */
  offer(models) {
    const offered = JSON.stringify(models);
    if (offered === this.offered) return; // a list that somebody may have open
    this.offered = offered;
    const [choice, label] = [byId("models"), byId("model")];
    const options = (wanted) =>
      models.filter(wanted).map(({ id }) => element("option", { value: id }, id));
    const adapters = options(({ parent }) => parent);
    choice.replaceChildren(...options(({ parent }) => !parent));
    if (adapters.length)
      choice.append(element("optgroup", { label: "Adapters" }, ...adapters));
    if (models.some(({ id }) => id === this.wanted)) choice.value = this.wanted;
    choice.hidden = models.length < 2;
    label.hidden = !choice.hidden;
  }

  /** Whether all fields are valid; shows an error at each one that is not. */
  check() {
    const wrong = NAMES.filter((name) => !check(name));
    if (!wrong.length) return true;
    this.open(true);
    byId(wrong[0]).focus();
    return false;
  }

  /** The fields of a request; empty ones are left to the server's defaults. */
  body() {
    const body = this.model;
    for (const name of NAMES) {
      const value = byId(name).value.trim();
      if (value) Object.assign(body, FIELDS[name][1](value));
    }
    return body;
  }

  /** The selected model, as a field. */
  get model() {
    return byId("models").hidden ? {} : { model: byId("models").value };
  }

  get system() {
    return byId("system").value.trim();
  }

  #keep() {
    const values = Object.fromEntries(NAMES.map((name) => [name, byId(name).value]));
    localStorage.setItem(STORE, JSON.stringify({ ...values, models: this.wanted }));
  }
}

function check(name) {
  const field = byId(name);
  if (name === "schema") field.setCustomValidity(schemaFault(field.value.trim()));
  const right = field.validity.valid;
  field.setAttribute("aria-invalid", !right);
  const wrong = byId(`${name}-wrong`);
  if (wrong) wrong.textContent = right ? "" : words(field, FIELDS[name][0]);
  return right;
}

/** The error of an invalid schema, or "". */
function schemaFault(text) {
  if (!text) return "";
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? "" : "not an object";
  } catch (error) {
    return error.message;
  }
}

function words(field, kind) {
  const { min, max, validity, validationMessage } = field;
  if (validity.customError) return `${kind} is a JSON object: ${validationMessage}`;
  if (!min) return kind;
  return max ? `${kind} from ${min} to ${number(max)}` : `${kind} of at least ${min}`;
}

function readStored() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}
