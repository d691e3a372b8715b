"""Hardware as data: chips, planes between them, prices; a source for each number. Knows no model."""

from tripool.planner.hardware.describe import Hardware, Plane, hardware_names, named_hardware, parse_hardware

__all__ = ["Hardware", "Plane", "hardware_names", "named_hardware", "parse_hardware"]
