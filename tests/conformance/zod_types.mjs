// Writes tests/api/zod_types.json: what zod writes as JSON schemas, with a value of each.
//   npm install zod@4.6.7 && node zod_types.mjs > ../api/zod_types.json
import { z } from "zod";

const person = z.object({ name: z.string(), age: z.number().int() });
const tree = z.object({ value: z.string(), get children() { return z.array(tree); } });
const Color = z.enum(["red", "green"]);
const TYPES = `
z.string() | "a"
z.string().min(1) | "a"
z.string().max(5) | "a"
z.string().length(2) | "ab"
z.string().nonempty() | "a"
z.string().regex(/^[a-z]+$/) | "abc"
z.string().startsWith("ab") | "abc"
z.string().endsWith("yz") | "xyz"
z.string().includes("b") | "abc"
z.string().uppercase() | "ABC"
z.string().lowercase() | "abc"
z.string().trim() | "a"
z.string().toLowerCase() | "a"
z.email() | "ada@example.org"
z.uuid() | "123e4567-e89b-42d3-a456-426614174000"
z.uuidv4() | "123e4567-e89b-42d3-a456-426614174000"
z.guid() | "123e4567-e89b-42d3-a456-426614174000"
z.url() | "https://example.org/a"
z.httpUrl() | "https://example.org/a"
z.hostname() | "example.org"
z.emoji() | "😀"
z.base64() | "aGk="
z.base64url() | "aGk"
z.hex() | "00ff"
z.jwt() | "eyJhbGciOiJIUzI1NiJ9.e30.c2ln"
z.nanoid() | "V1StGXR8_Z5jdHi6B-myT"
z.cuid() | "cjld2cjxh0000qzrmn831i7rn"
z.cuid2() | "tz4a98xxat96iws9zmbrgj3a"
z.ulid() | "01ARZ3NDEKTSV4RRFFQ69G5FAV"
z.xid() | "9m4e2mr0ui3e8a215n4g"
z.ksuid() | "0ujtsYcgvSTl8PAuAdqWYSMnLOv"
z.ipv4() | "10.0.0.1"
z.ipv6() | "::1"
z.mac() | "00:1a:2b:3c:4d:5e"
z.cidrv4() | "10.0.0.0/8"
z.cidrv6() | "fe80::/10"
z.e164() | "+491701234567"
z.hash("sha256") | "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
z.iso.date() | "2026-01-31"
z.iso.time() | "12:30:00"
z.iso.datetime() | "2026-01-31T12:30:00Z"
z.iso.datetime({ offset: true }) | "2026-01-31T12:30:00+01:00"
z.iso.duration() | "P1DT2H"
z.templateLiteral(["v", z.number()]) | "v1"
z.number() | 1.5
z.number().min(0) | 1
z.number().max(10) | 1
z.number().gt(0) | 1
z.number().lt(10) | 1
z.number().positive() | 1
z.number().nonnegative() | 0
z.number().negative() | -1
z.number().multipleOf(5) | 10
z.number().step(0.5) | 1.5
z.number().int() | 3
z.int() | 3
z.int32() | 3
z.uint32() | 3
z.float32() | 1.5
z.float64() | 1.5
z.boolean() | true
z.null() | null
z.any() | {"a": 1}
z.unknown() | [1]
z.literal("a") | "a"
z.literal(["a", "b"]) | "b"
z.literal(1) | 1
z.enum(["a", "b"]) | "b"
z.nullable(z.string()) | null
z.string().nullish() | "a"
z.array(z.string()) | ["a", "b"]
z.array(z.number()).min(1) | [1]
z.array(z.number()).max(2) | [1]
z.array(z.number()).length(2) | [1, 2]
z.array(person) | [{"name": "Ada", "age": 36}]
z.tuple([z.string(), z.number()]) | ["a", 1]
z.tuple([z.string()], z.number()) | ["a", 1, 2]
z.object({}) | {}
person | {"name": "Ada", "age": 36}
person.partial() | {"age": 36}
person.required() | {"name": "Ada", "age": 36}
person.pick({ name: true }) | {"name": "Ada"}
person.omit({ name: true }) | {"age": 36}
person.extend({ at: z.iso.date() }) | {"name": "Ada", "age": 36, "at": "2026-01-31"}
z.strictObject({ a: z.string() }) | {"a": "b"}
z.looseObject({ a: z.string() }) | {"a": "b", "c": 1}
z.object({ a: z.string() }).catchall(z.number()) | {"a": "b", "c": 1}
z.object({ a: z.string().optional() }) | {}
z.object({ a: z.string().default("x") }) | {"a": "b"}
z.object({ a: z.string().describe("what") }) | {"a": "b"}
z.record(z.string(), z.number()) | {"a": 1}
z.record(z.enum(["a", "b"]), z.number()) | {"a": 1, "b": 2}
z.partialRecord(z.enum(["a", "b"]), z.number()) | {"b": 2}
z.record(z.string().regex(/^x_/), z.number()) | {"x_a": 1}
z.record(z.string().min(2), z.number()) | {"ab": 1}
z.record(Color, person) | {"red": {"name": "Ada", "age": 36}, "green": {"name": "Bo", "age": 3}}
z.union([z.string(), z.number()]) | 1
z.xor([z.string(), z.number()]) | 1
z.discriminatedUnion("t", [z.object({ t: z.literal("a"), n: z.number() }), z.object({ t: z.literal("b") })]) | {"t": "b"}
z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })) | {"a": "x", "b": 1}
z.lazy(() => person) | {"name": "Ada", "age": 36}
tree | {"value": "a", "children": [{"value": "b", "children": []}]}
z.json() | {"a": [1, null]}
z.string().readonly() | "a"
z.string().brand("Name") | "a"
z.string().catch("a") | "a"
z.never() | null
z.set(z.string()) | ["a"]
z.date() | "2026-01-31"
z.string().refine((s) => s.length > 1) | "ab"
`;

const rows = [];
for (const line of TYPES.trim().split("\n")) {
  const [code, value] = line.split(" | ");
  try {
    const { $schema, ...schema } = z.toJSONSchema(eval(code));
    rows.push({ type: code, schema, value: JSON.parse(value) });
  } catch (error) {
    process.stderr.write(`${code}: ${error.message}\n`);
  }
}
process.stdout.write(`[\n${rows.map((row) => JSON.stringify(row)).join(",\n")}\n]\n`);
