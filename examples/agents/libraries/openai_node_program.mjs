// OpenAI's SDK in Node: its own loop over tools (`runTools`), each answer in pieces.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

// The package lies in the folder that the program is started in, and not beside this file.
const OpenAI = createRequire(`${process.cwd()}/program.cjs`)("openai").OpenAI;
const row = JSON.parse(readFileSync(0, "utf8"));
const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const add = { name: "add", description: "Add numbers.", parameters, parse: JSON.parse, function: ({ a, b }) => `${a + b}` };
const messages = [
  { role: "system", content: "You add numbers." },
  { role: "user", content: `What is ${row.prompt}` },
];
const tools = [{ type: "function", function: add }];
const running = new OpenAI().chat.completions.runTools({ model: "policy", messages, tools, stream: true });
console.log(JSON.stringify({ answer: (await running.finalContent()) ?? "" }));
