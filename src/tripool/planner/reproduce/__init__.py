"""Published tables and ablations of CloudMatrix-Infer beside predictions of the cost model. Pure; nothing is tuned
here.

Only numbers from `published.toml` and the planner's rows are called published.
"""

from tripool.planner.reproduce.ablations import ablation_tables
from tripool.planner.reproduce.curves import Figure, figures
from tripool.planner.reproduce.lines import Table, TableLine, summarise
from tripool.planner.reproduce.pool import pool_tables
from tripool.planner.reproduce.serving import serving_tables
from tripool.planner.reproduce.system import cloudmatrix, h800

__all__ = ["Figure", "TableLine", "Table", "cloudmatrix_figures", "cloudmatrix_tables", "summarise"]


def cloudmatrix_tables() -> list[Table]:
    system = cloudmatrix()
    return [*serving_tables(system), *ablation_tables(system, h800()), *pool_tables(system)]


def cloudmatrix_figures() -> list[Figure]:
    return figures(cloudmatrix(), h800())
