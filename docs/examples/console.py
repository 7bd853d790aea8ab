"""What the example shows on a terminal while it works: a live line."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One line that is rewritten in place; plain lines now and then where there is no terminal."""

    def __init__(self) -> None:
        self.is_live = sys.stdout.isatty()
        self._next_line = 0.0

    def show(self, text: str) -> None:
        """Say what is going on; called as often as anything changes."""
        if self.is_live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]}\033[K", end="", flush=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(text, flush=True)

    def finish(self, text: str) -> None:
        """Leave a last word in place of the live line."""
        print(f"\r{text}\033[K" if self.is_live else text, flush=True)
        self._next_line = 0.0

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Count the seconds of something that cannot tell how far it is."""
        start = time.monotonic()
        is_done = threading.Event()

        def tick() -> None:
            while not is_done.wait(0.5):
                self.show(f"{text} ... {time.monotonic() - start:.0f} s")

        self._next_line = 0.0
        self.show(f"{text} ...")
        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            is_done.set()
            ticker.join()
        self.finish(f"{text}: {time.monotonic() - start:.1f} s")
