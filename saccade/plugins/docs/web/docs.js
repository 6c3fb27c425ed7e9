// Shows openapi.json: operations by tag, their fields, a curl command, and requests by GET.
// Whatever a server says becomes text, never HTML.

const METHODS = ["get", "post", "put", "patch", "delete"];
let schemas = {};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function button(words, act) {
  const made = element("button", { type: "button" }, words);
  made.addEventListener("click", () => act(made));
  return made;
}

/** A <details> whose content is made when it is first opened: schemas may contain themselves. */
function folded(summary, content, attributes = {}) {
  const made = element("details", attributes, element("summary", {}, ...summary));
  made.addEventListener("toggle", () => made.append(...content()), { once: true });
  return made;
}

// ---- schemas

const nameOf = (reference) => reference.split("/").at(-1);
const follow = (schema) => (schema.$ref ? schemas[nameOf(schema.$ref)] : schema) ?? {};
const choicesOf = (schema) => schema.anyOf ?? schema.oneOf ?? [];

/** A schema's type in a line: `string or null`, `list of ToolCall`. */
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (choicesOf(schema).length) return [...new Set(choicesOf(schema).map(typeOf))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return [schema.type ?? "anything"].flat().join(" or ");
}

/** False for bounds of 64-bit integers, which say nothing. */
const bounds = (value) => Math.abs(value) <= Number.MAX_SAFE_INTEGER;

/** What bounds a schema, and its default. */
function notesOf(schema) {
  const notes = [];
  for (const each of [schema, ...choicesOf(schema)]) {
    if (bounds(each.minimum)) notes.push(`at least ${each.minimum}`);
    if (bounds(each.maximum)) notes.push(`at most ${each.maximum}`);
    if ("maxItems" in each) notes.push(`at most ${each.maxItems} items`);
    if ("maxLength" in each) notes.push(`at most ${each.maxLength} characters`);
  }
  if (schema.default !== undefined && schema.default !== null)
    notes.push(`default ${JSON.stringify(schema.default)}`);
  return notes.join(", ");
}

/** The schemas with fields in a schema. */
function objectsIn(schema) {
  const found = follow(schema);
  if (found.properties) return [found];
  return [...choicesOf(found), found.items ?? [], found.allOf ?? []].flat().flatMap(objectsIn);
}

function fieldOf(name, schema, required) {
  const notes = [typeOf(schema), required ? "required" : "", notesOf(schema)].filter(Boolean);
  const made = element("li", {}, element("code", {}, name), " ");
  made.append(element("span", { class: "soft" }, notes.join(", ")));
  const described = schema.description ?? follow(schema).description;
  if (described) made.append(element("div", {}, described));
  const objects = objectsIn(schema);
  if (objects.length) made.append(folded(["Fields"], () => objects.map(fieldsOf)));
  return made;
}

/** The fields of an object, those that a request must have first. */
function fieldsOf(schema) {
  const required = new Set(schema.required);
  const names = Object.keys(schema.properties);
  names.sort((one, other) => required.has(other) - required.has(one));
  const rows = names.map((name) => fieldOf(name, schema.properties[name], required.has(name)));
  return element("ul", { class: "fields" }, ...rows);
}

function schemaView(title, schema) {
  const objects = objectsIn(schema);
  const shown = objects.length ? objects.map(fieldsOf) : [element("p", {}, typeOf(schema))];
  return [element("h3", {}, title), ...shown];
}

/** A value that a schema accepts, of the fields that it requires. */
function sampleOf(schema) {
  const found = follow(schema);
  if (found.default !== undefined && found.default !== null) return found.default;
  if ("const" in found) return found.const;
  if (found.enum) return found.enum[0];
  if (choicesOf(found).length) return sampleOf(choicesOf(found)[0]);
  if (found.properties) {
    const required = found.required ?? [];
    return Object.fromEntries(required.map((name) => [name, sampleOf(found.properties[name])]));
  }
  const samples = { array: [], boolean: false, integer: 1, number: 1, string: "...", null: null };
  return samples[found.type] ?? {};
}

// ---- operations

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curlOf(path, method, operation) {
  const server = new URL(".", location.href).href.replace(/\/$/, "");
  const parts = [`curl ${quoted(server + path)}`];
  if (method !== "get") parts[0] += ` -X ${method.toUpperCase()}`;
  parts.push('-H "Authorization: Bearer $SACCADE_API_KEY"');
  for (const [type, body] of Object.entries(operation.requestBody?.content ?? {})) {
    const example = body.example ?? sampleOf(body.schema);
    if (type === "application/json") {
      parts.push(`-H ${quoted(`Content-Type: ${type}`)}`, `-d ${quoted(JSON.stringify(example))}`);
    } else {
      for (const [name, value] of Object.entries(example))
        parts.push(`-F ${quoted(name === "file" ? "file=@FILE" : `${name}=${value}`)}`);
    }
    break;
  }
  return parts.join(" \\\n  ");
}

