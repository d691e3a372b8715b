"""Published rows beside predictions: reading a table, predicting each row, judging the errors, refitting constants."""

from tripool.planner.rows.judge import Bar, Judged, Verdict, judge, verdicts
from tripool.planner.rows.predict import Prediction, hardware_of, predict
from tripool.planner.rows.read import Row, bundled_rows, parse_rows

__all__ = [
    "Bar", "Judged", "Prediction", "Row", "Verdict", "bundled_rows", "hardware_of", "judge", "parse_rows", "predict",
    "verdicts",
]  # fmt: skip
