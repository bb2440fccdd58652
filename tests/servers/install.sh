#!/bin/sh
# Makes sure that the tests can have a real RabbitMQ and a real Redis, or says how to get there.
set -eu
PATH="$PATH:/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"

missing=""
[ -n "${HEADRACE_TEST_AMQP_URL:-}" ] || command -v rabbitmq-server >/dev/null || missing="$missing rabbitmq-server"
[ -n "${HEADRACE_TEST_REDIS_URL:-}" ] || command -v redis-server >/dev/null || missing="$missing redis-server"
if [ -z "$missing" ] || docker info >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    cat >&2 <<TELL
The tests need a RabbitMQ and a Redis, and this machine lacks:$missing.
Any one of these will do:
  start a Docker engine
  sudo apt-get install rabbitmq-server redis-server     (or: brew install rabbitmq redis)
  export HEADRACE_TEST_AMQP_URL=amqp://... HEADRACE_TEST_MANAGEMENT_URL=http://... HEADRACE_TEST_REDIS_URL=redis://...
Without them, 'make test-fast' runs what needs no server.
TELL
    exit 1
fi

echo "installing$missing"
# The programs are wanted, not the machine-wide services that Debian's packages start: 101 forbids that.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086  # a list of words
apt-get -qq install --yes --no-install-recommends -o DPkg::Lock::Timeout=120 $missing >/dev/null
