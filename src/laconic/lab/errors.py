"""What goes wrong with a lab."""

from laconic.errors import LaconicError


class LabError(LaconicError):
    """A lab cannot be made, found or asked for like this."""
