"""One bucket's way through a path: its next message, and what was heard."""

from dataclasses import dataclass
from typing import Any

from laconic.paths import Path, Said, Work
from laconic.paths.path import Message, Speech


@dataclass
class Talk:
    """What is in flight of a bucket; `message` is the next one to leave, None at the end, when `said` is known."""

    work: Work
    path: Path
    speech: Speech
    message: Message | None = None
    said: Said | None = None
    was_late: bool = False  # what was heard last is without what this worker said

    def go_on(self, heard: Any = None) -> None:
        """Hand the path what all said, and have its next message; `heard` is None at the beginning."""
        try:
            self.message = self.speech.send(heard)
        except StopIteration as end:
            self.message = None
            self.said = end.value
