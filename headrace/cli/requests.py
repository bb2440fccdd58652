"""One request by hand: ``headrace submit | tail | result | cancel``."""

from __future__ import annotations

import asyncio
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from headrace.cli.running import log_to_stderr, model_options, run, settings, signals, spec_of

if TYPE_CHECKING:
    from headrace.client import Headrace
    from headrace.client.door import Body, Response
    from headrace.client.stream import Stream
    from headrace.settings import Settings
    from headrace.workers.models import ModelSpec

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")


@click.command()
@click.argument("body", type=click.File("rb"), required=False)
@click.option("--say", default=None, help="Text of one user message, in place of a BODY file.")
@click.option("--endpoint", type=click.Choice(_ENDPOINTS), default=_ENDPOINTS[0], show_default=True)
@click.option("--delivery", type=click.Choice(["stream", "final", "tokens"]), default="stream", show_default=True)
@click.option("--request-id", default=None, help="Sent again under the same id, a request runs once.")
@click.option("--deadline", type=float, default=None, help="Seconds from now.  [default: HEADRACE_DEADLINE]")
@click.option("--json", "as_json", is_flag=True, help="Print chunks and response as JSON lines.")
@click.option("--no-wait", is_flag=True, help="Print the request id and leave.")
@model_options
def submit(
    body: IO[bytes] | None,
    say: str | None,
    endpoint: str,
    delivery: str,
    request_id: str | None,
    deadline: float | None,
    as_json: bool,
    no_wait: bool,
    model: str | None,
    **given: Any,
) -> None:
    """Send one request, its JSON from the file BODY (- for stdin), and print what comes back.

    Over servers, --model and --name say which model to ask for; the options after them are for the model in this
    process.
    """
    if (body is None) == (say is None):
        raise click.UsageError("Give a BODY file or --say, one of the two.")
    from headrace.workers.models import served_name

    config = settings()
    log_to_stderr(config, quiet=True)
    if no_wait and config.embedded:
        raise click.UsageError("--no-wait needs servers: HEADRACE_AMQP_URL and HEADRACE_REDIS_URL are not set.")
    spec = spec_of(config, model, **given) if config.embedded else None
    asked: Body = body.read() if body is not None else {"messages": [{"role": "user", "content": say}]}
    wanted = given["name"] or (served_name(model) if model else None) if spec is None else None
    terms = {"model": wanted, "request_id": request_id, "delivery": delivery, "deadline": deadline}
    run(_submit(config, spec, endpoint, asked, terms, as_json=as_json, wait=not no_wait))


async def _submit(
    config: Settings,
    spec: ModelSpec | None,
    endpoint: str,
    body: Body,
    terms: dict[str, Any],
    *,
    as_json: bool,
    wait: bool,
) -> None:
    from headrace.client import Headrace

    async with Headrace.connect(config, spec=spec) as hr:
        stream = await hr.submit(endpoint, body, **terms)
        if not wait:
            click.echo(stream.request_id)
            return
        await _print(hr, stream, as_json=as_json)


async def _print(hr: Headrace, stream: Stream[Response], *, as_json: bool) -> None:
    """Prints the stream; a signal cancels the request and ends with its error."""
    stopping: list[asyncio.Task[None]] = []
    with signals(lambda number: stopping.append(asyncio.ensure_future(stream.cancel()))):
        async for chunk in stream:
            if as_json:
                click.echo(chunk.raw)
                continue
            click.secho(chunk.reasoning, dim=True, nl=False)
            click.echo(chunk.text, nl=False)
            for call in chunk.tool_calls:
                if call.function is not None:
                    name = f"\n{call.function.name} " if call.function.name else ""
                    click.secho(name + (call.function.arguments or ""), fg="cyan", nl=False)
        response = bytes((await stream.outcome()).response)
    if as_json or stream.job.delivery != "stream" or stream.job.endpoint == _ENDPOINTS[2]:
        click.echo(response)
    else:
        click.echo()


@click.command()
@click.option("--request-id", default=None, help="Only this request, up to its end.")
def tail(request_id: str | None) -> None:
    """Print every event of this client name (HEADRACE_CLIENT), as JSON lines, from now on. Ctrl-C ends it.

    Of requests whose events go the way of HEADRACE_VIA.
    """
    config = settings()
    log_to_stderr(config, quiet=True)
    run(_tail(config, request_id))


async def _tail(config: Settings, request_id: str | None) -> None:
    from headrace.client.connect import servers
    from headrace.protocol import jobs
    from headrace.protocol.jobs import EnvelopeError, ErrorEvent, FinalEvent

    async with (
        servers(config, name="headrace tail") as broker,
        broker.via(config.via).subscribe(f"{config.client}.#") as heard,
    ):
        click.echo(f"Listening to {config.client}.#", err=True)
        async for message in heard:
            try:
                events = jobs.decode_events(message.body)
            except EnvelopeError as error:
                click.echo(f"unreadable: {error}", err=True)
                continue
            for event in events:
                if request_id in (None, event.request_id):
                    click.echo(jobs.encode(event))
                    if request_id is not None and isinstance(event, FinalEvent | ErrorEvent):
                        return


@click.command()
@click.argument("request_id")
def result(request_id: str) -> None:
    """Print the outcome of a request of this client name (HEADRACE_CLIENT), while it is kept.

    Exit code 1 if it is an error or there is none.
    """
    config = settings()
    log_to_stderr(config, quiet=True)
    run(_result(config, request_id))


async def _result(config: Settings, request_id: str) -> None:
    from headrace.client import Headrace
    from headrace.client.connect import servers
    from headrace.protocol.jobs import FinalEvent, encode

    async with servers(config, name="headrace result") as broker, Headrace.connect(config, broker=broker) as hr:
        outcome = await hr.result(request_id)
    if outcome is None:
        raise click.ClickException(f"{request_id}: no outcome is kept for client {config.client!r}.")
    click.echo(bytes(outcome.response) if isinstance(outcome, FinalEvent) else encode(outcome))
    if not isinstance(outcome, FinalEvent):
        sys.exit(1)


@click.command()
@click.argument("request_id")
@click.option("--reason", default="cancelled by the client", show_default=True)
def cancel(request_id: str, reason: str) -> None:
    """Ask for a request of this client name (HEADRACE_CLIENT) to be stopped, wherever it is."""
    config = settings()
    log_to_stderr(config, quiet=True)
    run(_cancel(config, request_id, reason))


async def _cancel(config: Settings, request_id: str, reason: str) -> None:
    from headrace.client import Headrace
    from headrace.client.connect import servers

    async with servers(config, name="headrace cancel") as broker, Headrace.connect(config, broker=broker) as hr:
        await hr.cancel(request_id, reason=reason)
    click.echo(f"Asked for {request_id} to be cancelled.", err=True)
