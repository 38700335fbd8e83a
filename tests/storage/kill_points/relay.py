"""A relay before a server on the loopback interface, which kills a client at its n-th request."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time

_FORK = multiprocessing.get_context("fork")


class Relay:
    """Runs in a process of its own, from construction to `close`."""

    def __init__(self, server: str):
        self._server = server
        self._pid, self._left, self._after = (_FORK.Value("l", value) for value in (0, -1, 0))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._process = _FORK.Process(target=self._accept, daemon=True)
        self._process.start()

    def close(self):
        self._process.kill()
        self._process.join(10)
        self._listener.close()

    def arm(self, pid: int, at: int, after: bool):
        """Kills a process at its request number `at`, from 0: before the server gets it, or after it has answered."""
        self._pid.value, self._after.value, self._left.value = pid, int(after), at

    def disarm(self):
        self._left.value = -1

    def _accept(self):
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(tuple(self._server.rsplit(":", 1)))
            turn = {"of_server": True, "is_last": False}
            for ends in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass_on, args=(*ends, turn), daemon=True).start()

    def _pass_on(self, source, target, from_server, turn):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if from_server and turn["is_last"]:
                    self._end(turn)
                elif not from_server and turn["of_server"] and self._is_last():
                    if self._after.value:
                        turn["is_last"] = True
                    else:
                        self._end(turn)
                turn["of_server"] = from_server
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _is_last(self) -> bool:
        with self._left.get_lock():
            if self._left.value < 0:
                return False
            self._left.value -= 1
            return self._left.value < 0

    def _end(self, turn):
        turn["is_last"] = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid.value, signal.SIGKILL)
        time.sleep(0.01)
        raise OSError("the client has ended")
