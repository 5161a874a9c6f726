// Writes the schemas of tests/api/zod_types.json anew, as zod writes them: a row is a type, its schema and
// a value of it. A row of a new type needs no schema before.
//   npm install zod@4.6.7 && node zod_types.mjs
import { readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

const person = z.object({ name: z.string(), age: z.number().int() });
const tree = z.object({ value: z.string(), get children() { return z.array(tree); } });
const Color = z.enum(["red", "green"]);
const file = new URL("../api/zod_types.json", import.meta.url);

const rows = JSON.parse(readFileSync(file, "utf8")).map(({ type, value }) => {
  const { $schema, ...schema } = z.toJSONSchema(eval(type));
  return JSON.stringify({ type, schema, value });
});
writeFileSync(file, `[\n${rows.join(",\n")}\n]\n`);
