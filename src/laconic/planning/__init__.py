"""Say beforehand what pays: measure computing, links and the exchange itself, predict, rank by time to accuracy."""

from laconic.planning.answer import Measured, Plan, PlanRow, answer, rate_text
from laconic.planning.candidates import AUTOMATIC, CANDIDATES, Candidate, candidate
from laconic.planning.compute import Compute
from laconic.planning.link_costs import LinkCost, LinkCosts, Messages, measure_link_costs, meet, slowest
from laconic.planning.pairs import PairLink
from laconic.planning.penalties import Penalty, kind_of, optimizer_name, penalty_of
from laconic.planning.prediction import Prediction, predict
from laconic.planning.rehearsal import Rehearsal, part_of, rehearse
