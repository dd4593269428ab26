"""Say beforehand what pays: measure computing, links and the exchange itself, predict, rank by time to accuracy."""

from laconic.planning.answer import Measured, Plan, PlanRow, answer
from laconic.planning.auto import AutoFollower, AutoSession, check_auto
from laconic.planning.candidates import (
    AUTOMATIC,
    CANDIDATES,
    Candidate,
    Penalty,
    candidate,
    kind_of,
    optimizer_name,
    penalty_of,
)
from laconic.planning.links import (
    EchoTimes,
    LinkCost,
    LinkCosts,
    Messages,
    PairLink,
    PairProbe,
    measure_link_costs,
    measure_pairs,
    meet,
    parse_rate,
    rate_text,
    slowest,
)
from laconic.planning.plan import plan
from laconic.planning.prediction import Compute, Prediction, Rehearsal, predict
from laconic.planning.rehearsal import part_of, rehearse
