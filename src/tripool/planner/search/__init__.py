"""The search: which deployments of a model on so many chips keep the promises, and which of them carries most."""

from tripool.planner.search.ask import Ask
from tripool.planner.search.found import Deployment, Lever, Plan, Point
from tripool.planner.search.plan import make_plan

__all__ = ["Ask", "Deployment", "Lever", "Plan", "Point", "make_plan"]
