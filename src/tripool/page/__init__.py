"""HTML pages and SVG plots for reports, as text. Pure; opens no file and measures nothing."""

from tripool.page.html import html_page, plots, table, tiles
from tripool.page.svg import Plot

__all__ = ["Plot", "html_page", "plots", "table", "tiles"]
