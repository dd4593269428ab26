"""Everything that opens a socket: collectives, framed TCP, virtual workers; bytes are counted here."""

from torch.distributed import ProcessGroup

from laconic.transport.collectives import (
    CountedGroup,
    Everyone,
    Group,
    as_peer_error,
    backend_for,
    check_alike,
    check_connected,
    counterparts,
    exchange_addresses,
    naming_lost_peers,
    own_group,
    place_of_texts,
    ranks_that_differ,
    release,
    texts,
    values_differ,
    world,
    world_without,
)
from laconic.transport.connection import Connection, Kind, Message, longest_message, payload_of
from laconic.transport.faulty import Fault, Faults, FaultyCollectives, FaultyMailbox, WorkerDiedError
from laconic.transport.flows import Flow, move_some
from laconic.transport.interfaces import (
    Interface,
    address_in_use,
    address_to_be_used,
    address_towards,
    interface_at,
    interfaces,
)
from laconic.transport.mailbox import REQUEST_HEAD_BYTES, Mailbox, TcpMailbox, open_mailbox, warn
from laconic.transport.packing import pack, unpack
from laconic.transport.rendezvous import Acceptor, Address, connect
from laconic.transport.traffic import BESIDE, Count, Traffic, ring_bytes
from laconic.transport.transport import Collectives, Push, Transport, agree, agreement_bytes, rows_of
from laconic.transport.virtual import InProcess, in_process, silent_end
