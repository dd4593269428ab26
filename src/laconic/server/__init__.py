"""Who answers: the owners of shares, and ranks that hold no data and serve."""

from laconic.server.owner import Owner
from laconic.server.serve import ServerStats, serve
