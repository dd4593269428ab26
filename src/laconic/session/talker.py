"""Where messages leave: one after the other, in an order that all workers share."""

from laconic.paths import PhaseClock, Said, Work
from laconic.paths.path import Speech


class Talker:
    """Sends what a path says and hands it what was heard."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def drive(self, work: Work, speech: Speech) -> Said | None:
        """Go through a speech to its end; what it returns."""
        heard = None
        try:
            while True:
                message = speech.send(heard)
                with self._clock.time("exchange", work.device):
                    heard = message()
        except StopIteration as end:
            said: Said | None = end.value
            return said
