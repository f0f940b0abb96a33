// The same agent in another language: the row comes by standard input, the model's address by the environment, and
// the last line is the result.
const row = JSON.parse(require("fs").readFileSync(0, "utf8"));
const headers = { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" };
const body = JSON.stringify({ model: "policy", messages: [{ role: "user", content: row.prompt }] });

fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, { method: "POST", headers, body })
  .then((response) => response.json())
  .then((answer) => {
    const said = answer.choices[0].message.content.split("}").pop().trim();
    console.log(JSON.stringify({ reward: Number(said === row.answer) }));
  });
