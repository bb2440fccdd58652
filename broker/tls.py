"""How a connection is encrypted, and how its server is known."""

from __future__ import annotations

import ssl
from pathlib import Path


def context(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """What a client goes by: the authorities in ``ca``, or the system's; its own certificate and key, if it has one.

    The server's certificate and its host name are always checked. Raises OSError for a file that cannot be read,
    ssl.SSLError for one that holds something else.
    """
    made = ssl.create_default_context(cafile=None if ca is None else str(ca))
    if cert is not None:
        made.load_cert_chain(cert, key)
    return made
