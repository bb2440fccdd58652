// Submits a chat request with nothing but an AMQP library and JSON, and prints what comes back.
//
//   npm ci
//   AMQP_URL=amqp://guest:guest@localhost:5672/ node index.mjs "What is the capital of Japan?"
//
// Workers must be running: headrace worker all --model demo

import { randomUUID } from "node:crypto";
import amqp from "amqplib";

const exchange = "headrace.topics";
const url = process.env.AMQP_URL ?? "amqp://guest:guest@localhost:5672/";
const model = process.env.MODEL ?? "demo";
const client = process.env.CLIENT ?? "node-example";
const seconds = Number(process.env.SECONDS ?? 60);
const say = process.argv[2] ?? "What is the capital of Japan?";

const job = {
  type: "render",
  client,
  request_id: randomUUID(),
  model,
  endpoint: "/v1/chat/completions",
  body: { messages: [{ role: "user", content: say }], temperature: 0 },
};

const connection = await amqp.connect(url);
const channel = await connection.createConfirmChannel();

const answered = new Promise((resolve, reject) => {
  setTimeout(() => reject(new Error(`no answer after ${seconds} seconds`)), seconds * 1000).unref();
  // A mandatory message that no queue takes comes back: nobody serves the model.
  channel.on("return", () => reject(new Error(`no worker serves '${model}'`)));
  let expected = 0;

  // Chunks come at least once and carry a seq: what was seen is left out.
  const hear = (event) => {
    if (event.request_id !== job.request_id) return;
    if (event.type === "chunk" && event.seq === expected) {
      expected += 1;
      for (const { delta } of event.chunk.choices) {
        process.stdout.write((delta.reasoning ?? "") + (delta.content ?? ""));
      }
    } else if (event.type === "final") {
      resolve(event.response);
    } else if (event.type === "error") {
      reject(new Error(event.error.message));
    }
  };

  // A queue of our own that hears everything told to this client. It exists before we submit, so nothing is missed.
  const start = async () => {
    await channel.assertExchange(exchange, "topic", { durable: true });
    const limits = { "x-max-length": 10000, "x-overflow": "drop-head" };
    const { queue } = await channel.assertQueue("", { exclusive: true, arguments: limits });
    await channel.bindQueue(queue, exchange, `${client}.#`);
    // One message is one event, or a pack of several.
    await channel.consume(queue, (message) => {
      if (message === null) return reject(new Error("the queue is gone"));
      const told = JSON.parse(message.content.toString());
      (told.type === "pack" ? told.events : [told]).forEach(hear);
      channel.ack(message);
    });
    channel.publish("", `render.${model}`, Buffer.from(JSON.stringify(job)), {
      persistent: true,
      mandatory: true,
      contentType: "application/json",
      correlationId: job.request_id,
      messageId: randomUUID(),
    });
    await channel.waitForConfirms();
  };
  start().catch(reject);
});

try {
  const response = await answered;
  console.log(`\n---\n${response.choices[0].message.content ?? ""}`);
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  await connection.close();
}
