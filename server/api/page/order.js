// A request of the playground: its body, and the same request as curl and Python.

/** fields: what the form holds; turns: the messages of a chat before this one. Returns {path, body}; throws for a schema that is no JSON. */
export function orderOf(fields) {
  const shared = {
    model: fields.model,
    max_tokens: fields.maxTokens,
    temperature: fields.temperature,
    ...(fields.drafting ? { speculation: { drafter: fields.drafting } } : {}),
  };
  let schema = null;
  if (fields.schema.trim()) {
    try {
      schema = JSON.parse(fields.schema);
    } catch (error) {
      throw new Error(`The schema is no JSON: ${error.message}`);
    }
  }
  if (fields.kind === "chat") {
    const format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return {
      path: "v1/chat/completions",
      body: {
        ...shared,
        messages: [...fields.turns, { role: "user", content: fields.prompt }],
        ...(schema ? { response_format: format } : {}),
      },
    };
  }
  return {
    path: "v1/completions",
    body: {
      ...shared,
      prompt: fields.prompt,
      ...(schema ? { structured_outputs: { json: schema } } : {}),
    },
  };
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A command line for a shell. base: the server's address, with its last slash. */
export function asCurl({ path, body }, base, needsKey) {
  const key = needsKey ? ' \\\n  -H "authorization: Bearer $TAILOR_API_KEY"' : "";
  return (
    `curl ${base}${path} -H 'content-type: application/json'${key} \\\n` +
    `  -d ${quoted(JSON.stringify(body))}\n`
  );
}

const python = (value, indent = "") => {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map((v) => python(v, indent)).join(", ")}]`;
  if (typeof value === "object") {
    const members = Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v, inner)}`);
    return `{${members.join(", ")}}`;
  }
  return JSON.stringify(value);
};

/** The same with the openai package. Fields that are not OpenAI's go into extra_body. */
export function asPython({ path, body }, base, needsKey) {
  const { speculation, structured_outputs: outputs, ...known } = body;
  const extra = { ...(speculation ? { speculation } : {}), ...(outputs ? { structured_outputs: outputs } : {}) };
  const chat = path.includes("chat");
  const lines = [
    ...Object.entries(known).map(([name, value]) => `    ${name}=${python(value)},`),
    ...(Object.keys(extra).length ? [`    extra_body=${python(extra)},`] : []),
  ];
  const key = needsKey ? 'os.environ["TAILOR_API_KEY"]' : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}v1", api_key=${key})`,
    `answer = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    ")",
    `print(answer.choices[0].${chat ? "message.content" : "text"})`,
    "",
  ].join("\n");
}
