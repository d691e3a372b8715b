"""Published rows beside predictions: reading a table, predicting each row, evaluating errors."""

from tripool.planner.rows.accuracy import Bar, Compared, Verdict, compare_rows, verdicts
from tripool.planner.rows.predict import Prediction, hardware_of, predict
from tripool.planner.rows.read import Row, bundled_rows, parse_rows

__all__ = [
    "Bar", "Compared", "Prediction", "Row", "Verdict", "bundled_rows", "compare_rows", "hardware_of", "parse_rows",
    "predict", "verdicts",
]  # fmt: skip
