"""Every process imports the protocol: that has to stay light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json, sys, time
started = time.process_time()
import headrace.protocol, headrace.protocol.wire
print(json.dumps([time.process_time() - started, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_the_protocol_imports_no_transport_and_no_model_library_and_is_there_at_once() -> None:
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    seconds, modules = json.loads(probe.stdout)
    assert not {"torch", "transformers", "tokenizers", "numpy", "aio_pika", "redis", "asyncio"} & set(modules)
    assert seconds < 0.5
