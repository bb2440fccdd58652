"""The command line. What a command needs is imported when it runs, so that each starts fast."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click

from headrace.cli.batch import batch
from headrace.cli.dead import dead
from headrace.cli.demo import demo
from headrace.cli.operate import doctor, topology
from headrace.cli.requests import cancel, result, submit, tail
from headrace.cli.worker import worker


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "from a folder"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(_version(), prog_name="headrace")
def main() -> None:
    """LLM inference through queues: RabbitMQ in, Redis token streams, text out on client topics.

    Without HEADRACE_AMQP_URL and HEADRACE_REDIS_URL everything runs in one process.
    """


for command in (demo, batch, worker, submit, tail, result, cancel, dead, topology, doctor):
    main.add_command(command)
