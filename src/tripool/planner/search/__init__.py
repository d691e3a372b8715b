"""Search: which deployments of a model on so many chips meet the SLO, and which of them has the highest throughput."""

from tripool.planner.search.goal import PlanGoal
from tripool.planner.search.plan import make_plan
from tripool.planner.search.results import Deployment, Lever, Plan, Point

__all__ = ["PlanGoal", "Deployment", "Lever", "Plan", "Point", "make_plan"]
