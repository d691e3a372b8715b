"""Hardware as data: chips, the planes between them, prices; a source for each number."""

from tripool.planner.hardware.describe import Hardware, Plane, hardware_names, named_hardware, parse_hardware

__all__ = ["Hardware", "Plane", "hardware_names", "named_hardware", "parse_hardware"]
