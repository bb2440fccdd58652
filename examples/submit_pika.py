"""Submits a chat request with nothing but an AMQP library and JSON, and prints what comes back.

    pip install pika
    python submit_pika.py "What is the capital of Japan?" --url amqp://guest:guest@localhost:5672/

Workers must be running: headrace worker all --model demo
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

EXCHANGE = "headrace.topics"


def listen(channel: BlockingChannel, client: str) -> str:
    """A queue of our own that hears everything told to this client. It exists before we submit: nothing is missed."""
    channel.exchange_declare(EXCHANGE, exchange_type="topic", durable=True)
    declared = channel.queue_declare("", exclusive=True, arguments={"x-max-length": 10_000, "x-overflow": "drop-head"})
    queue: str = declared.method.queue
    channel.queue_bind(queue, EXCHANGE, routing_key=f"{client}.#")
    return queue


def submit(channel: BlockingChannel, job: dict[str, Any]) -> None:
    """Returns once the broker has the job on disk. Raises UnroutableError if nobody serves the model."""
    channel.confirm_delivery()
    properties = pika.BasicProperties(
        content_type="application/json",
        delivery_mode=pika.DeliveryMode.Persistent,
        correlation_id=job["request_id"],
        message_id=str(uuid.uuid4()),
    )
    channel.basic_publish("", f"render.{job['model']}", json.dumps(job).encode(), properties, mandatory=True)


def events(channel: BlockingChannel, queue: str, request_id: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The events of our request as they come. One message is one event, or a pack of several."""
    until = time.monotonic() + seconds
    for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
        if time.monotonic() > until:
            raise TimeoutError(f"no answer after {seconds:g} seconds")
        if method is None:
            continue
        told = json.loads(body)
        for event in told["events"] if told["type"] == "pack" else [told]:
            if event["request_id"] == request_id:
                yield event
        channel.basic_ack(method.delivery_tag)


def print_stream(told: Iterator[dict[str, Any]]) -> int:
    """Prints text as it comes. Chunks come at least once and carry a seq: what was seen is left out."""
    expected = 0
    for event in told:
        if event["type"] == "chunk" and event["seq"] == expected:
            expected += 1
            for choice in event["chunk"]["choices"]:
                delta = choice["delta"]
                print(delta.get("reasoning") or "", delta.get("content") or "", sep="", end="", flush=True)
        elif event["type"] == "final":
            print("\n---")
            print(event["response"]["choices"][0]["message"]["content"] or "")
            return 0
        elif event["type"] == "error":
            print(event["error"]["message"], file=sys.stderr)
            return 1
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Submit one chat request over AMQP.")
    parser.add_argument("say", nargs="?", default="What is the capital of Japan?")
    parser.add_argument("--url", default="amqp://guest:guest@localhost:5672/")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--client", default="pika-example")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to wait for the answer")
    asked = parser.parse_args()

    request_id = str(uuid.uuid4())
    job = {
        "type": "render",
        "client": asked.client,
        "request_id": request_id,
        "model": asked.model,
        "endpoint": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": asked.say}], "temperature": 0},
    }
    with pika.BlockingConnection(pika.URLParameters(asked.url)) as connection:
        channel = connection.channel()
        queue = listen(channel, asked.client)
        try:
            submit(channel, job)
            return print_stream(events(channel, queue, request_id, asked.seconds))
        except pika.exceptions.UnroutableError:
            print(f"no worker serves {asked.model!r}", file=sys.stderr)
        except TimeoutError as error:
            print(error, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
