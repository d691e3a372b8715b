"""Published rows beside predictions: reads tables of results, predicts each row, evaluates the errors."""

from tripool.planner.rows.judging import (
    CALIBRATION,
    Band,
    Compared,
    Verdict,
    band_of,
    bundled_rows,
    compare_rows,
    fixed_by,
    unseen,
    verdicts,
)
from tripool.planner.rows.predicting import Prediction, hardware_of, model_of, predict
from tripool.planner.rows.reading import COLUMNS, Row, parse_rows

__all__ = [
    "CALIBRATION", "COLUMNS", "Band", "Compared", "Prediction", "Row", "Verdict", "band_of", "bundled_rows",
    "compare_rows", "fixed_by", "hardware_of", "model_of", "parse_rows", "predict", "unseen", "verdicts",
]  # fmt: skip
