"""The engine room: runs one batch on one device. `colocated` is pure; what needs torch is imported by path."""
