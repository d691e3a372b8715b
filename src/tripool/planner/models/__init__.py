"""Models as data: shapes from a Hugging Face config, and their sizes and costs. Independent of hardware."""

from tripool.planner.models.config import model_names, named_model, read_config
from tripool.planner.models.shape import Gqa, Linear, Mla, ModelShape, Moe

__all__ = ["Gqa", "Linear", "Mla", "ModelShape", "Moe", "model_names", "named_model", "read_config"]
