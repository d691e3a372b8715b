"""The published tables and ablations of CloudMatrix-Infer beside what the cost model says. Pure; nothing is tuned here.

Only numbers of `published.toml` and of the planner's rows are called published.
"""

from tripool.planner.reproduce.ablations import ablation_tables
from tripool.planner.reproduce.curves import Figure, figures
from tripool.planner.reproduce.lines import Line, Table, summarise
from tripool.planner.reproduce.pool import pool_tables
from tripool.planner.reproduce.serving import serving_tables
from tripool.planner.reproduce.system import cloudmatrix, h800

__all__ = ["Figure", "Line", "Table", "cloudmatrix_figures", "cloudmatrix_tables", "summarise"]


def cloudmatrix_tables() -> list[Table]:
    system = cloudmatrix()
    return [*serving_tables(system), *ablation_tables(system, h800()), *pool_tables(system)]


def cloudmatrix_figures() -> list[Figure]:
    return figures(cloudmatrix(), h800())
