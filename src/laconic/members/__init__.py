"""Members that join, leave, lag and come back: elastic outer steps under one server."""

from laconic.members.host import MemberServer
from laconic.members.member import Member, MemberStats, join, run_stats
from laconic.members.page import PageServer, prometheus_text
from laconic.members.tape import replay
