"""Who adds up: the owners of shares, and ranks that hold no data and serve."""

from laconic.server.client import ServerClient, connect_to_servers
from laconic.server.owner import Owner, owner_state, server_states
from laconic.server.serve import TIMEOUT_S, ServerStats, check_wait, serve, served_scheme, worker_terms
from laconic.server.vote import take_sides
