"""Engines: run one batch on one device. `scheduler` is pure; what needs torch is imported by path."""
