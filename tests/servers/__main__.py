"""Run both servers until SIGTERM or Ctrl-C: `python -m tests.servers`. The lines that it prints are for `source`."""

import signal
import sys

from tests.servers import open_rabbitmq, open_redis


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # leaves by way of the blocks below, which end the servers
    with open_rabbitmq() as rabbitmq, open_redis() as redis:
        lines = [
            f"export HEADRACE_TEST_AMQP_URL={rabbitmq.url}",
            f"export HEADRACE_TEST_MANAGEMENT_URL={rabbitmq.management_url}",
            f"export HEADRACE_TEST_REDIS_URL={redis.url}",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main()
