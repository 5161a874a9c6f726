// The API, drawn from /openapi.json: every route with its fields, its answer and its errors.

import { byId, element, fill } from "./dom.js";

const DEPTH = 3; // levels of members that are shown; a schema may hold itself

/** A schema's type in words: "integer or null", "list of string", 'one of "a", "b"'. */
function typeOf(schema = {}) {
  const parts = schema.anyOf ?? schema.oneOf;
  if (parts) return [...new Set(parts.map(typeOf))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return `one of ${schema.enum.map((value) => JSON.stringify(value)).join(", ")}`;
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return Array.isArray(schema.type) ? schema.type.join(" or ") : schema.type ?? "any";
}

const LIMITS = {
  minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<",
  minLength: "characters ≥", maxLength: "characters ≤", minItems: "items ≥", maxItems: "items ≤",
};

/** What values are allowed beyond the type, and what the field is. */
function notesOf(schema) {
  const parts = [schema, ...(schema.anyOf ?? [])];
  const limits = parts.flatMap((part) =>
    Object.entries(LIMITS).filter(([key]) => key in part).map(([key, sign]) => `${sign} ${part[key]}`),
  );
  const found = parts.find((part) => part.description);
  const standard = "default" in schema && schema.default !== null;
  if (standard) limits.push(`default ${JSON.stringify(schema.default)}`);
  return [found?.description ?? "", limits.join(", ")].filter(Boolean).join("; ");
}

/** One row a field, members of objects and of lists of objects below their field. */
function rowsOf(schema, prefix = "", depth = 1) {
  const shapes = [schema, ...(schema.anyOf ?? []), ...(schema.oneOf ?? [])];
  const rows = [];
  const seen = new Set();
  for (const shape of shapes) {
    for (const [name, field] of Object.entries(shape.properties ?? {})) {
      if (seen.has(name)) continue;
      seen.add(name);
      const required = (shape.required ?? []).includes(name);
      rows.push({ name: prefix + name, type: typeOf(field), required, notes: notesOf(field) });
      if (depth === DEPTH) continue;
      const inner = [field, ...(field.anyOf ?? [])];
      for (const part of inner) {
        if (part.properties) rows.push(...rowsOf(part, `${prefix}${name}.`, depth + 1));
        if (part.items) rows.push(...rowsOf(part.items, `${prefix}${name}[].`, depth + 1));
      }
    }
  }
  return rows;
}

function fields(title, schema, mustBe) {
  const rows = rowsOf(schema);
  if (!rows.length) return [element("p", { class: "note" }, `${title}: ${typeOf(schema)}`)];
  const table = element("table", { class: "cards", role: "table", "aria-label": title });
  const columns = [
    { title: "field", of: (row) => row.name },
    { title: "type", text: true, of: (row) => row.type },
    { title: mustBe, text: true, of: (row) => (row.required ? "yes" : "") },
    { title: "about", text: true, of: (row) => row.notes },
  ];
  fill(table, columns, rows, "");
  return [element("details", {}, element("summary", {}, `${title} (${rows.length} fields)`), table)];
}

const JSON_TYPE = "application/json";

function operation(path, method, told) {
  const id = `${method}-${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;
  const body = told.requestBody?.content?.[JSON_TYPE]?.schema;
  const answer = told.responses?.["200"]?.content?.[JSON_TYPE]?.schema;
  const heading = `${method.toUpperCase()} ${path}`;
  const errors = Object.entries(told.responses ?? {}).filter(([status]) => status !== "200");
  const section = element(
    "section",
    { id, "aria-labelledby": `${id}-title`, tabindex: "-1" },
    element("h2", { id: `${id}-title` }, heading),
    element("p", {}, told.summary ?? "", told.security ? " (wants a key)" : ""),
    ...(body ? fields("Body", body, "required") : []),
    ...(answer ? fields("Answer", answer, "always there") : []),
    element(
      "details",
      {},
      element("summary", {}, "Errors"),
      element("ul", {}, ...errors.map(([status, { description }]) => element("li", {}, `${status}: ${description}`))),
    ),
  );
  return [section, element("li", {}, element("a", { href: `#${id}` }, heading))];
}

const response = await fetch("openapi.json");
const state = byId("state");
if (response.ok) {
  const api = await response.json();
  const made = Object.entries(api.paths).flatMap(([path, operations]) =>
    Object.entries(operations).map(([method, told]) => operation(path, method, told)),
  );
  byId("version").textContent = api.info.version;
  byId("operations").replaceChildren(...made.map(([section]) => section));
  byId("routes").replaceChildren(...made.map(([, link]) => link));
  state.textContent = `${made.length} routes`;
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
} else {
  state.textContent = `/openapi.json answered ${response.status}`;
  state.className = "bad";
}
