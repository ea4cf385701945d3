"""Fetches files over HTTP for untrusted clients: with limits on size, time and redirects, and only from public
addresses.

A name is resolved once, and the connection is made to the address that was checked, so a name that later resolves to
another address has no effect. Each redirect is checked like the first URL.
"""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Collection
from urllib.parse import SplitResult, urljoin, urlsplit

from quire.multimodal.addresses import is_public
from quire.multimodal.pictures import MediaError

MOST_BYTES = 32 << 20
MOST_SECONDS = 15.0
MOST_REDIRECTS = 5
_READ_AT_ONCE = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


def fetch(
    url: str, domains: Collection[str] = (), most_bytes: int = MOST_BYTES, seconds: float = MOST_SECONDS
) -> bytes:
    """domains: the allowed domains, also at private addresses; if empty, all domains at public addresses are allowed.
    Raises MediaError."""
    deadline = time.monotonic() + seconds
    for _ in range(MOST_REDIRECTS + 1):
        found = _get(url, domains, most_bytes, deadline)
        if isinstance(found, bytes):
            return found
        url = found
    raise MediaError(f"the URL is redirected more than {MOST_REDIRECTS} times")


def _get(url: str, domains: Collection[str], most_bytes: int, deadline: float) -> bytes | str:
    """Return the content, or the URL to which this one redirects."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as error:
        raise MediaError("the URL is not valid") from error
    if parts.scheme not in ("http", "https") or not host:
        raise MediaError("the URL must begin with http:// or https:// and name a host")
    if domains and host.lower() not in {domain.lower() for domain in domains}:
        raise MediaError("the URL's domain is not among allowed_media_domains")
    port = port or (443 if parts.scheme == "https" else 80)
    address = _address(host, port, private=bool(domains))
    left = deadline - time.monotonic()
    if left <= 0:
        raise MediaError("the URL took too long to fetch")
    connection = _Connection(host, port, address, parts.scheme == "https", left)
    # A server that sends a byte now and then would never trigger a socket's timeout.
    timer = threading.Timer(left, connection.abort)
    timer.daemon = True
    timer.start()
    try:
        return _read(connection, parts, url, most_bytes, deadline)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError("the URL cannot be fetched") from error
    finally:
        timer.cancel()
        connection.close()


def _read(connection: "_Connection", parts: SplitResult, url: str, most_bytes: int, deadline: float) -> bytes | str:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", target, headers={"User-Agent": "quire", "Accept-Encoding": "identity"})
    response = connection.getresponse()
    if response.status in _REDIRECTS and (location := response.getheader("Location")):
        return urljoin(url, location)
    if response.status != 200:
        raise MediaError(f"the URL's server answers with status {response.status}")
    length = response.getheader("Content-Length")
    if length is not None and length.isdigit() and int(length) > most_bytes:
        raise MediaError(f"the file has more than {most_bytes} bytes")
    pieces = []
    size = 0
    while piece := response.read1(_READ_AT_ONCE):
        size += len(piece)
        pieces.append(piece)
        if size > most_bytes:
            raise MediaError(f"the file has more than {most_bytes} bytes")
    if time.monotonic() > deadline:  # then the data ended because the connection was aborted
        raise MediaError("the URL took too long to fetch")
    return b"".join(pieces)


def _address(host: str, port: int, private: bool) -> str:
    """Return an address of the host. Raises MediaError if any of its addresses is private, unless these are allowed."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MediaError("the URL's host cannot be resolved") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not private and not all(map(is_public, addresses)):
        raise MediaError("the URL's host is at a private address, which only allowed_media_domains permits")
    return addresses[0]


class _Connection(http.client.HTTPConnection):
    """A connection to a checked address, for a given host name."""

    def __init__(self, host: str, port: int, address: str, secure: bool, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._address = address
        self._secure = secure
        self._raw: socket.socket | None = None  # `sock` is None as soon as the response owns it
        if secure:
            self.default_port = 443

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._secure:
            self._raw = self.sock  # the handshake may also take long
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)
        self._raw = self.sock

    def abort(self) -> None:
        if self._raw is not None:
            with contextlib.suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)