function curlView(path, method, operation) {
  const command = curlOf(path, method, operation);
  const copy = button("Copy", async (made) => {
    try {
      await navigator.clipboard.writeText(command);
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not copied";
    }
  });
  const shown = element("pre", { class: "curl" }, command);
  return [element("h3", {}, "curl ", copy), shown];
}

/** A form that sends a GET request, with a field for each part of the path. */
function tryView(path) {
  const inputs = [...path.matchAll(/{(\w+)(?::\w+)?}/g)].map(([part, name]) => {
    const field = element("input", { placeholder: name, "aria-label": name, required: "" });
    return [part, field];
  });
  const shown = element("pre", { class: "answer", hidden: "" });
  const send = element("button", { type: "submit" }, "Send");
  const form = element("form", {}, ...inputs.map(([, field]) => field), send);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let target = path.slice(1);
    for (const [part, field] of inputs)
      target = target.replace(part, () => encodeURIComponent(field.value));
    shown.hidden = false;
    try {
      const answer = await fetch(target);
      shown.textContent = `${answer.status} ${answer.statusText}\n\n${readable(await answer.text())}`;
    } catch (error) {
      shown.textContent = String(error);
    }
  });
  return [element("h3", {}, "Try it"), form, shown];
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function operationView(path, method, operation) {
  const content = [];
  if (operation.description) content.push(element("p", {}, operation.description));
  if (operation.parameters?.length) {
    const rows = operation.parameters.map((each) =>
      fieldOf(each.name, { description: each.description, ...each.schema }, each.required));
    content.push(element("h3", {}, "Parameters"), element("ul", { class: "fields" }, ...rows));
  }
  content.push(...curlView(path, method, operation));
  if (method === "get") content.push(...tryView(path));
  for (const [type, body] of Object.entries(operation.requestBody?.content ?? {}))
    content.push(...schemaView(`Request (${type})`, body.schema));
  for (const [status, answer] of Object.entries(operation.responses))
    for (const [type, body] of Object.entries(answer.content ?? {}))
      content.push(...schemaView(`Response ${status} (${type})`, body.schema));
  return content;
}

function operationRow(path, method, operation) {
  const title = [element("span", { class: "method" }, method.toUpperCase()),
    element("code", {}, path), " ", element("span", { class: "soft" }, operation.summary ?? "")];
  const id = operation.operationId;
  const attributes = { class: "operation", id };
  return folded(title, () => operationView(path, method, operation), attributes);
}

/** Operations by their first tag, in the order of the document. */
function byTag(paths) {
  const tags = new Map();
  for (const [path, operations] of Object.entries(paths))
    for (const method of METHODS.filter((name) => name in operations)) {
      const tag = operations[method].tags?.[0] ?? "other";
      if (!tags.has(tag)) tags.set(tag, []);
      tags.get(tag).push(operationRow(path, method, operations[method]));
    }
  return tags;
}

function find(words) {
  for (const section of document.querySelectorAll("main section")) {
    for (const row of section.querySelectorAll(".operation"))
      row.hidden = !row.firstChild.textContent.toLowerCase().includes(words.toLowerCase());
    section.hidden = !section.querySelector(".operation:not([hidden])");
  }
}

async function show() {
  const main = document.getElementById("operations");
  try {
    const answer = await fetch("openapi.json");
    if (!answer.ok) throw new Error(`openapi.json: ${answer.status} ${await answer.text()}`);
    const description = await answer.json();
    schemas = description.components?.schemas ?? {};
    document.getElementById("about").textContent = description.info.description ?? "";
    const sections = [...byTag(description.paths)].map(([tag, rows]) =>
      element("section", {}, element("h2", {}, tag), ...rows));
    main.replaceChildren(...sections);
  } catch (error) {
    main.replaceChildren(element("p", { class: "error" }, String(error)));
  }
  main.removeAttribute("aria-busy");
  const linked = document.getElementById(location.hash.slice(1));
  if (linked instanceof HTMLDetailsElement) {
    linked.open = true;
    linked.scrollIntoView();
  }
}

document.getElementById("find").addEventListener("input", (event) => find(event.target.value));
show();
