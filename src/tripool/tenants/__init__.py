"""Tenants: API keys, limits and usage. Pure names only.

Modules that do I/O are imported by name: `tenants.key_store` (the file), `tenants.key_watcher` (reloads it when it
changes), `tenants.usage_log` (records usage).
"""

from tripool.tenants.key_table import ANONYMOUS, OPEN_CALLER, Caller, Key, KeyTable, Limits, Tenant

__all__ = ["ANONYMOUS", "OPEN_CALLER", "Caller", "Key", "Limits", "KeyTable", "Tenant"]
