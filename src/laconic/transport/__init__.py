"""Everything that talks: collectives, framed TCP, virtual workers; what is said is counted here."""

from torch.distributed import ProcessGroup

from laconic.transport.agreement import agree, agreement_bytes, rows_of
from laconic.transport.collectives import (
    CountedGroup,
    Everyone,
    Group,
    backend_for,
    check_alike,
    counterparts,
    exchange_addresses,
    own_group,
    place_of_texts,
    ranks_that_differ,
    release,
    silence_said,
    world,
    world_without,
)
from laconic.transport.connection import longest_message
from laconic.transport.faulty import Fault, Faults, FaultyCollectives, FaultyMailbox, FaultyTransport, WorkerDiedError
from laconic.transport.mailbox import QUESTION_HEAD_BYTES, Mailbox
from laconic.transport.silence import say
from laconic.transport.tcp_mailbox import TcpMailbox, open_mailbox
from laconic.transport.traffic import BESIDE, Count, Traffic, ring_bytes
from laconic.transport.transport import Collectives, Push, Transport
from laconic.transport.virtual import InProcess, in_process, silent_end
