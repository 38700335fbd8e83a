"""Programs on the network that are no ranks: what they try at a port, and how it ends."""

import socket
import threading
import time

END_S = 8.0


def ends(client, within_s=END_S):
    """The seconds until the other side closes the connection. What it sends before is read."""
    start = time.monotonic()
    client.settimeout(within_s)
    try:
        while client.recv(1 << 16):
            pass
    except TimeoutError:
        raise AssertionError(f"still open after {within_s} s") from None
    except ConnectionError:
        pass
    return time.monotonic() - start


def tried(address, sent=b"", within_s=END_S):
    """Sends these bytes to an address, and returns the seconds until the connection is closed."""
    with socket.create_connection(address, 5) as client:
        try:
            client.sendall(sent)
        except ConnectionError:
            return 0.0
        return ends(client, within_s)


def dripped(address, byte=b"\0", every_s=0.2, within_s=END_S, first=b""):
    """As `tried`, with a byte now and then, so that the connection never is silent. first: what is sent at once."""
    start = time.monotonic()
    with socket.create_connection(address, 5) as client:
        try:
            client.sendall(first)
            while time.monotonic() - start < within_s:
                client.sendall(byte)
                time.sleep(every_s)
        except ConnectionError:
            return time.monotonic() - start
    raise AssertionError(f"still open after {within_s} s")


class Eavesdropper:
    """Stands between a client and an address, passes everything on, and keeps what the first client has said."""

    def __init__(self, address):
        self._address, self.heard = address, b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        client, _ = self._listener.accept()
        server = socket.create_connection(self._address, 5)
        threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True).start()
        self._pass_on(client, server, True)

    def _pass_on(self, source, target, is_heard):
        try:
            while data := source.recv(1 << 16):
                if is_heard:
                    self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        self._listener.close()
