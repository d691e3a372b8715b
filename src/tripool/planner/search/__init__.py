"""Search: which deployments of a model on so many chips meet the SLO, and which of them has the highest throughput."""

from tripool.planner.search.goal import Lengths, PlanGoal
from tripool.planner.search.plan import best_deployment, make_plan
from tripool.planner.search.results import Cell, Deployment, Lever, Plan, Point

__all__ = ["Cell", "Deployment", "Lengths", "Lever", "Plan", "PlanGoal", "Point", "best_deployment", "make_plan"]
